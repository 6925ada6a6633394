"""Evidence and rows of `deliveries` for tests of single steps, with defaults for all fields."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from spark.reading import decode
from spark.tables import deliveries
from tests.spark.times import DAY_MS

NOW_MS = 1_700_000_000_000
TTL_MS = DAY_MS


def copy(
    offset: int, *, at: int = NOW_MS, writer: tuple[int, int, int, str] | None = (0, 10, 0, "a:1"), **more: Any
) -> Any:
    """A delivered record (decode.COPIES); `writer`: slot, producer id, epoch, instance, None without header."""
    slot, pid, epoch, instance = writer or (None, None, None, None)
    return {
        "kind": decode.EVENT,
        "id": b"i" * 16,
        "accepted_ms": at,
        "timestamp_ms": at + 5,
        "fingerprint": b"f" * 8,
        "topic": "t",
        "partition": 0,
        "offset": offset,
        "slot": slot,
        "pid": pid,
        "epoch": epoch,
        "instance": instance,
        "has_fencepost_header": writer is not None,
        "has_record_key": True,
        "key": "k",
        **more,
    }


def entry(offset: int, *, at: int = NOW_MS, **more: Any) -> Any:
    """A ledger entry (decode.CLAIMS); `topic_id` in Kafka's text form."""
    return answer(decode.ENTERED, offset, at=at, **({"timestamp_ms": at + 5} | more))


def answer(status: int, offset: int | None = None, *, at: int = NOW_MS, **more: Any) -> Any:
    """An answer (decode.CLAIMS); a 201 names partition and offset."""
    common = {
        "id": b"i" * 16,
        "accepted_ms": at,
        "timestamp_ms": at + 20,
        "topic": "t",
        "status": status,
        "replayed": False,
        "position": 0,
    }
    coordinates = {} if offset is None else {"partition": 0, "offset": offset}
    return {**common, **coordinates, **more}


def ids(named: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Evidence of several ids: each list gets an id that is made from its name."""
    return [{**one, "id": id_bytes(name)} for name, evidence in named.items() for one in evidence]


def _names(ddl: str) -> list[str]:
    schema = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)
    return schema.names


def reduced(spark: SparkSession, rows: Sequence[Any], run: int = 1, **more: Any) -> DataFrame:
    """Reduce evidence to deliveries.ROW; `more` are the fields of deliveries.LogFacts."""
    copies = [row for row in rows if "kind" in row]
    unknown = {name for row in rows for name in row} - {*_names(decode.COPIES), *_names(decode.CLAIMS), "topic_id"}
    assert unknown == set(), "Spark would leave these out"
    claims = [row for row in rows if "kind" not in row]
    # The job carries a hash of a topic's id.
    named = spark.createDataFrame(claims, decode.CLAIMS.replace("topic_id_hash bigint", "topic_id string"))
    summarized = deliveries.summarize(named.withColumn("topic_id_hash", decode.hash_of(F.col("topic_id"))))
    facts = deliveries.LogFacts(**more)
    return deliveries.reduce(spark.createDataFrame(copies, decode.COPIES), summarized, run, facts)


def states(spark: SparkSession, named: Mapping[str, Sequence[Any]]) -> DataFrame:
    """Reduce and gather evidence of several ids to deliveries.GATHERED."""
    return deliveries.gathered(reduced(spark, ids(named)))


def id_bytes(name: str) -> bytes:
    """Make an id from a name; `name_of` returns the name."""
    return name.encode().ljust(16)[:16]


def name_of(id: bytes) -> str:
    return bytes(id).decode().strip()
