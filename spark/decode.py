"""Records → evidence: one narrow row for each delivered record, ledger entry and answer, whatever wrote it.

EVIDENCE is the one shape in which everything meets that is known of an id. `kind` says what the row is about:
an `event`, or a record that cannot be told apart (`unkeyed`: neither of our headers; `reject`: not decodable), which
is counted by partition and block of offsets instead of by id.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service import wire
from spark import native

EVENT: Final = "event"
UNKEYED: Final = "unkeyed"
REJECT: Final = "reject"

COPY: Final = 0
ENTRY: Final = 1
ANSWER_201: Final = 2
ANSWER: Final = 3
"""Roles: a delivered record; a ledger entry; an answer that names a place; any other answer."""

EVIDENCE: Final = (
    "kind string, id binary, role tinyint, at bigint, ts bigint, fp binary, alt binary, topic string, partition int, "
    "offset bigint, slot int, pid bigint, epoch int, instance string, stamped boolean, keyed boolean, key string, "
    "status int, replayed boolean"
)

# Times outside are a writer's mistake: they would make an hour of their own each, and never meet the window.
PLAUSIBLE_MS: Final = (946_684_800_000, 4_102_444_800_000)  # 2000-01-01 to 2100-01-01

# A row of records that cannot be told apart stands for this many offsets at most, so that no group grows without end.
BLOCK_OFFSETS: Final = 1 << 20

_STAMP: Final = (
    rf"^{wire.VERSION};[0-9a-f]{{{2 * wire.ID_BYTES}}};[0-9a-f]{{{2 * wire.FINGERPRINT_BYTES}}};"
    r"[0-9]{1,15};[0-9]{1,9};-?[0-9]{1,19};-?[0-9]{1,9};[A-Za-z0-9._:-]{1,64}$"
)

_PLACE: Final = ("topic", "partition", "offset", "ts")

LEDGER_SCHEMA: Final = (
    "v int, begin boolean, slot int, pid bigint, epoch int, instance string, "
    "entries array<struct<id: string, fp: string, at: bigint, topic: string, partition: int, offset: bigint, "
    "ts: bigint>>"
)

REQUESTS_SCHEMA: Final = (
    "v int, instance string, "
    "answers array<struct<id: string, fp: string, at: bigint, status: int, code: string, replayed: boolean, "
    "latency_ms: double, topic: string, partition: int, offset: bigint>>"
)


def deliveries(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Data records (source.SCHEMA) → EVIDENCE, a row each.

    With our stamp: identity and fingerprint are the stamp's. With only an idempotency key: the id of the key in the
    empty scope, and a fingerprint computed from the record as if no partition had been asked for (`alt`: as if its
    own partition had been); either that equals a stamped copy's means the same request. With neither: `unkeyed`. With
    a stamp that cannot be read and no key: `reject`.
    """
    stamp, key = _header(wire.STAMP_HEADER), _header(wire.KEY_HEADER)
    read = records.select(
        "*",
        stamp.cast("string").alias("stamp"),
        F.when(F.octet_length(key) > 0, key).alias("key_bytes"),
    ).withColumn("parts", F.when(F.col("stamp").rlike(_STAMP), F.split("stamp", ";")))
    part = F.col("parts").getItem
    stamped = F.col("parts").isNotNull()
    kind = (
        F.when(stamped | F.col("key_bytes").isNotNull(), EVENT)
        .when(F.col("stamp").isNotNull(), REJECT)
        .otherwise(UNKEYED)
    )
    client = F.filter(
        "headers", lambda header: ~header["key"].isin(wire.KEY_HEADER, wire.STAMP_HEADER, wire.TRACE_HEADER)
    )
    asked = [F.col("key"), client, F.col("value")]
    computed = native.fingerprint(F.col("topic"), None, *asked)
    with_partition = native.fingerprint(F.col("topic"), F.col("partition"), *asked)
    ts = plausible(F.col("timestamp_ms"), frozen_ms)
    foreign = ~stamped & (kind == EVENT)
    return read.select(
        kind.alias("kind"),
        F.when(stamped, F.unhex(part(1)))
        .when(kind == EVENT, native.event_id(F.col("key_bytes")))
        .otherwise(block_id())
        .alias("id"),
        F.lit(COPY).cast("tinyint").alias("role"),
        F.when(stamped, plausible(part(3).cast("bigint"), ts)).otherwise(ts).alias("at"),
        ts.alias("ts"),
        F.when(stamped, F.unhex(part(2))).when(foreign, computed).alias("fp"),
        F.when(foreign, with_partition).alias("alt"),
        "topic",
        "partition",
        "offset",
        part(4).cast("int").alias("slot"),
        part(5).try_cast("bigint").alias("pid"),
        part(6).cast("int").alias("epoch"),
        part(7).alias("instance"),
        stamped.alias("stamped"),
        F.col("key").isNotNull().alias("keyed"),
        F.col("key_bytes").cast("string").alias("key"),
        F.lit(None).cast("int").alias("status"),
        F.lit(None).cast("boolean").alias("replayed"),
    )


