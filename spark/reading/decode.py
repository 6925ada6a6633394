"""Records → evidence: one narrow row for each delivered record, ledger entry and answer, whatever wrote it.

COPIES are the records that were delivered, CLAIMS is what the ledger and the journal say about them. A copy is an
`event`, or a record that cannot be told apart (`unkeyed`: neither of our headers; `reject`: not decodable).
"""

from collections.abc import Mapping
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import wire
from spark import rule_table
from spark.errors import CannotRun
from spark.reading import source, wire_expressions
from spark.reading.jvm import is_deterministic

EVENT: Final = "event"
UNKEYED: Final = "unkeyed"
REJECT: Final = "reject"

REJECTED: Final = "struct<reason: string, content: binary>"
"""Why a record could not be decoded, and the bytes in question, up to CONTENT_MAX of them."""

COPIES: Final = (
    "kind string, id binary, topic string, partition int, offset bigint, accepted_ms bigint, timestamp_ms bigint, "
    "fingerprint binary, alternative_fingerprints binary, slot int, pid bigint, epoch int, instance string, "
    "has_fencepost_header boolean, has_record_key boolean, record_key_hash bigint, key string, "
    f"reject {REJECTED}, observed_ms bigint"
)
"""`timestamp_ms` is the record's timestamp, clamped to PLAUSIBLE_MS: copies are ordered by it, alike in every run.
Where the timestamp is not plausible, `observed_ms` is the freeze of the run that read the record, else null.
`accepted_ms` is the acceptance, always a plausible time.
"""

CLAIMS: Final = (
    "id binary, topic string, partition int, offset bigint, accepted_ms bigint, timestamp_ms bigint, status int, "
    f"replayed boolean, position int, batch_hash bigint, topic_id_hash bigint, reject {REJECTED}"
)

ENTERED: Final = 0
"""The `status` of a ledger entry; an answer has its HTTP status, a reject has none.

`position` is an answer's index in its record of the journal: the answers of one record have one timestamp.
`batch_hash` (`hash_of`) stands for the id of the atomic batch that an entry is a member of, `topic_id_hash` for the id
that the topic had when the entry was written.
"""

WRITTEN: Final = f"status IN ({ENTERED}, 201, 202, 504)"
"""The condition that CLAIMS tells of a record that is there or may be: a refused request may name any topic."""

CONTENT_MAX: Final = 1024
"""Bytes of what could not be decoded that are kept."""

# Times outside are a writer's mistake: they would make an hour of their own each, and never meet the window.
PLAUSIBLE_MS: Final = (946_684_800_000, 4_102_444_800_000)  # 2000-01-01 to 2100-01-01

# Records without id share one for a block of offsets: close together in the lake, and no key that all of them share.
BLOCK_OFFSETS: Final = 1 << 20

_PLACE: Final = ("topic", "partition", "offset", "timestamp_ms")

LEDGER_SCHEMA: Final = (
    "v int, begin boolean, slot int, pid bigint, epoch int, instance string, topic_ids map<string, string>, "
    "entries array<struct<id: string, fp: string, at: bigint, topic: string, partition: int, offset: bigint, "
    "ts: bigint, batch: string>>"
)

REQUESTS_SCHEMA: Final = (
    "v int, instance string, "
    "answers array<struct<id: string, fp: string, at: bigint, status: int, code: string, replayed: boolean, "
    "latency_ms: double, topic: string, partition: int, offset: bigint>>"
)


