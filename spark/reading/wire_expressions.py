"""Ids and fingerprints of `service.contract.wire.ids` as native Spark expressions, without Python workers."""

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from service.contract.wire.ids import ABSENT, FINGERPRINT_BYTES, ID_BYTES


def at_partition(constant: Column, topic: Column, partition: Column) -> Column:
    """Look up the value of a partition in a map<string, array<…>> (run_plan.by_partition); null if there is none."""
    return F.get(F.try_element_at(constant, topic), partition)


def literal(content: bytes) -> Column:
    """Return a binary constant."""
    return F.lit(bytearray(content))


def as_binary(text: Column) -> Column:
    """Return the UTF-8 bytes of a string column."""
    return text.cast("binary")


def hex_digits(content: Column) -> Column:
    """Return a binary column as hexadecimal digits in lower case. `lower` would load ICU with its tables of all
    alphabets."""
    return F.translate(F.hex(content), "ABCDEF", "abcdef")


def sha256_head(content: Column, size: int) -> Column:
    """Compute the first `size` bytes of SHA-256 over a binary column; null for null."""
    return F.unhex(F.substring(F.sha2(content, 256), 1, 2 * size))


def event_id(key: Column, scope: str = "") -> Column:
    """Compute `ids.event_id` of a binary column with the key's bytes."""
    return sha256_head(F.concat(literal(f"{scope}\0".encode()), key), ID_BYTES)


def packed(content: Column) -> Column:
    """Encode a field for the fingerprint: length in 4 bytes, big-endian, then the bytes; ffffffff for null."""
    length = F.unhex(F.lpad(F.hex(F.octet_length(content)), 8, "0"))
    return F.coalesce(F.concat(length, content), literal(ABSENT))


def joined(parts: Column) -> Column:
    """Concatenate an array<binary>; through hexadecimal text, since appending the parts one by one is quadratic."""
    return F.unhex(F.array_join(F.transform(parts, F.hex), ""))


def fingerprint(topic: Column, partition: Column | None, key: Column, headers: Column, value: Column) -> Column:
    """Compute `ids.fingerprint` of a record.

    `topic` string, `partition` int (None for a request without a partition), `key` and `value` binary, `headers`
    array<struct<key string, value binary>> with the client's headers only, null for none.
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
    partition_field = literal(ABSENT) if partition is None else packed(as_binary(partition.cast("string")))
    content = F.concat(packed(as_binary(topic)), partition_field, packed(key), packed_headers, packed(value))
    return sha256_head(content, FINGERPRINT_BYTES)
