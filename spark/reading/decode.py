"""Decode Kafka records into evidence: one narrow row for each delivered record, ledger entry and answer.

COPIES is the schema of delivered records, CLAIMS the schema of ledger entries and journaled answers. A copy is an
`event`, or a record without id: `unkeyed` (neither of Fencepost's headers) or `reject` (not decodable).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract.wire.headers import KEY_HEADER, RESERVED_HEADERS, STAMP_HEADER, STAMP_VERSION, TRACE_HEADER
from service.contract.wire.ids import FINGERPRINT_BYTES, ID_BYTES
from service.contract.wire.versions import LEDGER_VERSIONS, VERSION, VERSION_MOST
from spark import rule_table
from spark.engine import frames
from spark.engine.jvm import Py4JError, is_deterministic
from spark.errors import CannotRun
from spark.reading import source, wire_expressions

EVENT: Final = "event"
UNKEYED: Final = "unkeyed"
REJECT: Final = "reject"

REJECTED: Final = "struct<reason: string, content: binary>"
"""Why a record could not be decoded, and the first CONTENT_MAX bytes of the undecoded part."""

COPIES: Final = (
    "kind string, id binary, topic string, partition int, offset bigint, accepted_ms bigint, timestamp_ms bigint, "
    "observed_ms bigint, fingerprint binary, alternative_fingerprints binary, slot int, pid bigint, epoch int, "
    "instance string, has_fencepost_header boolean, has_record_key boolean, record_key_hash bigint, key string, "
    f"reject {REJECTED}"
)
"""`timestamp_ms` is the record's timestamp, clamped to PLAUSIBLE_MS, so that the order of copies is the same in every
run. If the timestamp is not plausible, `observed_ms` is when the run that read the record froze the ends, else null.
`accepted_ms` is the acceptance, always a plausible time.
"""

CLAIMS: Final = (
    "id binary, topic string, partition int, offset bigint, accepted_ms bigint, timestamp_ms bigint, status int, "
    f"replayed boolean, position int, batch_hash bigint, topic_id_hash bigint, key_ttl_s bigint, reject {REJECTED}"
)

ENTERED: Final = 0
"""The `status` of a ledger entry in CLAIMS; an answer has its HTTP status, a reject has null.

