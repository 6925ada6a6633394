"""Ids and fingerprints of `service.wire`, as native Spark expressions: the same bytes, no Python on the executors."""

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from service import wire


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
    packed_headers = F.aggregate(
        fields, literal(b""), lambda done, field: F.concat(done, packed(field["name"]), packed(field["content"]))
    )
    place = literal(wire.ABSENT) if partition is None else packed(as_binary(partition.cast("string")))
    content = F.concat(packed(as_binary(topic)), place, packed(key), packed_headers, packed(value))
    return sha256_head(content, wire.FINGERPRINT_BYTES)
