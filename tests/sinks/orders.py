"""One topic in three tables of PostgreSQL, filled by the examples, which are killed with -9 at their worst moments."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from deploy.places import ROOT
from tests.sinks.killed import BATCH, NEVER, STEPS
from tests.sinks.postgres import USER, Postgres
from tests.spark.history import History, Writer, Written

EVENTS: Final = 5 * BATCH
TIMEOUT_S: Final = 60.0

Fault = tuple[str, str, str | None, str]
"""A finding: the sink, the kind, the cause, and the id (in hexadecimal digits) or the partition."""

TWICE: Final = ("twice_in_sink", "repeated")
MISSING: Final = ("missing_in_sink", None)
SAID: Final = {"transaction": None, "store-first": TWICE, "commit-first": MISSING}
"""Kind and cause of what the audit finds in the table of each program, None for nothing."""


class Orders:
    """A topic of events, and the tables of the three programs."""

    def __init__(self, history: History, postgres: Postgres, slot: int, at_ms: int) -> None:
        self.postgres, self.history = postgres, history
        self.topic = history.topic(f"{history.namespace}-orders")
        writer = Writer(slot, 900, 0, "orders:1")
        keys = [f"order-{n}" for n in range(EVENTS)]
        producer = history.transactional(writer)
        self.written: list[Written] = history.deliver(
            producer, writer, self.topic, keys, at=at_ms, ts=at_ms, value=b'{"total":12.5}'
        )

    def table(self, program: str) -> str:
        return f"orders_{program.replace('-', '_')}_{self.history.now_ms}"

    def fill(self) -> None:
        """Let each program fill its table: it is killed at each of its moments, and then runs to the end."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._fill, STEPS))

    def rule(self, program: str, late_s: int) -> str:
        """Return the rule for a program's table, with the password in the file `password` beside the rules."""
        return (
            f'[[sinks]]\nname = "{program}"\ntopics = ["{self.topic}"]\nformat = "jdbc"\n'
            f'url = "{self.postgres.jdbc_url}"\ntable = "{self.table(program)}"\nuser = "{USER}"\n'
            'password_file = "password"\nid = "event_id"\nevent_time = "created_at"\narrived = "loaded_at"\n'
            f"late_s = {late_s}\nexclusive = true\n"
        )

    def rows(self, program: str) -> Counter[str]:
        """Count the rows of each id in a program's table."""
        with self.postgres.connect() as connection:
            statement = f"SELECT encode(event_id, 'hex') FROM {self.table(program)}"
            return Counter(id for (id,) in connection.execute(statement.encode()).fetchall())

    def faults(self) -> set[Fault]:
        """Return what is wrong with the tables, by their rows."""
        found: set[Fault] = set()
        for program in STEPS:
            rows = self.rows(program)
            for id in (one.id.hex() for one in self.written):
                if rows[id] != 1:
                    found.add((program, *(TWICE if rows[id] else MISSING), id))
        return found

    def _fill(self, program: str) -> None:
        for step in STEPS[program]:
            with self._started(program, step) as child:
                assert child.wait(TIMEOUT_S) == -signal.SIGKILL, step
        with self._started(program, NEVER) as child:
            deadline = time.monotonic() + TIMEOUT_S
            while not self.rows(program)[self.written[-1].id.hex()]:
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)

    @contextlib.contextmanager
    def _started(self, program: str, step: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, "FENCEPOST_KAFKA": self.history.bootstrap, **self.postgres.variables}
        command = [sys.executable, "-m", "tests.sinks.killed", program, step, self.topic, self.table(program)]
        with subprocess.Popen(command, cwd=ROOT, env=environment) as child:
            try:
                yield child
            finally:
                child.kill()