def ledger(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Ledger records (source.SCHEMA) → EVIDENCE, a row for each entry; begin records and empty ones give none."""
    read = records.select(
        "topic",
        "partition",
        "offset",
        plausible(F.col("timestamp_ms"), frozen_ms).alias("ts"),
        F.from_json(F.col("value").cast("string"), LEDGER_SCHEMA).alias("body"),
    )
    body = F.col("body")
    whole = (body["v"] == wire.VERSION) & _all_there(body, "slot", "pid", "epoch", "instance")
    entries = (
        F.when(whole & F.coalesce(body["begin"], F.lit(False)), F.array().cast(_array_type(LEDGER_SCHEMA)))
        .when(whole & body["entries"].isNotNull(), body["entries"])
        .otherwise(F.array(F.lit(None)).cast(_array_type(LEDGER_SCHEMA)))
    )
    # Only what each entry needs goes with it: the whole record beside every entry would be quadratic.
    writer = [body[name].alias(name) for name in ("slot", "pid", "epoch", "instance")]
    rows = read.select(*_PLACE, *writer, F.explode(entries).alias("entry"))
    entry = F.col("entry")
    good = _identified(entry) & _all_there(entry, "at", "topic", "partition", "offset", "ts")
    return rows.select(
        F.when(good, EVENT).otherwise(REJECT).alias("kind"),
        F.when(good, F.unhex(entry["id"])).otherwise(block_id()).alias("id"),
        F.lit(ENTRY).cast("tinyint").alias("role"),
        F.when(good, plausible(entry["at"], F.col("ts"))).otherwise(F.col("ts")).alias("at"),
        "ts",
        F.when(good, F.unhex(entry["fp"])).alias("fp"),
        F.lit(None).cast("binary").alias("alt"),
        F.when(good, entry["topic"]).otherwise(F.col("topic")).alias("topic"),
        F.when(good, entry["partition"]).otherwise(F.col("partition")).alias("partition"),
        F.when(good, entry["offset"]).otherwise(F.col("offset")).alias("offset"),
        F.when(good, F.col("slot")).alias("slot"),
        F.when(good, F.col("pid")).alias("pid"),
        F.when(good, F.col("epoch")).alias("epoch"),
        F.when(good, F.col("instance")).alias("instance"),
        F.lit(None).cast("boolean").alias("stamped"),
        F.lit(None).cast("boolean").alias("keyed"),
        F.lit(None).cast("string").alias("key"),
        F.lit(None).cast("int").alias("status"),
        F.lit(None).cast("boolean").alias("replayed"),
    )


def answers(records: DataFrame, frozen_ms: int) -> DataFrame:
    """Records of the journal (source.SCHEMA) → EVIDENCE, a row for each answer; `ts` is when it was journaled."""
    read = records.select(
        "topic",
        "partition",
        "offset",
        plausible(F.col("timestamp_ms"), frozen_ms).alias("ts"),
        F.from_json(F.col("value").cast("string"), REQUESTS_SCHEMA).alias("body"),
    )
    body = F.col("body")
    whole = (body["v"] == wire.VERSION) & body["answers"].isNotNull()
    listed = F.when(whole, body["answers"]).otherwise(F.array(F.lit(None)).cast(_array_type(REQUESTS_SCHEMA)))
    rows = read.select(*_PLACE, body["instance"].alias("instance"), F.explode(listed).alias("answer"))
    answer = F.col("answer")
    good = _identified(answer) & _all_there(answer, "at", "status")
    placed = good & (answer["status"] == 201) & _all_there(answer, "topic", "partition", "offset")
    return rows.select(
        F.when(good, EVENT).otherwise(REJECT).alias("kind"),
        F.when(good, F.unhex(answer["id"])).otherwise(block_id()).alias("id"),
        F.when(placed, ANSWER_201).otherwise(ANSWER).cast("tinyint").alias("role"),
        F.when(good, plausible(answer["at"], F.col("ts"))).otherwise(F.col("ts")).alias("at"),
        "ts",
        F.when(good, F.unhex(answer["fp"])).alias("fp"),
        F.lit(None).cast("binary").alias("alt"),
        F.when(good, answer["topic"]).otherwise(F.col("topic")).alias("topic"),
        F.when(placed, answer["partition"]).when(~good, F.col("partition")).alias("partition"),
        F.when(placed, answer["offset"]).when(~good, F.col("offset")).alias("offset"),
        F.lit(None).cast("int").alias("slot"),
        F.lit(None).cast("bigint").alias("pid"),
        F.lit(None).cast("int").alias("epoch"),
        F.when(good, F.col("instance")).alias("instance"),
        F.lit(None).cast("boolean").alias("stamped"),
        F.lit(None).cast("boolean").alias("keyed"),
        F.lit(None).cast("string").alias("key"),
        F.when(good, answer["status"]).alias("status"),
        F.when(good, F.coalesce(answer["replayed"], F.lit(False))).alias("replayed"),
    )


def topics_named(records: DataFrame) -> DataFrame:
    """Ledger or journal records (source.SCHEMA) → `topic string`: each name in their entries or answers, once."""
    body = F.from_json(
        F.col("value").cast("string"), "entries array<struct<topic: string>>, answers array<struct<topic: string>>"
    )
    names = F.concat(
        *(F.coalesce(body[field]["topic"], F.array().cast("array<string>")) for field in ("entries", "answers"))
    )
    return records.select(F.explode(F.array_distinct(names)).alias("topic")).where("topic is not null").distinct()


def plausible(ms: Column, otherwise: Column | int) -> Column:
    """A time in ms that can be meant, else the other one."""
    return F.when(ms.between(*PLAUSIBLE_MS), ms).otherwise(otherwise)


def block_id() -> Column:
    """What stands for the id of records that have none: their place, to a block of offsets."""
    block = F.floor(F.col("offset") / BLOCK_OFFSETS).cast("string")
    return native.as_binary(F.concat_ws("/", "topic", F.col("partition").cast("string"), block))


def _header(name: str) -> Column:
    """The value of a record's first header of this name: what others add behind it cannot displace ours."""
    return F.try_element_at(F.filter("headers", lambda header: header["key"] == name), F.lit(1))["value"]


def _all_there(body: Column, *names: str) -> Column:
    there = F.lit(True)
    for name in names:
        there = there & body[name].isNotNull()
    return there


def _identified(body: Column) -> Column:
    """Whether an entry or answer has an id and a fingerprint of the right form; false, never null."""
    forms = {"id": 2 * wire.ID_BYTES, "fp": 2 * wire.FINGERPRINT_BYTES}
    good = F.lit(True)
    for name, digits in forms.items():
        good = good & F.coalesce(body[name].rlike(f"^[0-9a-fA-F]{{{digits}}}$"), F.lit(False))
    return good


def _array_type(schema: str) -> str:
    """The array<struct<…>> in one of the schemas above."""
    return schema[schema.index("array<") :]