def deliveries(records: DataFrame, frozen_ms: int, identities: Mapping[str, str] | None = None) -> DataFrame:
    """Data records (source.SCHEMA) → COPIES, a row each.

    With a fencepost header: id and fingerprint are the header's. Where the record itself has another fingerprint (a
    program may forward headers and change the value), `alternative_fingerprints` is the record's.
    With only an idempotency key: the id of the key in the empty scope, and the fingerprint of the record as if no
    partition had been asked for; `alternative_fingerprints` has those of the other requests that give this record (with
    its partition, with a traceparent header of the client's own), 8 bytes each. A copy whose header has any of them is
    the same request.
    With neither, the key is what the topic's expression (`identities`) gives; without one, or where it gives null:
    `unkeyed`. With a fencepost header that cannot be parsed and no key: `reject`.
    """
    header, key = _header(wire.STAMP_HEADER), _header(wire.KEY_HEADER)
    key_bytes = F.when(F.octet_length(key) > 0, key)
    for topic, expression in (identities or {}).items():
        identity = wire_expressions.as_binary(identity_of(expression))
        key_bytes = key_bytes.when(key.isNull() & header.isNull() & (F.col("topic") == topic), identity)
    timed = records.withColumn("timestamp", F.timestamp_millis("timestamp_ms")) if identities else records
    read = _parse_headers(
        timed.select(*records.columns, header.cast("string").alias("fencepost_header"), key_bytes.alias("key_bytes"))
    )
    has_header = F.col("has_fencepost_header")
    kind = (
        F.when(has_header | F.col("key_bytes").isNotNull(), EVENT)
        .when(F.col("fencepost_header").isNotNull(), REJECT)
        .otherwise(UNKEYED)
    )
    recorded_ms = plausible(F.col("timestamp_ms"), frozen_ms, frozen_ms)
    computed, others = _fingerprints()
    borne_out = (F.col("header_fingerprint") == computed) | F.array_contains(others, F.col("header_fingerprint"))
    foreign = ~has_header & (kind == EVENT)
    unparsed = _rejected(f"a {wire.STAMP_HEADER} header that cannot be parsed", F.col("fencepost_header"))
    return read.select(
        kind.alias("kind"),
        F.when(has_header, F.col("header_id"))
        .when(kind == EVENT, wire_expressions.event_id(F.col("key_bytes")))
        .otherwise(block_id())
        .alias("id"),
        "topic",
        "partition",
        "offset",
        F.when(has_header, plausible(F.col("header_accepted_ms"), recorded_ms, frozen_ms))
        .otherwise(recorded_ms)
        .alias("accepted_ms"),
        drawn_in(F.col("timestamp_ms")).alias("timestamp_ms"),
        F.when(has_header, F.col("header_fingerprint")).when(foreign, computed).alias("fingerprint"),
        F.when(foreign, wire_expressions.joined(others))
        .when(has_header & ~borne_out, computed)
        .alias("alternative_fingerprints"),
        *(F.when(has_header, F.col(name)).alias(name) for name in ("slot", "pid", "epoch", "instance")),
        "has_fencepost_header",
        F.col("key").isNotNull().alias("has_record_key"),
        F.when(F.col("key").isNotNull(), F.xxhash64("key")).alias("record_key_hash"),
        F.col("key_bytes").cast("string").alias("key"),
        F.when(kind == REJECT, unparsed).alias("reject"),
        F.when(recorded_ms != F.col("timestamp_ms"), recorded_ms).alias("observed_ms"),
    )


def own(records: DataFrame) -> DataFrame:
    """Records (source.SCHEMA) → the same with what they say of themselves: `own_id` by our header, null without it, the
    `own_key` of their header, and `own_fingerprint`, their fingerprint as if no partition had been asked for."""
    named = records.select(
        *records.columns,
        _header(wire.STAMP_HEADER).cast("string").alias("fencepost_header"),
        _header(wire.KEY_HEADER).cast("string").alias("own_key"),
    )
    computed, _ = _fingerprints()
    own_id = F.when(F.col("has_fencepost_header"), F.col("header_id")).alias("own_id")
    return _parse_headers(named).select(*records.columns, own_id, "own_key", computed.alias("own_fingerprint"))


def is_of(id: Column, has_header: Column, fingerprint: Column, key: Column) -> Column:
    """Whether a record (`own`) is the one that a row of the lake tells of, which had these then: another one may stand
    at its place."""
    return F.coalesce(
        rule_table.is_its_record(
            has_header=has_header,
            same_id=F.col("own_id") == id,
            bare=F.col("own_id").isNull(),
            same_content=F.col("own_fingerprint") == fingerprint,
            same_key=F.col("own_key").isNull() | (F.col("own_key") == key),
        ),
        F.lit(False),
    )


