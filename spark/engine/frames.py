"""Frames: of a few rows from the driver, with the columns of a table, kept for several queries, or broadcast."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, StructType

# Jackson limits a string to 20 MB by default, against untrusted input. The summary of a run with many hours is longer.
_PARSED: Final = {"mode": "FAILFAST", "maxStringLen": str(2**31 - 1)}

# Ids with few numbers each: some 10 MB in the driver and in each executor.
BROADCAST_MAX: Final = 100_000


def ddl(columns: Mapping[str, str]) -> str:
    """Write names and types of columns as a schema."""
    return ", ".join(f"`{name}` {data_type}" for name, data_type in columns.items())


def typed(rows: DataFrame, types: Mapping[str, str], columns: Mapping[str, Column]) -> DataFrame:
    """Select the columns of a table by their names and types; those that are not given are null."""
    null = F.lit(None)
    return rows.select(*(columns.get(name, null).cast(data_type).alias(name) for name, data_type in types.items()))


def any_of(conditions: Sequence[Column]) -> Column:
    """Join conditions by OR, false if there are none.

    The pairs are joined first: Spark goes through an expression recursively, and one OR within the other is as deep as
    there are conditions.
    """
    joined = list(conditions) or [F.lit(False)]
    while len(joined) > 1:
        pairs = zip(joined[::2], joined[1::2], strict=False)
        joined = [first | second for first, second in pairs] + joined[len(joined) // 2 * 2 :]
    return joined[0]


def rows_of(spark: SparkSession, schema: str | StructType, items: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Create a frame of a few rows from the driver, through JSON: `createDataFrame` would start Python on an executor.

    Binary and timestamp columns can only be null. Spark optimises away everything derived from an empty relation.
    """
    fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(fields, StructType)
    if not items:
        nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in fields]
        return spark.range(1).where("false").select(*nulls)
    parsed = F.from_json(F.lit(json.dumps(items)), ArrayType(fields), _PARSED)
    return spark.range(1).select(F.inline(parsed)).select(*(F.col(f"`{field.name}`") for field in fields))


def checkpointed(rows: DataFrame) -> DataFrame:
    """Compute rows once, and keep them on the executors: the result reads no table and no topic any more.

    If an executor with such rows is lost, Spark cannot compute them again, and the run fails.
    Dynamic allocation keeps such executors, unless `spark.dynamicAllocation.cachedExecutorIdleTimeout` is set. A
    reliable checkpoint would write the rows to the lake's file system once more in every run, and save only the
    repetition of a rare failure.
    """
    return rows.localCheckpoint()


def cached(rows: DataFrame, until: ExitStack) -> DataFrame:
    """Cache rows in memory and on disk until the stack is closed."""
    rows.persist(StorageLevel.MEMORY_AND_DISK)
    until.callback(rows.unpersist)
    return rows


def broadcast_if_small(rows: DataFrame) -> DataFrame:
    """Let Spark broadcast rows (`checkpointed`) in a join if these are at most BROADCAST_MAX; else Spark chooses."""
    return F.broadcast(rows) if rows.limit(BROADCAST_MAX + 1).count() <= BROADCAST_MAX else rows
