"""The Delta tables of a lake, and writing to them once for each run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql.types import StructType

from spark import state

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
}
"""A finding. `scope`: `hour` (of the ids of one hour), `ids` (over all hours), `log` (of the logs themselves).

In the scope `ids` a row without kind says that the findings of the hours about this id do not hold.
"""

PROGRESS: Final = {
    "run": "bigint",
    "frozen_ms": "bigint",
    "role": "string",
    "topic": "string",
    "partition": "int",
    "life": "string",
    "audited": "boolean",
    "compacted": "boolean",
    "since_ms": "bigint",
    "first": "bigint",
    "start": "bigint",
    "end": "bigint",
    "last_stable": "bigint",
    "high_watermark": "bigint",
    "complete_ms": "bigint",
    "decided_ms": "bigint",
    "gaps": "array<struct<first: bigint, last: bigint, cause: string, seen_ms: bigint>>",
    "options": "string",
}

PUBLISHED: Final = {"finding_id": "string", "value": "string", "sent": "boolean"}
"""A finding as the topic of findings has it, or, where it is not `sent`, as it is to get it; null for a tombstone."""

RUN: Final = {"run": "bigint", "frozen_ms": "bigint", "verdict": "string", "summary": "string", "report": "string"}

SCHEMAS: Final[Mapping[str, Mapping[str, str]]] = {
    "deliveries": state.ROW,
    "findings": FINDING,
    "progress": PROGRESS,
    "published": PUBLISHED,
    "runs": RUN,
}
PARTITIONS: Final = {"deliveries": "accepted_hour"}


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
            return self.spark.createDataFrame([], schema(name))
        return self.spark.read.format("delta").load(self.path(name))

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
        rows.write.format("delta").mode("overwrite").option("replaceWhere", where).save(self.path(name))

    def merge(self, rows: DataFrame, hours: list[str], run: int) -> None:
        """Merge ROWs, one an id and hour, into the `deliveries` that are there, unless this run did.

        `hours` (`yyyy-MM-dd HH:mm:ss`, UTC) are all hours of the rows: as literals in the condition they keep Delta
        from reading any other.
        """
        literals = ", ".join(f"TIMESTAMP '{hour}'" for hour in hours)
        with self.once(run):
            (
                DeltaTable.forPath(self.spark, self.path("deliveries"))
                .alias("there")
                .merge(
                    rows.alias("new"),
                    f"there.accepted_hour IN ({literals}) AND there.accepted_hour = new.accepted_hour "
                    "AND there.id = new.id AND there.kind = new.kind",
                )
                .whenMatchedUpdate(set=dict(state.merged()))
                .whenNotMatchedInsertAll()
                .execute()
            )

    def _writer(self, name: str, rows: DataFrame, mode: str, run: int) -> DataFrameWriter:
        writer = rows.write.format("delta").mode(mode)
        if name in PARTITIONS:
            writer = writer.partitionBy(PARTITIONS[name])
        return writer.option("txnAppId", WRITER).option("txnVersion", str(run))

    @contextmanager
    def once(self, run: int) -> Iterator[None]:
        """A MERGE within counts once for the run: Delta takes its transaction from the session's settings."""
        settings = {"txnAppId": WRITER, "txnVersion": str(run)}
        for name, value in settings.items():
            self.spark.conf.set(f"spark.databricks.delta.write.{name}", value)
        try:
            yield
        finally:
            for name in settings:
                self.spark.conf.unset(f"spark.databricks.delta.write.{name}")