def _fingerprints() -> tuple[Column, Column]:
    """The fingerprint of a record (source.SCHEMA) as if no partition had been asked for, and the others it may have.

    A traceparent header is the service's, a tracer's, or the client's own, which is part of what was asked for.
    """
    client = F.filter("headers", lambda header: ~header["key"].isin(*wire.RESERVED_HEADERS, wire.TRACE_HEADER))
    traces = F.filter("headers", lambda header: header["key"] == wire.TRACE_HEADER)
    # The service's own comes before the client's.
    own = F.slice(traces, 2, F.size(traces))
    traced = (
        F.when(F.size(traces) > 1, F.array(F.concat(client, own), F.concat(client, traces)))
        .when(F.size(traces) == 1, F.array(F.concat(client, traces)))
        .otherwise(F.array().cast("array<array<struct<key: string, value: binary>>>"))
    )

    def of(partition: Column | None, headers: Column) -> Column:
        return wire_expressions.fingerprint(F.col("topic"), partition, F.col("key"), headers, F.col("value"))

    placed = F.array(of(F.col("partition"), client))
    others = F.flatten(F.transform(traced, lambda some: F.array(of(None, some), of(F.col("partition"), some))))
    return of(None, client), F.concat(placed, others)


def _parse_headers(read: DataFrame) -> DataFrame:
    """Rows with a `fencepost_header` → the same with its parts, and `has_fencepost_header`: whether it is a valid one.

    Each part is checked by itself: a regular expression over the whole takes as long as the rest of the decoding.
    """
    parts = read.withColumn(
        "parts", F.when(F.col("fencepost_header").startswith(f"{wire.VERSION};"), F.split("fencepost_header", ";", 9))
    )
    part = [F.get("parts", F.lit(nth)) for nth in range(8)]
    named = parts.withColumns(
        {
            "header_id": _unhexed(part[1], wire.ID_BYTES),
            "header_fingerprint": _unhexed(part[2], wire.FINGERPRINT_BYTES),
            "header_accepted_ms": part[3].try_cast("bigint"),
            "slot": part[4].try_cast("int"),
            "pid": part[5].try_cast("bigint"),
            "epoch": part[6].try_cast("int"),
            "instance": part[7],
        }
    )
    whole = F.size("parts") == len(part)
    for name in ("header_id", "header_fingerprint", "header_accepted_ms", "slot", "pid", "epoch"):
        whole = whole & F.col(name).isNotNull()
    return named.withColumn(
        "has_fencepost_header", F.coalesce(whole & F.octet_length("instance").between(1, 64), F.lit(False))
    )


def identity_of(expression: str) -> Column:
    """The string that a topic's expression makes of a record of source.SCHEMA with its `timestamp`."""
    return F.expr(expression).cast("string")


def check_identities(spark: SparkSession, identities: Mapping[str, str]) -> None:
    """CannotRun, with Spark's own words, unless each expression makes one thing of a record, the same each time."""
    records = wire_expressions.rows_of(spark, f"{source.SCHEMA}, timestamp timestamp", [])
    for topic, expression in identities.items():
        try:
            made = records.select("topic", F.when(F.col("topic") == topic, identity_of(expression)).alias("identity"))
            certain = is_deterministic(made)
        except PySparkException as error:
            message = " ".join((error.getMessage() or str(error)).split("\n", 1)[0].split())
            raise CannotRun(
                f"--identity {topic}={expression!r} is no expression over key, value, topic, partition, offset, "
                f"timestamp and headers: {message}"
            ) from error
        if not certain:
            raise CannotRun(f"--identity {topic}={expression!r} gives another id each time; name what the record has")


