"""The Delta tables of a lake, and writing to them once for each run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
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

RUN: Final = {"run": "bigint", "frozen_ms": "bigint", "verdict": "string", "summary": "string", "report": "string"}

SCHEMAS: Final[Mapping[str, Mapping[str, str]]] = {
    "deliveries": state.ROW,
    "findings": FINDING,
    "progress": PROGRESS,
    "runs": RUN,
}
PARTITIONS: Final = {"deliveries": "accepted_hour"}


def schema(name: str) -> StructType:
    """The schema of one of the tables."""
    made = StructType.fromDDL(", ".join(f"`{column}` {kind}" for column, kind in SCHEMAS[name].items()))
    assert isinstance(made, StructType)
    return made


class Lake:
    """Four Delta tables below one root, made at the first use of it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self.spark = spark
        self.root = root

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def ensure(self) -> None:
        """Make the tables that are not there yet."""
        for name in SCHEMAS:
            if DeltaTable.isDeltaTable(self.spark, self.path(name)):
                continue
            table = DeltaTable.createIfNotExists(self.spark).location(self.path(name)).addColumns(schema(name))
            if name in PARTITIONS:
                table = table.partitionedBy(PARTITIONS[name])
            table.execute()

    def read(self, name: str) -> DataFrame:
        """All rows of a table."""
        return self.spark.read.format("delta").load(self.path(name))

    def append(self, name: str, rows: DataFrame, run: int) -> None:
        """Add rows, unless this run did."""
        writer = rows.write.format("delta").mode("append")
        writer.option("txnAppId", WRITER).option("txnVersion", str(run)).save(self.path(name))

    def overwrite(self, name: str, rows: DataFrame, where: str) -> None:
        """Put rows, which all meet the condition, in the place of those that meet it now."""
        rows.write.format("delta").mode("overwrite").option("replaceWhere", where).save(self.path(name))

    def replace(self, name: str, rows: DataFrame, where: str, run: int) -> None:
        """Put rows, which all meet the condition, in the place of those that meet it now, unless this run did."""
        writer = rows.write.format("delta").mode("overwrite").option("replaceWhere", where)
        writer.option("txnAppId", WRITER).option("txnVersion", str(run)).save(self.path(name))

    def merge(self, rows: DataFrame, hours: list[str], run: int) -> None:
        """Merge ROWs, one an id and hour, into `deliveries`, unless this run did.

        `hours` (`yyyy-MM-dd HH:mm:ss`, UTC) are all hours of the rows: as literals in the condition they keep Delta
        from reading any other.
        """
        literals = ", ".join(f"TIMESTAMP '{hour}'" for hour in hours)
        with self._once(run):
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

    @contextmanager
    def _once(self, run: int) -> Iterator[None]:
        """Delta takes the transaction of a MERGE from the session's settings."""
        names = {f"spark.databricks.delta.write.{name}" for name in ("txnAppId", "txnVersion")}
        self.spark.conf.set("spark.databricks.delta.write.txnAppId", WRITER)
        self.spark.conf.set("spark.databricks.delta.write.txnVersion", str(run))
        try:
            yield
        finally:
            for name in names:
                self.spark.conf.unset(name)
