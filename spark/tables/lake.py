"""The Delta tables of a lake, and writing to them once for each run."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from spark.errors import CannotRun
from spark.reading import wire_expressions
from spark.reading.decode import EVENT
from spark.tables import deliveries
from spark.tables.hours import sql

WRITER: Final = "fencepost"
"""Delta's `txnAppId`: with the run's number as `txnVersion`, a write that is there already is left out."""

COORDINATES: Final = (
    "array<struct<topic: string, partition: int, offset: bigint, timestamp: bigint, slot: int, pid: bigint, "
    "epoch: int, instance: string, cause: string>>"
)

FINDING: Final = {
    "scope": "string",
    "accepted_hour": "timestamp",
    "kind": "string",
    "cause": "string",
    "id": "binary",
    "key": "string",
    "topic": "string",
    "partition": "int",
    "count": "bigint",
    "first_offset": "bigint",
    "last_offset": "bigint",
    "last_ms": "bigint",
    "coordinates": COORDINATES,
    "fingerprint": "binary",
    "run": "bigint",
}
"""A finding. `scope`: `hour` (of the ids of one hour), `ids` (over all hours), `log` (of the logs themselves).
`run` found it, null in lakes of before.

In the scope `ids` a row without kind says that the findings of the hours about this id do not hold.
"""

PROGRESS: Final = {
    "run": "bigint",
    "frozen_ms": "bigint",
    "role": "string",
    "topic": "string",
    "partition": "int",
    "topic_id": "string",
    "audited": "boolean",
    "compacted": "boolean",
    "recreated_at_ms": "bigint",
    "first": "bigint",
    "start": "bigint",
    "end": "bigint",
    "last_stable": "bigint",
    "high_watermark": "bigint",
    "complete_since_ms": "bigint",
    "decided_until_ms": "bigint",
    "gaps": "array<struct<first: bigint, last: bigint, cause: string, seen_ms: bigint>>",
    "blocking_transaction": (
        "struct<producer_id: bigint, epoch: int, start_offset: bigint, transactional_id: string, since_ms: bigint>"
    ),
    "options": "string",
    "guarantees": "array<struct<first: bigint, guarantee: string>>",
    "later_end": "bigint",
    "caught_up_run": "bigint",
    "behind_run": "bigint",
    "behind_end": "bigint",
    "first_record_ms": "bigint",
    "leader_epoch": "int",
}

PUBLISHED: Final = {"finding_id": "string", "value": "string", "sent": "boolean"}
"""A finding as the topic of findings has it, or, where it is not `sent`, as it is to get it; null for a tombstone."""

RUN: Final = {"run": "bigint", "frozen_ms": "bigint", "verdict": "string", "summary": "string", "report": "string"}

VERDICT: Final = {
    "run": "bigint",
    "frozen_ms": "bigint",
    "accepted_hour": "timestamp",
    "id": "binary",
    "key": "string",
    "topic": "string",
    "verdict": "string",
    "before": "string",
    "last_ms": "bigint",
}
"""What a run came to say of an id of which it, or a run before it, said anything but that it was delivered once.