`position` is an answer's index in its journal record: the answers of one record share one timestamp.
`batch_hash` is the hash (`hash_of`) of the id of the atomic batch that contains an entry, `topic_id_hash` the hash of
the id that the topic had when the entry was written. `key_ttl_s` is the retention of an entry's key, in seconds: 0 for
the service's own, null for an answer.
"""

CONTENT_MAX: Final = 1024
"""How many bytes of an undecoded record, or part of a record, are kept."""

# Times outside this range are a writer's mistake: each would add an hour (a partition of the lake) outside any window.
PLAUSIBLE_MS: Final = (946_684_800_000, 4_102_444_800_000)  # 2000-01-01 to 2100-01-01

# Records without id share an id for each block of offsets: close together in the lake, and no single hot key.
BLOCK_OFFSETS: Final = 1 << 20

_COORDINATES: Final = ("topic", "partition", "offset", "timestamp_ms")

# Around the reason in the error of a task that has met a record of a later version.
_NEWER: Final = re.compile(r"<newer-version>(.+?)</newer-version>")

LEDGER_SCHEMA: Final = (
    "v int, begin boolean, slot int, pid bigint, epoch int, instance string, topic_ids map<string, string>, "
    "entries array<struct<id: string, fp: string, at: bigint, topic: string, partition: int, offset: bigint, "
    "ts: bigint, batch: string, ttl: bigint>>"
)

REQUESTS_SCHEMA: Final = (
    "v int, instance string, "
    "answers array<struct<id: string, fp: string, at: bigint, status: int, code: string, replayed: boolean, "
    "latency_ms: double, topic: string, partition: int, offset: bigint>>"
)


def copies(records: DataFrame, frozen_ms: int, identities: Mapping[str, str] | None = None) -> DataFrame:
    """Decode data records (source.SCHEMA) into COPIES, a row for each record.

    With a fencepost header, id and fingerprint are the header's. If the record itself has another fingerprint (a
    program may forward headers and change the value), `alternative_fingerprints` has the record's (its computed
    fingerprint).
    With only an idempotency key, the id is that of the key in the empty scope, and the fingerprint that of a request
    without a partition; `alternative_fingerprints` has the possible fingerprints: those of the other requests that
    produce the same record (with its partition, with a traceparent header of the client), 8 bytes each. If the header
    of a copy has a possible fingerprint of another copy, both copies are the same request.
    With neither header, the topic's expression in `identities` computes the key; without an expression, or where the
    expression is null, the record is `unkeyed`. With a fencepost header that cannot be parsed and no key, the record is
    a `reject`.
    """
    read = _parse_headers(_with_headers(records, identities or {}), refuses_newer=True)
    kind = _kind()
    has_header, record_key = F.col("has_fencepost_header"), F.col("key")
    unparsed = _rejected(f"a {STAMP_HEADER} header that cannot be parsed", F.col("fencepost_header"))
    columns = {
        "kind": kind,
        "id": F.when(has_header, F.col("header_id"))
        .when(kind == EVENT, wire_expressions.event_id(F.col("key_bytes")))
        .otherwise(block_id()),
        **{name: F.col(name) for name in ("topic", "partition", "offset")},
        **_times(frozen_ms),
        **_fingerprint_columns(kind),
        **{name: F.when(has_header, F.col(name)) for name in rule_table.PRODUCER},
        "has_fencepost_header": has_header,
        "has_record_key": record_key.isNotNull(),
        "record_key_hash": F.when(record_key.isNotNull(), F.xxhash64(record_key)),
        "key": F.col("key_bytes").cast("string"),
        "reject": F.when(kind == REJECT, unparsed),
    }
    return read.select(*(column.alias(name) for name, column in columns.items()))


@contextmanager
def newer_versions_refused() -> Iterator[None]:
    """Raise CannotRun where Spark fails because a record is of a version that only a newer release writes.

    By a job that cannot decode a ledger, every event of that ledger would be a phantom.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        reason = _NEWER.search(str(error))
        if reason is None:
            raise
        raise CannotRun(reason[1]) from error


def _refuse(what: str, version: Column, known: Collection[int], remedy: str = "") -> Column:
    """Fail the run, with a reason for `newer_versions_refused` that names the record (source.SCHEMA) and the remedy."""
    reason = F.format_string(
        f"<newer-version>%s[%s]@%s is {what} of version %s, which a newer release has written: this job reads version "
        f"{max(known)} at most; run the job of that release{remedy}</newer-version>",
        *(column.cast("string") for column in (F.col("topic"), F.col("partition"), F.col("offset"), version)),
    )
    return F.raise_error(reason)


def _is_newer(version: Column, known: Collection[int]) -> Column:
    """Check whether a version is one that a newer release may have introduced, as versions.is_newer does."""
    return version.between(max(known) + 1, VERSION_MOST)


def _with_headers(records: DataFrame, identities: Mapping[str, str]) -> DataFrame:
    """Add Fencepost's headers: source.SCHEMA → source.SCHEMA, `fencepost_header string, key_bytes binary`.

    `key_bytes` is the idempotency key; without both headers that of the topic's expression in `identities`.
    """
    header, key = _header(STAMP_HEADER), _header(KEY_HEADER)
    key_bytes = F.when(F.octet_length(key) > 0, key)
    for topic, expression in identities.items():
        identity = wire_expressions.as_binary(identity_of(expression))
        key_bytes = key_bytes.when(key.isNull() & header.isNull() & (F.col("topic") == topic), identity)
    timed = records.withColumn("timestamp", F.timestamp_millis("timestamp_ms")) if identities else records
    return timed.select(*records.columns, header.cast("string").alias("fencepost_header"), key_bytes.alias("key_bytes"))


def _kind() -> Column:
    """Return the kind of a record with parsed headers: EVENT, UNKEYED or REJECT."""
    return (
        F.when(F.col("has_fencepost_header") | F.col("key_bytes").isNotNull(), EVENT)
        .when(F.col("fencepost_header").isNotNull(), REJECT)
        .otherwise(UNKEYED)
    )