def ledger(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Ledger records (source.SCHEMA) → CLAIMS, a row for each entry; begin records and empty ones give none."""
    read = _bodies(records, LEDGER_SCHEMA, frozen_ms)
    body = F.col("body")
    whole = body["v"].isin(*sorted(wire.LEDGER_VERSIONS)) & _all_there(body, "slot", "pid", "epoch", "instance")
    entries = (
        F.when(whole & F.coalesce(body["begin"], F.lit(False)), F.array().cast(_array_type(LEDGER_SCHEMA)))
        .when(whole & body["entries"].isNotNull(), body["entries"])
        .otherwise(F.array(F.lit(None)).cast(_array_type(LEDGER_SCHEMA)))
    )
    rows = _each(read, entries, "entry", body["topic_ids"])
    entry = F.col("entry")
    good = _identified(entry) & _all_there(entry, "at", "topic", "ts") & _placed(entry)
    undecoded = _undecoded("ledger record", "entry")
    return rows.select(
        F.when(good, F.unhex(entry["id"])).otherwise(_part_id(undecoded)).alias("id"),
        *(F.when(good, entry[name]).otherwise(F.col(name)).alias(name) for name in ("topic", "partition", "offset")),
        F.when(good, plausible(entry["at"], F.col("timestamp_ms"), F.col("timestamp_ms")))
        .otherwise(F.col("timestamp_ms"))
        .alias("accepted_ms"),
        "timestamp_ms",
        F.when(good, F.lit(ENTERED)).alias("status"),
        F.lit(False).alias("replayed"),
        F.col("position"),
        hash_of(_unhexed(entry["batch"], wire.ID_BYTES)).alias("batch_hash"),
        hash_of(F.try_element_at("beside", entry["topic"])).alias("topic_id_hash"),
        F.when(~good, undecoded).alias("reject"),
    )


def hash_of(id: Column) -> Column:
    """A number that stands for an id of a batch or a topic, as numbers are cheap to carry; null for null."""
    return F.when(id.isNotNull(), F.xxhash64(id))


def answers(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Records of the journal (source.SCHEMA) → CLAIMS, a row for each answer; `timestamp_ms` is its record's.

    Only a 201 names a partition and an offset.
    """
    read = _bodies(records, REQUESTS_SCHEMA, frozen_ms)
    body = F.col("body")
    whole = (body["v"] == wire.VERSION) & body["answers"].isNotNull()
    listed = F.when(whole, body["answers"]).otherwise(F.array(F.lit(None)).cast(_array_type(REQUESTS_SCHEMA)))
    rows = _each(read, listed, "answer")
    answer = F.col("answer")
    good = _identified(answer) & _all_there(answer, "at", "status", "topic")
    placed = good & (answer["status"] == 201) & _placed(answer)
    undecoded = _undecoded("record of the journal", "answer")
    return rows.select(
        F.when(good, F.unhex(answer["id"])).otherwise(_part_id(undecoded)).alias("id"),
        F.when(good, answer["topic"]).otherwise(F.col("topic")).alias("topic"),
        *(F.when(placed, answer[name]).when(~good, F.col(name)).alias(name) for name in ("partition", "offset")),
        F.when(good, plausible(answer["at"], F.col("timestamp_ms"), F.col("timestamp_ms")))
        .otherwise(F.col("timestamp_ms"))
        .alias("accepted_ms"),
        "timestamp_ms",
        F.when(good, answer["status"]).alias("status"),
        (good & F.coalesce(answer["replayed"], F.lit(False))).alias("replayed"),
        F.col("position"),
        F.lit(None).cast("bigint").alias("batch_hash"),
        F.lit(None).cast("bigint").alias("topic_id_hash"),
        F.when(~good, undecoded).alias("reject"),
    )


def _bodies(records: DataFrame, schema: str, frozen_ms: int) -> DataFrame:
    return records.select(
        "topic",
        "partition",
        "offset",
        plausible(F.col("timestamp_ms"), frozen_ms, frozen_ms).alias("timestamp_ms"),
        "value",
        F.from_json(F.col("value").cast("string"), schema).alias("body"),
    )


def _each(read: DataFrame, items: Column, name: str, beside: Column | None = None) -> DataFrame:
    """A row for each item of a record, with its position and the record's place, what is to go `beside` it, and the
    record's first bytes where it has no items.

    In two steps, so that no more than that goes with each item: the record beside each would be quadratic.
    """
    broken = F.when(F.get(items, F.lit(0)).isNull(), F.substring("value", 1, CONTENT_MAX))
    other = F.lit(None) if beside is None else beside
    whole = read.select(*_PLACE, broken.alias("value"), items.alias("items"), other.alias("beside"))
    return whole.select(*_PLACE, "value", "beside", F.posexplode("items").alias("position", name))


def _undecoded(record: str, part: str) -> Column:
    """Why a record, or one of its parts, was not decoded."""
    return F.when(F.col(part).isNull(), _rejected(f"no {record} of version {wire.VERSION}", F.col("value"))).otherwise(
        _rejected(f"a {record} whose {part} lacks a field or has one of another form", F.to_json(part))
    )


def _rejected(reason: str, content: Column) -> Column:
    capped = F.substring(content.cast("binary"), 1, CONTENT_MAX)
    return F.struct(F.lit(reason).alias("reason"), capped.alias("content"))


def plausible(ms: Column, otherwise: Column | int, now_ms: Column | int) -> Column:
    """A time in ms that can be meant at `now_ms`, else the other one."""
    return F.when(ms.between(*PLAUSIBLE_MS) & ~rule_table.is_ahead(ms, now_ms), ms).otherwise(otherwise)


def drawn_in(ms: Column) -> Column:
    """A time in ms, or the nearest that can be written down: times that cannot be meant keep their order so far."""
    first, last = PLAUSIBLE_MS
    return F.least(F.greatest(ms, F.lit(first)), F.lit(last))


def block_id(*more: Column) -> Column:
    """What stands for the id of records that have none: their place, to a block of offsets, and `more`."""
    block = F.floor(F.col("offset") / BLOCK_OFFSETS).cast("string")
    return wire_expressions.as_binary(F.concat_ws("/", "topic", F.col("partition").cast("string"), block, *more))


def _part_id(reject: Column) -> Column:
    """The same for a part of a record that was not decoded: other bytes at the same place are another part."""
    return block_id(F.sha2(F.to_json(reject), 256))


def _header(name: str) -> Column:
    """The value of a record's first header of this name: what others add behind it cannot displace ours.

    The service writes its own two first, in this order: looking there before searching is a quarter of the decoding.
    """
    at = [F.get("headers", F.lit(nth)) for nth in (0, 1)]
    found = F.try_element_at(F.filter("headers", lambda header: header["key"] == name), F.lit(1))
    return (
        F.when(at[0]["key"] == name, at[0]["value"])
        .when(at[1]["key"] == name, at[1]["value"])
        .otherwise(found["value"])
    )


def _all_there(body: Column, *names: str) -> Column:
    there = F.lit(True)
    for name in names:
        there = there & body[name].isNotNull()
    return there


def _placed(body: Column) -> Column:
    """Whether an entry or answer names a place that a log can have: a producer that got none says -1."""
    return F.coalesce((body["partition"] >= 0) & (body["offset"] >= 0), F.lit(False))


def _identified(body: Column) -> Column:
    """Whether an entry or answer has an id and a fingerprint of the right form; false, never null."""
    return _unhexed(body["id"], wire.ID_BYTES).isNotNull() & _unhexed(body["fp"], wire.FINGERPRINT_BYTES).isNotNull()


def _unhexed(digits: Column, size: int) -> Column:
    """The bytes that hexadecimal digits stand for, null where they are not just so many."""
    return F.when(F.octet_length(digits) == 2 * size, F.unhex(digits))


def _array_type(schema: str) -> str:
    """The array<struct<…>> in one of the schemas above."""
    return schema[schema.index("array<") :]
