"""Ids and fingerprints of `service.contract.wire` as native Spark expressions: the same bytes, no Python worker."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, StructType

from service.contract import wire

# Jackson's own bound for a string, 20 MB, is one for what strangers send. The sums of a year's hours are longer.
_PARSED: Final = {"mode": "FAILFAST", "maxStringLen": str(2**31 - 1)}


def rows_of(spark: SparkSession, schema: str | StructType, items: Sequence[Mapping[str, Any]]) -> DataFrame:
    """A few rows of the driver's, as JSON that Spark reads: its own way to make rows starts Python on an executor.

    Binary columns and timestamps can only be null. Of no rows Spark leaves out all that is made of them.
    """
    fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(fields, StructType)
    if not items:
        nothing = [F.lit(None).cast(field.dataType).alias(field.name) for field in fields]
        return spark.range(1).where("false").select(*nothing)
    parsed = F.from_json(F.lit(json.dumps(items)), ArrayType(fields), _PARSED)
    return spark.range(1).select(F.inline(parsed)).select(*(F.col(f"`{field.name}`") for field in fields))


def literal(content: bytes) -> Column:
    """A binary constant."""
    return F.lit(bytearray(content))


def as_binary(text: Column) -> Column:
    """UTF-8 bytes of a string column."""
    return text.cast("binary")


def sha256_head(content: Column, size: int) -> Column:
    """The first `size` bytes of SHA-256 over a binary column; null for null."""
    return F.unhex(F.substring(F.sha2(content, 256), 1, 2 * size))


def event_id(key: Column, scope: str = "") -> Column:
    """`wire.event_id` of a binary column with the key's bytes."""
    return sha256_head(F.concat(literal(f"{scope}\0".encode()), key), wire.ID_BYTES)


def packed(content: Column) -> Column:
    """A field as the fingerprint hashes it: length in 4 bytes, big-endian, then the bytes; ffffffff for null."""
    length = F.unhex(F.lpad(F.hex(F.octet_length(content)), 8, "0"))
    return F.coalesce(F.concat(length, content), literal(wire.ABSENT))


def joined(parts: Column) -> Column:
    """The bytes of an array<binary>, one after the other: as text, since appending each to all before is quadratic."""
    return F.unhex(F.array_join(F.transform(parts, F.hex), ""))


def fingerprint(topic: Column, partition: Column | None, key: Column, headers: Column, value: Column) -> Column:
    """`wire.fingerprint` of a record.

    `topic` string, `partition` int (None: absent, as for a request that named none), `key` and `value` binary,
    `headers` array<struct<key string, value binary>> with the client's own headers only, null for none.
    """
    fields = F.array_sort(
        F.transform(
            F.coalesce(headers, F.array().cast("array<struct<key:string,value:binary>>")),
            lambda header: F.struct(as_binary(header["key"]).alias("name"), header["value"].alias("content")),
        )
    )
    packed_headers = joined(
        F.transform(fields, lambda field: F.concat(packed(field["name"]), packed(field["content"])))
    )
    place = literal(wire.ABSENT) if partition is None else packed(as_binary(partition.cast("string")))
    content = F.concat(packed(as_binary(topic)), place, packed(key), packed_headers, packed(value))
    return sha256_head(content, wire.FINGERPRINT_BYTES)
