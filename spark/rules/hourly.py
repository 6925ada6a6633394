"""The balance of the last finished run in the lake: the tables `hourly_balance` and `hourly_records`.

A run writes its sums under its own number, and keeps those of the last finished run until the next one has finished: a
run that is interrupted afterwards is repeated from these. A run that has counted the same writes nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark.engine import frames
from spark.rules.balance import Balance, ByHour, RecordCounts
from spark.rules.record_counts import NO_PARTITION
from spark.tables import hours, schemas
from spark.tables.lake import Lake

STORED: Final = ("hours", "adjustment", "record_counts")
"""The fields of a balance that are in the tables, and not in the summary of its run."""


def load(lake: Lake, counted_run: int | None) -> dict[str, Any]:
    """Read the fields STORED of a balance that the run `counted_run` has written; without a run there are none."""
    if counted_run is None:
        return {}
    found: dict[str, ByHour] = {"hours": {}, "adjustment": {}}
    for row in _of_run(lake, "hourly_balance", counted_run).collect():
        counts = {name: row[name] for name in schemas.HOURLY_COUNTS if row[name]}
        by_hour = found["adjustment" if row["is_adjustment"] else "hours"]
        by_hour.setdefault(row["hour"], {})[row["topic"]] = counts
    record_counts: RecordCounts = {}
    for row in _of_run(lake, "hourly_records", counted_run).collect():
        partition = NO_PARTITION if row["partition"] is None else row["partition"]
        record_counts.setdefault(row["hour"], {}).setdefault(row["topic"], {})[str(partition)] = row["records"]
    return {**found, "record_counts": record_counts}


def as_stored(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields STORED of a balance (Balance.document) as `load` reads them: without zeros."""
    found = {
        name: {
            hour: {topic: {key: count for key, count in counts.items() if count} for topic, counts in topics.items()}
            for hour, topics in document[name].items()
        }
        for name in ("hours", "adjustment")
    }
    return {**found, "record_counts": document["record_counts"]}


def _of_run(lake: Lake, name: str, counted_run: int) -> DataFrame:
    rows = lake.read(name).where(F.col("run") == counted_run)
    return rows.withColumn("hour", hours.as_text(F.col("accepted_hour")))


def store(
    lake: Lake, balance: Balance, last_run: Mapping[str, Any] | None, run: int, *, commits_of: int | None = None
) -> int:
    """Write the balance of a run, and return the run that has written it: the last one, if nothing has changed.

    `last_run` is the last finished run with its fields STORED, `commits_of` the run under whose number this process
    commits, if that is another one.
    """
    document = balance.document()
    counted_run = None if last_run is None else last_run["counted_run"]
    if counted_run is not None and last_run is not None and all(document[name] == last_run[name] for name in STORED):
        return int(counted_run)
    rows = {"hourly_balance": list(_balance_rows(balance, run)), "hourly_records": list(_record_rows(balance, run))}
    kept = "true" if counted_run is None else f"run <> {counted_run}"
    for name, of_table in rows.items():
        columns = {**schemas.TABLES[name], "accepted_hour": "string"}
        frame = frames.rows_of(lake.spark, frames.ddl(columns), of_table)
        frame = frame.withColumn("accepted_hour", hours.of_text(F.col("accepted_hour"))).coalesce(1)
        lake.replace(name, frame, kept, run if commits_of is None else commits_of)
    return run


def _balance_rows(balance: Balance, run: int) -> Iterator[dict[str, Any]]:
    for is_adjustment, by_hour in ((False, balance.hours), (True, balance.adjustment)):
        for hour, topics in by_hour.items():
            for topic, counts in topics.items():
                key = {"run": run, "accepted_hour": hour, "topic": topic, "is_adjustment": is_adjustment}
                yield key | {name: counts.get(name, 0) for name in schemas.HOURLY_COUNTS}


def _record_rows(balance: Balance, run: int) -> Iterator[dict[str, Any]]:
    for hour, topics in balance.record_counts.items():
        for topic, partitions in topics.items():
            for text, records in partitions.items():
                partition = None if int(text) == NO_PARTITION else int(text)
                yield {"run": run, "accepted_hour": hour, "topic": topic, "partition": partition, "records": records}