`verdict` is a name of the balance, `phantom`, or null where nothing is left to say; `before` is what was said until
then, null where it is the first. Only changes have a row.
"""

REJECT: Final = {
    "run": "bigint",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "count": "bigint",
    "seen_ms": "bigint",
    "reason": "string",
    "content": "binary",
}
"""Records, or (`count`) parts of one, that could not be decoded: why, and their bytes, up to decode.CONTENT_MAX."""

SCHEMAS: Final[Mapping[str, Mapping[str, str]]] = {
    "deliveries": deliveries.ROW,
    "findings": FINDING,
    "progress": PROGRESS,
    "published": PUBLISHED,
    "runs": RUN,
    "rejects": REJECT,
    "verdicts": VERDICT,
}
PARTITIONS: Final = {"deliveries": ("accepted_hour", "is_clean")}
"""The rows of an hour of which more than numbers is read lie apart: they are few."""

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "deliveries": {
        "plain": "is_clean",
        "entered_ms": "entry_seen_ms",
        "answered_ms": "answer_seen_ms",
        "unsure_ms": "in_doubt_ms",
        "copied_ms": "timestamp_ms",
        "copied_at": "record_accepted_ms",
        "fp": "fingerprint",
        "alt": "alternative_fingerprints",
        "stamped": "has_fencepost_header",
        "keyed": "has_record_key",
        "record_key": "record_key_hash",
        "batch": "batch_hash",
        "topic_id": "topic_id_hash",
    },
    "progress": {
        "life": "topic_id",
        "since_ms": "recreated_at_ms",
        "complete_ms": "complete_since_ms",
        "decided_ms": "decided_until_ms",
        "holder": "blocking_transaction",
        "heard_run": "caught_up_run",
        "mark_run": "behind_run",
        "mark_end": "behind_end",
    },
}
"""Columns as lakes of the first version name them, and as they are named now."""

# A lake of an earlier version lacks columns that these have now. No other table takes a column that it does not know.
_GROWN: Final = frozenset({"deliveries", "findings", "progress"})

# Statistics of files, which let a query skip them, are made of these columns only.
_SKIPPED_BY: Final = {"deliveries": "run"}


def schema(name: str) -> StructType:
    """The schema of one of the tables."""
    made = StructType.fromDDL(", ".join(f"`{column}` {kind}" for column, kind in SCHEMAS[name].items()))
    assert isinstance(made, StructType)
    return made


class Lake:
    """Delta tables below one root, each made by the first write to it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.spark = spark
        self.root = root

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def exists(self, name: str) -> bool:
        """Whether a table was written to."""
        return DeltaTable.isDeltaTable(self.spark, self.path(name))

    def read(self, name: str) -> DataFrame:
        """All rows of a table as it is now; none where it was never written to."""
        if name in SCHEMAS and not self.exists(name):
            return wire_expressions.rows_of(self.spark, schema(name), [])
        return self.spark.read.format("delta").load(self.path(name))

    def upgrade(self) -> None:
        """Bring the tables of an earlier version to this one: columns by their present names, and those they lack.

        Each table in a commit of its own, and none twice: a run that is killed amid this goes on where it stopped.
        """
        for name, renamed in RENAMED.items():
            if self.exists(name) and renamed.keys() & set(self.read(name).columns):
                self._rename(name, renamed)
        for name in sorted(_GROWN):
            if self.exists(name) and set(SCHEMAS[name]) - set(self.read(name).columns):
                nothing = wire_expressions.rows_of(self.spark, schema(name), [])
                nothing.write.format("delta").mode("append").option("mergeSchema", True).save(self.path(name))

    def check_version(self) -> None:
        """CannotRun where the tables are of an earlier version."""
        for name, renamed in RENAMED.items():
            if self.exists(name) and (old := renamed.keys() & set(self.read(name).columns)):
                raise CannotRun(
                    f"--lake {self.root} is of an earlier version ({name} has {', '.join(sorted(old))}): "
                    "run python -m spark on it once, which brings it to this one"
                )

    def _rename(self, name: str, renamed: Mapping[str, str]) -> None:
        """Write a table anew with other names of columns; Delta cannot rename one by which a table is partitioned."""
        rows = self.read(name)
        columns = [F.col(old).alias(renamed.get(old, old)) for old in rows.columns]
        writer = rows.select(*columns).write.format("delta").mode("overwrite").option("overwriteSchema", True)
        if name in PARTITIONS:
            writer = writer.partitionBy(*PARTITIONS[name])
        writer.save(self.path(name))

    def append(self, name: str, rows: DataFrame, run: int) -> None:
        """Add rows, unless this run did."""
        self._writer(name, rows, "append", run).save(self.path(name))

    def add(self, name: str, rows: DataFrame) -> None:
        """Add rows, however often the run does it."""
        rows.write.format("delta").mode("append").save(self.path(name))

    def replace(self, name: str, rows: DataFrame, where: str, run: int) -> None:
        """Put rows, which all meet the condition, in the place of those that meet it now, unless this run did."""
        if self.exists(name):
            self._writer(name, rows, "overwrite", run).option("replaceWhere", where).save(self.path(name))
        else:
            self.append(name, rows, run)

    def overwrite(self, name: str, rows: DataFrame, where: str) -> None:
        """As `replace`, however often the run does it."""
        writer = rows.write.format("delta").mode("overwrite").option("mergeSchema", name in _GROWN)
        writer.option("replaceWhere", where).save(self.path(name))

    def merge(self, rows: DataFrame, hours: list[str], run: int) -> None:
        """Merge ROWs, one a place of an id and hour, into the `deliveries` that are there, unless this run did.

        `hours` (`yyyy-MM-dd HH:mm:ss`, UTC) are all hours of the rows: as literals in the condition they keep Delta
        from reading any other. Rows may have what `deliveries.without` adds to them.
        """
        there = sql(hours).replace("accepted_hour", "there.accepted_hour", 1)
        place = " AND ".join([there, *(f"there.{name} <=> new.{name}" for name in deliveries.ROW_KEY)])
        table = DeltaTable.forPath(self.spark, self.path("deliveries")).alias("there")
        with self.once(run):
            merge = table.merge(rows.alias("new"), place)
            if "vanished" in rows.columns:
                merge = merge.whenMatchedUpdate("new.vanished", set=dict(deliveries.merged(vanished=True)))
            merge.whenMatchedUpdate(set=dict(deliveries.merged())).whenNotMatchedInsertAll().execute()

    def rename(self, rows: DataFrame, hours: list[str], run: int) -> None:
        """Give rows of `deliveries` another id (`named`), as if this run had read them so. Doing it again does nothing.

        `rows` are `accepted_hour, id, topic, partition, offset, named`, `hours` all of theirs.
        """
        there = sql(hours).replace("accepted_hour", "there.accepted_hour", 1)
        place = [f"there.{name} = new.{name}" for name in ("accepted_hour", "id", "topic", "partition", "offset")]
        (
            DeltaTable.forPath(self.spark, self.path("deliveries"))
            .alias("there")
            .merge(rows.alias("new"), " AND ".join([there, f"there.kind = '{EVENT}'", *place]))
            .whenMatchedUpdate(set={"id": "new.named", "run": f"{run}L"})
            .execute()
        )

    def settle(self, rows: DataFrame, hours: list[str], run: int) -> None:
        """Note of what was answered 202 or 504 what other hours tell of it. Doing it again does nothing.

        `rows` are `accepted_hour, id, elsewhere, freed_ms` (cross_hour.known_elsewhere), `hours` all of theirs.
        """
        there = sql(hours).replace("accepted_hour", "there.accepted_hour", 1)
        same = ["there.accepted_hour = new.accepted_hour", "there.id = new.id", f"there.kind = '{EVENT}'"]
        in_doubt = f"there.offset IS NULL AND there.{deliveries.IN_DOUBT.replace(' + ', ' + there.')}"
        (
            DeltaTable.forPath(self.spark, self.path("deliveries"))
            .alias("there")
            .merge(rows.alias("new"), " AND ".join([there, *same, in_doubt]))
            .whenMatchedUpdate(
                set={"elsewhere": "new.elsewhere", "freed_ms": "new.freed_ms", "run": f"{run}L"},
            )
            .execute()
        )

    def delete_before(self, first: str, run: int) -> None:
        """Drop what was accepted before the hour `first` (`yyyy-MM-dd HH:mm:ss`, UTC), and the plans of older runs."""
        before_ms = f"unix_millis(TIMESTAMP '{first}')"
        old = {
            **dict.fromkeys(("deliveries", "findings", "verdicts"), f"accepted_hour < TIMESTAMP '{first}'"),
            "rejects": f"seen_ms < {before_ms}",
            **dict.fromkeys(("progress", "runs"), f"frozen_ms < {before_ms} AND run < {run}"),
        }
        for name, condition in old.items():
            if self.exists(name):
                DeltaTable.forPath(self.spark, self.path(name)).delete(condition)

    def optimize(self, hours: list[str]) -> None:
        """Make few files of the many small ones that runs left in these hours."""
        if hours and self.exists("deliveries"):
            table = DeltaTable.forPath(self.spark, self.path("deliveries"))
            table.optimize().where(sql(hours)).executeCompaction()

    def vacuum(self, hours: int, names: Iterable[str] = SCHEMAS) -> None:
        """Delete the files of these tables that no version of the last so many hours needs."""
        settings = {
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
            # Delta lists a table's files in so many tasks, however few they are; Spark's default is 10,000.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(
                2 * self.spark.sparkContext.defaultParallelism
            ),
        }
        with _set(self.spark, settings):
            for name in names:
                if self.exists(name):
                    DeltaTable.forPath(self.spark, self.path(name)).vacuum(hours)

    def _writer(self, name: str, rows: DataFrame, mode: str, run: int) -> DataFrameWriter:
        writer = rows.write.format("delta").mode(mode).option("mergeSchema", name in _GROWN)
        if name in PARTITIONS:
            writer = writer.partitionBy(*PARTITIONS[name])
        if name in _SKIPPED_BY and not self.exists(name):
            writer = writer.option("delta.dataSkippingStatsColumns", _SKIPPED_BY[name])
        return writer.option("txnAppId", WRITER).option("txnVersion", str(run))

    @contextmanager
    def once(self, run: int) -> Iterator[None]:
        """A MERGE within counts once for the run: Delta takes its transaction from the session's settings."""
        prefix = "spark.databricks.delta.write"
        with _set(self.spark, {f"{prefix}.txnAppId": WRITER, f"{prefix}.txnVersion": str(run)}):
            yield


@contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Have settings of the session for a while."""
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)