def _times(frozen_ms: int) -> dict[str, Column]:
    """Return the times of a record with parsed headers (COPIES): `accepted_ms`, `timestamp_ms`, `observed_ms`."""
    recorded_ms = plausible(F.col("timestamp_ms"), frozen_ms, frozen_ms)
    accepted_ms = _acceptance(F.col("header_accepted_ms"), recorded_ms, frozen_ms)
    return {
        "accepted_ms": F.when(F.col("has_fencepost_header"), accepted_ms).otherwise(recorded_ms),
        "timestamp_ms": clamped(F.col("timestamp_ms")),
        "observed_ms": F.when(recorded_ms != F.col("timestamp_ms"), recorded_ms),
    }


def _fingerprint_columns(kind: Column) -> dict[str, Column]:
    """Return the fingerprints of a record with parsed headers: `fingerprint`, `alternative_fingerprints` (COPIES)."""
    has_header, of_header = F.col("has_fencepost_header"), F.col("header_fingerprint")
    computed, possible = _fingerprints()
    matches_record = (of_header == computed) | F.array_contains(possible, of_header)
    foreign = ~has_header & (kind == EVENT)
    joined = wire_expressions.joined(possible)
    return {
        "fingerprint": F.when(has_header, of_header).when(foreign, computed),
        "alternative_fingerprints": F.when(foreign, joined).when(has_header & ~matches_record, computed),
    }


def with_own_identity(records: DataFrame) -> DataFrame:
    """Add each record's own identity to records (source.SCHEMA).

    `own_id` is the id in Fencepost's header, null without that header or if it is of a later version; `own_key` the
    idempotency key in the record's header; `own_fingerprint` the fingerprint of a request for this record without a
    partition.
    """
    with_headers = records.select(
        *records.columns,
        _header(STAMP_HEADER).cast("string").alias("fencepost_header"),
        _header(KEY_HEADER).cast("string").alias("own_key"),
    )
    computed, _ = _fingerprints()
    own_id = F.when(F.col("has_fencepost_header"), F.col("header_id")).alias("own_id")
    read = _parse_headers(with_headers, refuses_newer=False)
    return read.select(*records.columns, own_id, "own_key", computed.alias("own_fingerprint"))


