"""The command `show`: prints the rows of an id in the lake, its findings, and its records in Kafka."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from service.contract.wire.ids import ID_BYTES, event_id
from spark import rule_table
from spark.engine import frames
from spark.errors import CannotRun
from spark.reading import decode, source, wire_expressions
from spark.reading.decode import EVENT
from spark.reading.kafka_admin import KafkaAdmin, Topic, TopicPartition
from spark.reading.source import Span
from spark.rules import causes, current_findings
from spark.tables import deliveries, lake_version
from spark.tables.lake import Lake

Coordinates = tuple[str, int, int]
"""Topic, partition and offset of a record."""

RECORDS_MAX: Final = 20
VALUE_CHARS: Final = 500
# The years 1 to 9999, which datetime supports.
CALENDAR_MS: Final = (-62_135_596_800_000, 253_402_300_800_000)

_ID: Final = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")


def ids_of(text: str) -> list[bytes]:
    """Return the ids that a text may name: an id in hexadecimal digits, and the id of a key in the empty scope."""
    written = [bytes.fromhex(text)] if _ID.fullmatch(text) else []
    return [*written, event_id(text)]


def show(spark: SparkSession, shared: SharedSettings, root: str, text: str) -> Iterator[str]:
    """Describe an id or a key, line by line; both, if a key looks like an id. CannotRun if the lake has neither."""
    lake = Lake(spark, root)
    lake_version.check(lake)
    ids = ids_of(text)
    rows = deliveries.gathered(_of(lake.read("deliveries").where(F.col("kind") == EVENT), ids))
    found_rows = rows.withColumn("ordered", causes.ordered()).orderBy("accepted_ms").collect()
    if not found_rows:
        raise CannotRun(
            f"--lake {root} does not know {text!r}: give an id (32 hexadecimal digits), or a key as it was sent"
        )
    for id in ids:
        if id_rows := [row for row in found_rows if row["id"] == id]:
            yield from _id(spark, shared, lake, id, id_rows)


def _id(spark: SparkSession, shared: SharedSettings, lake: Lake, id: bytes, found_rows: Sequence[Row]) -> Iterator[str]:
    """Describe one id by its rows (deliveries.GATHERED with `ordered`)."""
    yield f"id         {id.hex()}"
    writers: dict[Coordinates, str] = {}
    for row in found_rows:
        yield from _row(row)
        writers.update({_coordinates(copy): _writer(copy) for copy in row["ordered"]})
    copies = {_coordinates(copy): _identity(row["key"], copy) for row in found_rows for copy in row["coordinates"]}
    for row in _of(lake.read("sinks").where("kind IS NOT NULL"), [id]).collect():
        yield f"finding    {row['kind']}{'/' + row['cause'] if row['cause'] else ''} {row['sink']}"
    for row in _findings(lake, id, found_rows):
        yield f"finding    {row['kind']}{'/' + row['cause'] if row['cause'] else ''}, {row['count']} records"
    shown = list(writers)[:RECORDS_MAX]
    records = {_coordinates(row.asDict()): row for row in read_records(spark, shared, id, [copies[at] for at in shown])}
    for at in shown:
        yield f"record     {at[0]}[{at[1]}]@{at[2]}  {writers[at]}"
        if at not in records:
            yield "           is not in Kafka any more"
        elif records[at]["is_its_record"]:
            yield from _record(records[at])
        else:
            yield "           is not in Kafka any more: another record has this offset now"
    if len(writers) > len(shown):
        yield f"           and {len(writers) - len(shown)} more"


def _findings(lake: Lake, id: bytes, found_rows: Sequence[Row]) -> Iterator[Row]:
    """Return the findings about an id with these rows (deliveries.GATHERED), also those that are stored under another
    id with the same content (`client_duplicate`)."""
    copies = {_coordinates(copy) for row in found_rows for copy in row["coordinates"]}
    fingerprints = {bytes(copy["fingerprint"]) for row in found_rows for copy in row["fingerprints"]}
    known = lake.read("findings")
    of_id = current_findings.unrevoked(_of(known, [id]))
    of_content = known.where(F.col("fingerprint").isin([F.lit(bytearray(one)) for one in fingerprints]))
    yield from of_id.collect()
    for row in of_content.where(F.col("id") != F.lit(bytearray(id))).collect():
        if any(_coordinates(copy) in copies for copy in row["coordinates"]):
            yield row


def _coordinates(record: Mapping[str, Any]) -> Coordinates:
    return record["topic"], record["partition"], record["offset"]


_IDENTITY: Final = (
    "topic string, partition int, offset bigint, was_with_header boolean, fingerprint_digits string, known_key string"
)
"""Coordinates of a copy, and by what its record is recognised (decode.is_record_of)."""


def _identity(key: str | None, copy: Row) -> dict[str, Any]:
    """Return _IDENTITY of a copy in a row (deliveries.GATHERED) with this key."""
    coordinates = {name: copy[name] for name in ("topic", "partition", "offset")}
    fingerprint = None if copy["fingerprint"] is None else bytes(copy["fingerprint"]).hex()
    has_header = copy["has_fencepost_header"]
    return {**coordinates, "was_with_header": has_header, "fingerprint_digits": fingerprint, "known_key": key}


def _of(rows: DataFrame, ids: Iterable[bytes]) -> DataFrame:
    return rows.where(F.col("id").isin([F.lit(bytearray(id)) for id in ids]))


def _row(row: Row) -> Iterator[str]:
    key = "" if row["key"] is None else f", key {row['key']!r}"
    yield f"accepted   {_time(row['accepted_ms'])}{key}: {row['count']} records, {row['entries_count']} ledger entries"
    answers = [(name, row[f"answered_{name}"]) for name in ("201", "202", "503", "504", "other")]
    if counted := ", ".join(f"{count} x {name}" for name, count in answers if count):
        yield f"answered   {counted}, {row['replayed']} of them replays"
    for source_, claims in (("ledger", row["entries"]), ("answer", row["answered"])):
        for claim in claims:
            topic, partition, offset = _coordinates(claim)
            yield f"{source_:10} {topic}[{partition}]@{offset}  seen {_time(claim['seen_ms'])}"


def _writer(copy: Mapping[str, Any]) -> str:
    place = "in the ledger" if copy["ledger_rank"] == rule_table.IN_LEDGER else "not in the ledger"
    if copy["slot"] is None:
        return f"{place}, without Fencepost's header"
    return f"{place}, slot {copy['slot']}, producer {copy['pid']} epoch {copy['epoch']}, {_escaped(copy['instance'])}"


def _record(row: Row) -> Iterator[str]:
    yield f"  time     {_time(row['timestamp_ms'])}"
    yield f"  key      {_shown(row['key'])}"
    for header in row["headers"] or ():
        yield f"  header   {_escaped(header['key'])}: {_shown(header['value'])}"
    yield f"  value    {_shown(row['value'])}"


def read_records(
    spark: SparkSession, shared: SharedSettings, id: bytes, copies: Sequence[Mapping[str, Any]]
) -> Iterator[Row]:
    """Read the records at the coordinates of these copies (_IDENTITY) of an id, one of each partition in a query.

    Records that no longer exist are left out. `is_its_record`: the record is that of the copy.
    """
    known = frames.rows_of(spark, _IDENTITY, copies)
    is_its_record = decode.is_record_of(
        wire_expressions.literal(id),
        F.col("was_with_header"),
        F.unhex(F.col("fingerprint_digits")),
        F.col("known_key"),
    )
    left = [_coordinates(copy) for copy in copies]
    while left:
        spans: dict[TopicPartition, Span] = {}
        later = []
        for topic, partition, offset in left:
            if (topic, partition) in spans:
                later.append((topic, partition, offset))
            else:
                spans[topic, partition] = (offset, offset + 1)
        read = decode.with_own_identity(source.read(spark, shared, _readable(spark, shared, spans)))
        identified = read.join(known, ["topic", "partition", "offset"])
        yield from identified.withColumn("is_its_record", is_its_record).collect()
        left = later


def _readable(
    spark: SparkSession, shared: SharedSettings, spans: Mapping[TopicPartition, Span]
) -> dict[TopicPartition, Span]:
    """Return those of the spans that the logs still have."""
    with closing(KafkaAdmin(spark, shared)) as admin:
        topics = admin.describe([topic for topic, _ in spans])
        existing = [partition for partition in spans if _exists(partition, topics)]
        ends = admin.ends(existing) if existing else {}
    return {
        partition: spans[partition]
        for partition, bounds in ends.items()
        if bounds.log_start <= spans[partition][0] and spans[partition][1] <= bounds.last_stable
    }


def _exists(partition: TopicPartition, topics: Mapping[str, Topic]) -> bool:
    topic, number = partition
    return topic in topics and number < topics[topic].partitions


def _shown(content: bytes | None) -> str:
    if content is None:
        return "null"
    text = bytes(content).decode(errors="backslashreplace")
    if len(text) <= VALUE_CHARS:
        return _escaped(text)
    return f"{_escaped(text[:VALUE_CHARS])}… ({len(content)} bytes)"


def _escaped(text: str) -> str:
    """Escape line breaks and control characters: what another program has written must neither look like a line of this
    command nor control the terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _time(ms: int) -> str:
    """Format a time, UTC; as a number outside CALENDAR_MS, as of a writer that counts in another unit."""
    if not CALENDAR_MS[0] <= ms < CALENDAR_MS[1]:
        return f"{ms} ms"
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"
