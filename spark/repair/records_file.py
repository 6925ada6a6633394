"""Writes the records that sinks lack into a file (--bodies-out)."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pyspark.sql import SparkSession

from service.contract import SharedSettings
from spark.errors import CannotRun
from spark.repair import copier, entries
from spark.repair.entries import Entry


def write(spark: SparkSession, shared: SharedSettings, made: Sequence[Entry], path: Path) -> None:
    """Write the records that entries copy, a JSON object a line; the file is replaced at once."""
    wanted = {(entry.topic, entry.partition, entry.offset): entry for entry in made if entry.action == entries.COPY}
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as out:
            for record in copier.records_at(spark, shared, list(wanted)):  # type: ignore[arg-type]
                out.write(_line(wanted[record.coordinates], record))
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(path)
    except OSError as error:
        raise CannotRun(f"--bodies-out {path}: {error}") from None


def _line(entry: Entry, record: copier.Record) -> bytes:
    """Encode a record as a line of JSON: bytes are in base64, since any key, value or header may be no UTF-8."""
    line = {
        "sink": entry.sink,
        "id": entry.id,
        "idempotency_key": entry.key,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "accepted_ms": entry.accepted_ms,
        "key_base64": record.key,
        "value_base64": record.value,
        "headers": [{"name": name, "value_base64": value} for name, value in record.headers],
    }
    return msgspec.json.encode(line) + b"\n"