def by_header(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Find the events that records (source.SCHEMA, and other columns) name by Fencepost's header.

    → the columns but `key, value, headers`, with `id binary` (null without a valid header) and `event_ms bigint`, the
    acceptance in that header, else the timestamp: always a plausible time. A header of a later version fails the run.
    """
    header = _header(STAMP_HEADER).cast("string").alias("fencepost_header")
    read = _parse_headers(records.select(*records.columns, header), refuses_newer=True)
    kept = [name for name in records.columns if name not in ("key", "value", "headers")]
    has_header = F.col("has_fencepost_header")
    return read.select(
        *kept,
        F.when(has_header, F.col("header_id")).alias("id"),
        _times(frozen_ms)["accepted_ms"].alias("event_ms"),
    )


def is_record_of(id: Column, has_header: Column, fingerprint: Column, key: Column) -> Column:
    """Check whether a record (`with_own_identity`) is the record of a row of `deliveries` with these columns.

    A log that was recreated or truncated may have another record at the row's offset.
    """
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
    """Compute a record's (source.SCHEMA) fingerprint without a partition, and the array of its other possible
    fingerprints.

    A traceparent header was added by the service or a tracer, or sent by the client; only the client's is part of the
    request.
    """
    client = F.filter("headers", lambda header: ~header["key"].isin(*RESERVED_HEADERS, TRACE_HEADER))
    traces = F.filter("headers", lambda header: header["key"] == TRACE_HEADER)
    # The service's traceparent header comes before the client's.
    sent = F.slice(traces, 2, F.size(traces))
    traced = (
        F.when(F.size(traces) > 1, F.array(F.concat(client, sent), F.concat(client, traces)))
        .when(F.size(traces) == 1, F.array(F.concat(client, traces)))
        .otherwise(F.array().cast("array<array<struct<key: string, value: binary>>>"))
    )

    def of(partition: Column | None, headers: Column) -> Column:
        return wire_expressions.fingerprint(F.col("topic"), partition, F.col("key"), headers, F.col("value"))

    with_partition = F.array(of(F.col("partition"), client))
    with_traces = F.flatten(
        F.transform(traced, lambda headers: F.array(of(None, headers), of(F.col("partition"), headers)))
    )
    return of(None, client), F.concat(with_partition, with_traces)


def _parse_headers(read: DataFrame, *, refuses_newer: bool) -> DataFrame:
    """Add the fields of `fencepost_header`, and `has_fencepost_header`: whether that header is valid.

    Each field is checked by itself: a regular expression over the whole header takes as long as the rest of the
    decoding. A header of a later version fails the run if `refuses_newer`: its id, and so all verdicts about it, are
    not known. Without `refuses_newer` that header is not valid.
    """
    header, known = F.col("fencepost_header"), (VERSION,)
    version = F.substring_index(header, ";", 1).try_cast("int")
    is_newer = header.rlike(f"^{STAMP_VERSION}") & _is_newer(version, known)
    unless = "; or, if no release of Fencepost has written it, leave its topic out with --without-topics"
    newer = _refuse(f"a record with a {STAMP_HEADER} header", version, known, unless)
    split = F.when(header.startswith(f"{VERSION};"), F.split(header, ";", 9))
    if refuses_newer:
        split = split.when(is_newer, newer)
    parts = read.withColumn("parts", split)
    part = [F.get("parts", F.lit(nth)) for nth in range(8)]
    with_fields = parts.withColumns(
        {
            "header_id": _unhexed(part[1], ID_BYTES),
            "header_fingerprint": _unhexed(part[2], FINGERPRINT_BYTES),
            "header_accepted_ms": part[3].try_cast("bigint"),
            "slot": part[4].try_cast("int"),
            "pid": part[5].try_cast("bigint"),
            "epoch": part[6].try_cast("int"),
            "instance": part[7],
        }
    )
    is_valid = F.size("parts") == len(part)
    for name in ("header_id", "header_fingerprint", "header_accepted_ms", "slot", "pid", "epoch"):
        is_valid = is_valid & F.col(name).isNotNull()
    return with_fields.withColumn(
        "has_fencepost_header", F.coalesce(is_valid & F.octet_length("instance").between(1, 64), F.lit(False))
    )


def identity_of(expression: str) -> Column:
    """Compute a topic's `--identity` expression over records of source.SCHEMA with a `timestamp`, as a string."""
    return F.expr(expression).cast("string")


def check_identities(spark: SparkSession, identities: Mapping[str, str]) -> None:
    """Check that each expression is valid and deterministic; CannotRun, with Spark's message, otherwise."""
    if not identities:
        return
    records = frames.rows_of(spark, f"{source.SCHEMA}, timestamp timestamp", [])
    for topic, expression in identities.items():
        try:
            computed = records.select(
                "topic", F.when(F.col("topic") == topic, identity_of(expression)).alias("identity")
            )
            deterministic = is_deterministic(computed)
        except PySparkException as error:
            message = " ".join((error.getMessage() or str(error)).split("\n", 1)[0].split())
            raise CannotRun(
                f"--identity {topic}={expression!r} is no expression over key, value, topic, partition, offset, "
                f"timestamp and headers: {message}"
            ) from error
        if not deterministic:
            raise CannotRun(
                f"--identity {topic}={expression!r} gives another id each time; use the record's own columns"
            )


def ledger(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Decode ledger records (source.SCHEMA) into CLAIMS, a row for each entry; begin and empty records have none.

    A record of a later version fails the run.
    """
    read = _bodies(records, LEDGER_SCHEMA, frozen_ms)
    body = F.col("body")
    is_valid = body["v"].isin(*sorted(LEDGER_VERSIONS)) & _has_all(body, *rule_table.PRODUCER)
    known = LEDGER_VERSIONS
    entries = (
        F.when(_is_newer(body["v"], known), _refuse("a ledger record", body["v"], known))
        .when(is_valid & F.coalesce(body["begin"], F.lit(False)), F.array().cast(_array_type(LEDGER_SCHEMA)))
        .when(is_valid & body["entries"].isNotNull(), body["entries"])
        .otherwise(F.array(F.lit(None)).cast(_array_type(LEDGER_SCHEMA)))
    )
    rows = _each(read, entries, "entry", body["topic_ids"])
    entry = F.col("entry")
    valid = _identified(entry) & _has_all(entry, "at", "topic", "ts") & _has_coordinates(entry)
    undecoded = _undecoded("ledger record", "entry")
    return rows.select(
        F.when(valid, F.unhex(entry["id"])).otherwise(_part_id(undecoded)).alias("id"),
        *(F.when(valid, entry[name]).otherwise(F.col(name)).alias(name) for name in ("topic", "partition", "offset")),
        F.when(valid, _acceptance(entry["at"], plausible(entry["ts"], frozen_ms, frozen_ms), frozen_ms))
        .otherwise(F.col("timestamp_ms"))
        .alias("accepted_ms"),
        "timestamp_ms",
        F.when(valid, F.lit(ENTERED)).alias("status"),
        F.lit(False).alias("replayed"),
        F.col("position"),
        hash_of(_unhexed(entry["batch"], ID_BYTES)).alias("batch_hash"),
        hash_of(F.try_element_at("topic_ids", entry["topic"])).alias("topic_id_hash"),
        F.when(valid, F.greatest(F.lit(0), entry["ttl"])).alias("key_ttl_s"),
        F.when(~valid, undecoded).alias("reject"),
    )


def hash_of(id: Column) -> Column:
    """Hash the id of a batch or a topic to a number, which is cheap to exchange; null for null."""
    return F.when(id.isNotNull(), F.xxhash64(id))


def answers(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Decode journal records (source.SCHEMA) into CLAIMS, a row for each answer; `timestamp_ms` is the record's.

    Only a 201 has a partition and an offset. A record of a later version fails the run.
    """
    read = _bodies(records, REQUESTS_SCHEMA, frozen_ms)
    body = F.col("body")
    is_valid = (body["v"] == VERSION) & body["answers"].isNotNull()
    known = (VERSION,)
    newer = _refuse("a record of the journal", body["v"], known)
    listed = (
        F.when(_is_newer(body["v"], known), newer)
        .when(is_valid, body["answers"])
        .otherwise(F.array(F.lit(None)).cast(_array_type(REQUESTS_SCHEMA)))
    )
    rows = _each(read, listed, "answer")
    answer = F.col("answer")
    valid = _identified(answer) & _has_all(answer, "at", "status", "topic")
    has_offset = valid & (answer["status"] == 201) & _has_coordinates(answer)
    undecoded = _undecoded("record of the journal", "answer")
    return rows.select(
        F.when(valid, F.unhex(answer["id"])).otherwise(_part_id(undecoded)).alias("id"),
        F.when(valid, answer["topic"]).otherwise(F.col("topic")).alias("topic"),
        *(F.when(has_offset, answer[name]).when(~valid, F.col(name)).alias(name) for name in ("partition", "offset")),
        F.when(valid, _acceptance(answer["at"], F.col("timestamp_ms"), frozen_ms))
        .otherwise(F.col("timestamp_ms"))
        .alias("accepted_ms"),
        "timestamp_ms",
        F.when(valid, answer["status"]).alias("status"),
        (valid & F.coalesce(answer["replayed"], F.lit(False))).alias("replayed"),
        F.col("position"),
        F.lit(None).cast("bigint").alias("batch_hash"),
        F.lit(None).cast("bigint").alias("topic_id_hash"),
        F.lit(None).cast("bigint").alias("key_ttl_s"),
        F.when(~valid, undecoded).alias("reject"),
    )


def _bodies(records: DataFrame, schema: str, frozen_ms: int) -> DataFrame:
    """Parse the JSON values of records (source.SCHEMA) into `body`, null where the JSON is invalid."""
    return records.select(
        "topic",
        "partition",
        "offset",
        plausible(F.col("timestamp_ms"), frozen_ms, frozen_ms).alias("timestamp_ms"),
        "value",
        F.from_json(F.col("value").cast("string"), schema).alias("body"),
    )


def _each(read: DataFrame, items: Column, name: str, topic_ids: Column | None = None) -> DataFrame:
    """Explode the items of each record into rows with `position`, the record's coordinates, `topic_ids`, and `value`.

    `value` has the record's first bytes if the record has no items. The explode is a second step, so that an item's
    row carries these columns only: the whole record in each row would be quadratic.
    """
    broken = F.when(F.get(items, F.lit(0)).isNull(), F.substring("value", 1, CONTENT_MAX))
    ids = F.lit(None) if topic_ids is None else topic_ids
    narrow = read.select(*_COORDINATES, broken.alias("value"), items.alias("items"), ids.alias("topic_ids"))
    return narrow.select(*_COORDINATES, "value", "topic_ids", F.posexplode("items").alias("position", name))


def _undecoded(record: str, part: str) -> Column:
    """Describe (REJECTED) why a record, or one of its parts, was not decoded."""
    return F.when(F.col(part).isNull(), _rejected(f"no {record} of version {VERSION}", F.col("value"))).otherwise(
        _rejected(f"a {record} whose {part} lacks a field or has one of another form", F.to_json(part))
    )


def _rejected(reason: str, content: Column) -> Column:
    """Build a struct of REJECTED."""
    capped = F.substring(content.cast("binary"), 1, CONTENT_MAX)
    return F.struct(F.lit(reason).alias("reason"), capped.alias("content"))


def plausible(ms: Column, otherwise: Column | int, now_ms: Column | int) -> Column:
    """Return a time in ms if it lies in PLAUSIBLE_MS and is not ahead of `now_ms`, else `otherwise`."""
    return F.when(ms.between(*PLAUSIBLE_MS) & ~rule_table.is_ahead(ms, now_ms), ms).otherwise(otherwise)


def _acceptance(accepted_ms: Column, recorded_ms: Column, frozen_ms: int) -> Column:
    """Return an acceptance, or the timestamp of its record if the acceptance is not plausible.

    A record, its ledger entry and its answers have the same acceptance, so a run decides the same about each, and they
    count in one hour. A ledger entry names the record's timestamp; if that is not plausible either, both take the run's
    time. For an answer the timestamp of its journal record stands in.
    """
    return plausible(accepted_ms, recorded_ms, frozen_ms)


def clamped(ms: Column) -> Column:
    """Clamp a time in ms to PLAUSIBLE_MS; within that range implausible times keep their order."""
    earliest, latest = PLAUSIBLE_MS
    return F.least(F.greatest(ms, F.lit(earliest)), F.lit(latest))


def block_id(*more: Column) -> Column:
    """Build an id for records without one, from topic, partition, the block of their offsets, and `more`."""
    block = F.floor(F.col("offset") / BLOCK_OFFSETS).cast("string")
    return wire_expressions.as_binary(F.concat_ws("/", "topic", F.col("partition").cast("string"), block, *more))


def _part_id(reject: Column) -> Column:
    """Build the `block_id` of an undecoded part of a record; parts with other bytes at the same offset differ."""
    return block_id(F.sha2(F.to_json(reject), 256))


def _header(name: str) -> Column:
    """Return the value of a record's first header of this name, so that headers added later do not override it.

    The service writes its two headers first, in this order: checking these positions before searching saves a large
    part of the decoding.
    """
    at = [F.get("headers", F.lit(nth)) for nth in (0, 1)]
    found = F.try_element_at(F.filter("headers", lambda header: header["key"] == name), F.lit(1))
    return (
        F.when(at[0]["key"] == name, at[0]["value"])
        .when(at[1]["key"] == name, at[1]["value"])
        .otherwise(found["value"])
    )


def _has_all(body: Column, *names: str) -> Column:
    """Check that none of these fields is null."""
    complete = F.lit(True)
    for name in names:
        complete = complete & body[name].isNotNull()
    return complete


def _has_coordinates(body: Column) -> Column:
    """Check whether an entry or answer has a valid partition and offset; without an offset a producer writes -1."""
    return F.coalesce((body["partition"] >= 0) & (body["offset"] >= 0), F.lit(False))


def _identified(body: Column) -> Column:
    """Check whether an entry or answer has an id and a fingerprint of the right form; false, never null."""
    return _unhexed(body["id"], ID_BYTES).isNotNull() & _unhexed(body["fp"], FINGERPRINT_BYTES).isNotNull()


def _unhexed(digits: Column, size: int) -> Column:
    """Decode hexadecimal digits of exactly `size` bytes; null for any other text."""
    return F.when(F.octet_length(digits) == 2 * size, F.unhex(digits))


def _array_type(schema: str) -> str:
    """Return the array<struct<…>> in one of the schemas above."""
    return schema[schema.index("array<") :]
