"""The command `findings`: the current findings of a lake as JSON, CSV or Parquet."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.errors import CannotRun
from spark.rules import current_findings, sink_audit
from spark.rules.kinds import kinds_of
from spark.settings import CSV, PARQUET, FindingsOptions, glob_regex
from spark.tables import lake_version
from spark.tables.lake import Lake

_EXISTS: Final = "PATH_ALREADY_EXISTS"


def export(spark: SparkSession, options: FindingsOptions) -> Iterator[str]:
    """Yield the lines of JSON or CSV; no lines for Parquet, which is written into a folder.

    In CSV the coordinates are JSON. The findings are those of the last run's report, unless the options say since when.
    CannotRun if the lake has no finished run, or is of an earlier version.
    """
    found = current_findings.in_order(selected(Lake(spark, options.lake), options))
    if options.format == PARQUET:
        _write(found, options.output)
    elif options.format == CSV:
        listed = ("coordinates", "sink_coordinates")
        texts = {name: F.to_json(name, {"ignoreNullFields": "false"}) for name in listed}
        rows = found.withColumns(texts).select(*current_findings.FIELDS)
        yield from csv_lines(current_findings.FIELDS, rows.toLocalIterator())
    else:
        yield from (f"{row[0]}\n" for row in found.select(current_findings.as_json()).toLocalIterator())


def selected(lake: Lake, options: FindingsOptions) -> DataFrame:
    """Return the current findings that the options select: → current_findings.FIELDS."""
    kinds = kinds_of("--kind", options.kinds)
    lake_version.check(lake)
    since_ms = since(lake, options.since_ms)
    findings = sink_audit.with_findings(lake, lake.read("findings"), since_ms)
    found = current_findings.by_finding(current_findings.by_hour(findings, since_ms))
    if options.topics:
        found = found.where(F.col("topic").rlike(glob_regex(options.topics)))
    return found.where(F.col("kind").isin(*kinds))


def since(lake: Lake, since_ms: int | None) -> int:
    """Return the given time (ms), else the start of the window of the last run; CannotRun without a finished run.

    The newest number is read from Delta's statistics; by that number Delta prunes the files of all other runs.
    """
    runs = lake.read("runs")
    newest = runs.agg(F.max("run")).collect()[0][0]
    if newest is None:
        raise CannotRun(f"--lake {lake.root} has no finished run: give the --lake of a run")
    if since_ms is not None:
        return since_ms
    (row,) = runs.where(F.col("run") == newest).select("report").collect()
    return int(datetime.fromisoformat(json.loads(row["report"])["run"]["window_from"]).timestamp() * 1000)


def _write(found: DataFrame, folder: str) -> None:
    """Write Parquet files into a new folder; CannotRun if the folder exists."""
    try:
        found.write.parquet(folder)
    except AnalysisException as error:
        if error.getCondition() != _EXISTS:
            raise
        raise CannotRun(f"--output {folder} exists: give a new folder") from None


def csv_lines(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield a line of names, then a line for each row (RFC 4180)."""
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(names)
    for row in rows:
        writer.writerow(row)
        yield written.getvalue()
        written.seek(0)
        written.truncate()
    yield written.getvalue()
