"""All that is known of one id: its rows in the lake, what was found, and the records themselves."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings, wire
from spark.errors import CannotRun
from spark.reading import decode, source
from spark.reading.decode import EVENT
from spark.reading.kafka_admin import Broker, TopicPartition
from spark.reading.source import Span
from spark.rules import causes
from spark.tables import deliveries
from spark.tables.lake import Lake

RECORDS_MAX: Final = 20
VALUE_CHARS: Final = 500
# The years 1 to 9999, all that Python writes down.
CALENDAR_MS: Final = (-62_135_596_800_000, 253_402_300_800_000)

_ID: Final = re.compile(rf"[0-9a-f]{{{2 * wire.ID_BYTES}}}")


def ids_of(text: str) -> list[bytes]:
    """What a text may mean: an id in hexadecimal digits, and the id of an idempotency key in the empty scope."""
    written = [bytes.fromhex(text)] if _ID.fullmatch(text) else []
    return [*written, wire.event_id(text)]


def show(spark: SparkSession, shared: SharedSettings, root: str, text: str) -> Iterator[str]:
    """What there is to say of an id or key, line by line; of both, where a key looks like another's id.

    CannotRun where the lake knows neither.
    """
    lake = Lake(spark, root)
    lake.check_version()
    ids = ids_of(text)
    rows = deliveries.gathered(_of(lake.read("deliveries").where(F.col("kind") == EVENT), ids))
    found_rows = rows.withColumn("ordered", causes.ordered()).orderBy("accepted_ms").collect()
    if not found_rows:
        raise CannotRun(
            f"--lake {root} does not know {text!r}: give an id (32 hexadecimal digits), or a key as it was sent"
        )
    for id in ids:
        if its := [row for row in found_rows if row["id"] == id]:
            yield from _id(spark, shared, lake, id, its)


def _id(spark: SparkSession, shared: SharedSettings, lake: Lake, id: bytes, found_rows: Sequence[Row]) -> Iterator[str]:
    """What there is to say of one id, of which the lake has these rows."""
    yield f"id         {id.hex()}"
    places: dict[tuple[str, int, int], str] = {}
    bare: dict[tuple[str, int, int], tuple[str, bytes]] = {}
    for row in found_rows:
        yield from _row(row)
        places.update({_place(one): _writer(one) for one in row["ordered"]})
        bare.update(
            {
                _place(one): (row["key"], one["fingerprint"])
                for one in row["coordinates"]
                if not one["has_fencepost_header"]
            }
        )
    for row in _of(lake.read("findings").where("kind is not null"), [id]).select("kind", "cause", "count").collect():
        yield f"finding    {row['kind']}{'/' + row['cause'] if row['cause'] else ''}, {row['count']} records"
    shown = list(places)[:RECORDS_MAX]
    there = {_place(row.asDict()): row for row in _records(spark, shared, shown)}
    for place in shown:
        yield f"record     {place[0]}[{place[1]}]@{place[2]}  {places[place]}"
        if place not in there:
            yield "           is not in Kafka any more"
        elif _is_of(there[place], id, bare.get(place)):
            yield from _record(there[place])
        else:
            yield "           is not in Kafka any more: another record stands there now"
    if len(places) > len(shown):
        yield f"           and {len(places) - len(shown)} more"


def _place(one: Mapping[str, Any]) -> tuple[str, int, int]:
    return one["topic"], one["partition"], one["offset"]


def _is_of(record: Row, id: bytes, bare: tuple[str, bytes] | None) -> bool:
    """decode.is_of for one record; `bare` are key and fingerprint of one that was read without our header."""
    if bare is None:
        return bool(record["own_id"] == id)
    key, fingerprint = bare
    return record["own_id"] is None and record["own_fingerprint"] == fingerprint and record["own_key"] in (None, key)


def _of(rows: DataFrame, ids: Iterable[bytes]) -> DataFrame:
    return rows.where(F.col("id").isin([F.lit(bytearray(id)) for id in ids]))


def _row(row: Row) -> Iterator[str]:
    key = "" if row["key"] is None else f", key {row['key']!r}"
    yield f"accepted   {_time(row['accepted_ms'])}{key}: {row['count']} records, {row['entries_count']} ledger entries"
    answers = [(name, row[f"answered_{name}"]) for name in ("201", "202", "503", "504", "other")]
    if counted := ", ".join(f"{count} x {name}" for name, count in answers if count):
        yield f"answered   {counted}, {row['replayed']} of them replays"
    for source_, claims in (("ledger", row["entries"]), ("answer", row["answered"])):
        for one in claims:
            yield f"{source_:10} {one['topic']}[{one['partition']}]@{one['offset']}  seen {_time(one['seen_ms'])}"


def _writer(copy: Mapping[str, Any]) -> str:
    named = "in the ledger" if copy["late"] == 0 else "not in the ledger"
    if copy["slot"] is None:
        return f"{named}, without Fencepost's header"
    return f"{named}, slot {copy['slot']}, producer {copy['pid']} epoch {copy['epoch']}, {copy['instance']}"


def _record(row: Row) -> Iterator[str]:
    yield f"  time     {_time(row['timestamp_ms'])}"
    yield f"  key      {_shown(row['key'])}"
    for header in row["headers"] or ():
        yield f"  header   {header['key']}: {_shown(header['value'])}"
    yield f"  value    {_shown(row['value'])}"


def _records(spark: SparkSession, shared: SharedSettings, places: Sequence[tuple[str, int, int]]) -> Iterator[Row]:
    """The records at these places that are there still: one look at Kafka for each place in a partition."""
    left = list(places)
    while left:
        spans: dict[TopicPartition, Span] = {}
        later = []
        for topic, partition, offset in left:
            if (topic, partition) in spans:
                later.append((topic, partition, offset))
            else:
                spans[topic, partition] = (offset, offset + 1)
        yield from decode.own(source.read(spark, shared, _there(spark, shared, spans))).collect()
        left = later


def _there(
    spark: SparkSession, shared: SharedSettings, spans: Mapping[TopicPartition, Span]
) -> dict[TopicPartition, Span]:
    """Those of the spans that lie in a log as it is now."""
    with closing(Broker(spark, shared)) as broker:
        topics = broker.describe([topic for topic, _ in spans])
        known = [place for place in spans if place[0] in topics and place[1] < topics[place[0]].partitions]
        ends = broker.ends(known) if known else {}
    return {
        place: spans[place]
        for place, bounds in ends.items()
        if bounds.log_start <= spans[place][0] and spans[place][1] <= bounds.last_stable
    }


def _shown(content: bytes | None) -> str:
    if content is None:
        return "null"
    text = bytes(content).decode(errors="backslashreplace")
    return text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}… ({len(content)} bytes)"


def _time(ms: int) -> str:
    """A time, UTC; as the number that it is where no calendar has it: a writer may count in other units."""
    if not CALENDAR_MS[0] <= ms < CALENDAR_MS[1]:
        return f"{ms} ms"
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"
