"""Progress: a line that is updated on a terminal, log lines elsewhere."""

import io
import re
import time

from pyspark.sql import SparkSession

from spark.cli.console import REFRESH_S, Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_lines_with_their_time() -> None:
    stream = io.StringIO()
    Console(stream)("run 1: 5 offsets to read")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO run 1: 5 offsets to read\n", stream.getvalue())


def test_a_terminal_shows_the_number_of_finished_tasks(spark: SparkSession) -> None:
    stream = Terminal()
    console = Console(stream)
    with console.watching(spark):
        console("classify ids")
        deadline = time.monotonic() + 60
        while "tasks" not in stream.getvalue():
            assert time.monotonic() < deadline
            # The tasks sleep for longer than the interval of the updates.
            spark.range(2).selectExpr(f"reflect('java.lang.Thread', 'sleep', {int(REFRESH_S * 2000)}L)").collect()
    assert re.search(r"\d+\.\ds  classify ids\n", stream.getvalue())
    assert re.search(r"classify ids: \d+ of \d+ tasks", stream.getvalue())
    assert stream.getvalue().endswith("\r\x1b[K")
