"""What the lake knows of each id: a row for each place where its event is, or is said to be.

ROW is the schema of the table `deliveries`. An event that was delivered once has one row, on which the record, its
ledger entry and its answers meet; nothing in it is a list, so that making, merging and judging it costs little. Only
where an id has several rows, or one that does not explain itself, they are `gathered` to one with lists (GATHERED).
"""

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from service.contract import wire
from spark import rule_table
from spark.reading.decode import ENTERED, EVENT, REJECT, REJECTED

# Enough to see what happened; an id beyond it is one that a broken writer put on everything.
COORDINATES_MAX: Final = 128
FINGERPRINTS_MAX: Final = 16

ROW: Final = {
    "accepted_hour": "timestamp",
    "is_clean": "tinyint",
    "kind": "string",
    "id": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "run": "bigint",
    "accepted_ms": "bigint",
    "last_ms": "bigint",
    "count": "bigint",
    "entries_count": "bigint",
    "answered_201": "bigint",
    "answered_202": "bigint",
    "answered_503": "bigint",
    "answered_504": "bigint",
    "answered_other": "bigint",
    "replayed": "bigint",
    "entry_seen_ms": "bigint",
    "answer_seen_ms": "bigint",
    "in_doubt_ms": "bigint",
    "freed_ms": "bigint",
    "timestamp_ms": "bigint",
    "record_accepted_ms": "bigint",
    "fingerprint": "binary",
    "alternative_fingerprints": "binary",
    "slot": "int",
    "pid": "bigint",
    "epoch": "int",
    "instance": "string",
    "has_fencepost_header": "boolean",
    "has_record_key": "boolean",
    "record_key_hash": "bigint",
    "key": "string",
    "batch_hash": "bigint",
    "topic_id_hash": "bigint",
    "reject": REJECTED,
    "was_past_end": "boolean",
    "elsewhere": "boolean",
}
"""Name and type of each column of `deliveries`, in order.

`is_clean` is 1 where a row explains itself, unless the id has another row: the record and one ledger entry, or the
record and a 201 that names it, or a record without a fencepost header that nothing names. Nearly all rows are clean,
and of these only counts are read again. Partition and offset are null for what is known of an id without a place
(a 504).
`accepted_ms` is the earliest acceptance, `last_ms` when the last evidence came, as far as that is known;
`count` is 1 where there is a record (0: it is only said to be there; more: rejected entries of one record);
`entry_seen_ms` and `answer_seen_ms` are when ledger and journal first named the place, `in_doubt_ms` when the last
202 or 504 was journaled, `freed_ms` when the last 503 was, null if a 202 or 504 follows it. `timestamp_ms`,
`record_accepted_ms` and the columns after them are the record's own; `record_key_hash` is a hash of its record key;
`batch_hash` stands for the atomic batch of its ledger entry, `topic_id_hash` for the id of its topic by the last entry.
`was_past_end`: the log had not come as far as the place when all was read that named it, so that it never had the
record; `elsewhere`: of a 202 or 504 without a place, whether another hour's rows tell what became of it.
"""

WRITTEN: Final = "entries_count + answered_201 + answered_202 + answered_504 > 0"
"""decode.WRITTEN of a ROW, or of what `summarize` gives."""

IN_DOUBT: Final = "answered_202 + answered_504 > 0"
"""The condition that a ROW was answered 202 or 504."""

ROW_KEY: Final = ("accepted_hour", "kind", "id", "topic", "partition", "offset")
"""What tells a row from another."""

SUMS: Final = (
    "count",
    "entries_count",
    "answered_201",
    "answered_202",
    "answered_503",
    "answered_504",
    "answered_other",
    "replayed",
)
LEAST: Final = ("accepted_ms", "entry_seen_ms", "answer_seen_ms", "batch_hash")
GREATEST: Final = ("run", "last_ms", "in_doubt_ms", "count", "was_past_end", "elsewhere")
RECORD: Final = (
    "timestamp_ms",
    "record_accepted_ms",
    "fingerprint",
    "alternative_fingerprints",
    "slot",
    "pid",
    "epoch",
    "instance",
    "has_fencepost_header",
    "has_record_key",
    "record_key_hash",
    "key",
    "reject",
)

COPY_FIELDS: Final = (
    "timestamp: bigint, topic: string, partition: int, offset: bigint, fingerprint: binary, "
    "alternative_fingerprints: binary, accepted_at: bigint, slot: int, pid: bigint, epoch: int, instance: string, "
    "has_fencepost_header: boolean, derived: boolean"
)
CLAIM_FIELDS: Final = (
    "seen_ms: bigint, accepted_ms: bigint, topic: string, partition: int, offset: bigint, topic_id_hash: bigint, "
    "was_past_end: boolean"
)
FINGERPRINT_FIELDS: Final = "fingerprint: binary, alternative_fingerprints: binary"

GATHERED: Final = {
    "accepted_hour": "timestamp",
    "kind": "string",
    "id": "binary",
    "accepted_ms": "bigint",
    "key": "string",
    "topic": "string",
    "last_ms": "bigint",
    "run": "bigint",
    "rows": "bigint",
    **dict.fromkeys(SUMS, "bigint"),
    "with_header": "bigint",
    "derived": "bigint",
    "is_clean": "tinyint",
    "in_doubt_ms": "bigint",
    "freed_ms": "bigint",
    "elsewhere": "boolean",
    "fingerprints": f"array<struct<{FINGERPRINT_FIELDS}>>",
    "coordinates": f"array<struct<{COPY_FIELDS}>>",
    "entries": f"array<struct<{CLAIM_FIELDS}>>",
    "answered": f"array<struct<{CLAIM_FIELDS}>>",
}
"""One row an id. `run` last wrote one of its rows, `rows` is of how many it was made, `topic` the first in the alphabet
that they name, `with_header` counts
copies with our header, `derived` those of them that lie in another topic than the id was written to. Lists are kept up
to a cap, copies first; counts, and whether fingerprints differ, stay exact.
"""

HOUR_S: Final = 3600

# A time in ms and a position in a record as one number; a record of a megabyte has fewer than 16,000 answers.
_POSITION_BITS: Final = 16


def hour_of(ms: Column) -> Column:
    """The hour in which a time (ms) lies, as a timestamp."""
    return F.timestamp_seconds(F.floor(ms / (HOUR_S * 1000)) * HOUR_S)


def same_coordinates(one: Column, other: Column) -> Column:
    """Whether two structs (copies, claims) name the same topic, partition and offset."""
    return (
        (one["offset"] == other["offset"]) & (one["partition"] == other["partition"]) & (one["topic"] == other["topic"])
    )


def reduce(
    copies: DataFrame,
    claims: DataFrame,
    run: int,
    arrived: Mapping[tuple[str, int], int] | None = None,
    exact: tuple[int, int] | None = None,
    ended: Mapping[tuple[str, int], int] | None = None,
) -> DataFrame:
    """decode.COPIES and `summarize` → ROW, a row for each place of an id and hour.

    `arrived`: the earliest time (ms) at which the copies of a partition can have come, where it is known; `exact` as
    for `_hour`; `ended`: each log's end after all `claims` were written.

    The aggregation has only numbers to carry, so that Spark hashes instead of sorting; a record is one of its kind
    and needs none: it is joined. Both are spread by id and place alike, in one exchange each.
    """
    there = copies.select(
        _hour(exact).alias("accepted_hour"),
        *ROW_KEY[1:],
        "timestamp_ms",
        F.col("accepted_ms").alias("record_accepted_ms"),
        *RECORD[2:-1],
        F.col("reject").alias("copy_reject"),
        "observed_ms",
    )
    joined = there.join(claims.hint("shuffle_hash"), list(ROW_KEY), "full_outer")
    sums = {name: F.coalesce(name, F.lit(0)) for name in SUMS[1:]}
    count = F.when(F.col("timestamp_ms").isNotNull(), 1).otherwise(0) + F.coalesce("rejected", F.lit(0))
    columns: dict[str, Column] = {
        "is_clean": _is_clean({**sums, "count": count}, F.col("has_fencepost_header")),
        "run": F.lit(run),
        "accepted_ms": F.least("record_accepted_ms", "first_accepted_ms"),
        # A record's timestamp may be an old one that a client, or a replay, has given it.
        "last_ms": F.greatest(
            F.coalesce("observed_ms", "timestamp_ms"),
            "record_accepted_ms",
            _arrived_ms(arrived or {}),
            "last_timestamp_ms",
        ),
        "count": count,
        **sums,
        "reject": F.coalesce("copy_reject", "reject"),
        "was_past_end": F.when(
            sums["entries_count"] + sums["answered_201"] > 0,
            rule_table.is_past_end(F.col("offset"), _of_place(ended or {})),
        ),
        "elsewhere": F.lit(None),
    }
    return joined.select(*(columns.get(name, F.col(name)).cast(kind).alias(name) for name, kind in ROW.items()))


def _hour(exact: tuple[int, int] | None) -> Column:
    """The hour in which a copy counts: that of its acceptance.

    Without our header that is its timestamp, and so whatever its writer likes: before the time span `exact` (ms) it
    counts in the first hour of its month, after it in the last hour. Each hour is a partition of the lake.
    """
    at = F.col("accepted_ms")
    if exact is None:
        return hour_of(at)
    first, last = exact
    wild = F.when(at < first, F.date_trunc("month", F.timestamp_millis(at))).when(at > last, hour_of(F.lit(last)))
    return F.coalesce(F.when(~F.col("has_fencepost_header"), wild), hour_of(at))


def _arrived_ms(arrived: Mapping[tuple[str, int], int]) -> Column:
    """Since when the record of a row has been there at the earliest, null where that is not known, or no record."""
    return F.when(F.col("timestamp_ms").isNotNull(), _of_place(arrived))


def _of_place(known: Mapping[tuple[str, int], int]) -> Column:
    """What is known of a row's topic and partition, else null."""
    topics: dict[str, list[int | None]] = {}
    for (topic, partition), number in sorted(known.items()):
        numbers = topics.setdefault(topic, [])
        numbers += [None] * (partition - len(numbers)) + [number]
    constant = F.from_json(F.lit(json.dumps(topics)), "map<string, array<bigint>>")
    return F.get(F.try_element_at(constant, F.col("topic")), F.col("partition"))


def summarize(claims: DataFrame, parts: int | None = None) -> DataFrame:
    """decode.CLAIMS → what is said of each place, with numbers only besides the place; in so many `parts`."""
    status = F.col("status")

    def count(condition: Column) -> Column:
        return F.count(F.when(condition, F.lit(1)))

    def last(condition: Column) -> Column:
        """The last answer of these: its time, and among those of one record its position."""
        moment = F.shiftleft("timestamp_ms", _POSITION_BITS) + F.least("position", F.lit((1 << _POSITION_BITS) - 1))
        return F.max(F.when(condition, moment))

    answered = status != ENTERED
    placed = F.col("offset").isNotNull()
    rows = claims.withColumn("accepted_hour", hour_of(F.col("accepted_ms"))).withColumn(
        "kind", F.when(F.col("reject").isNull(), EVENT).otherwise(REJECT)
    )
    # As the join needs it: what is said of an id comes once or twice, too rarely to be summed up before.
    spread = rows.repartition(*ROW_KEY) if parts is None else rows.repartition(parts, *ROW_KEY)
    in_doubt, freed = last(status.isin(202, 504)), last(status == 503)
    return spread.groupBy(*ROW_KEY, "reject").agg(
        F.min("accepted_ms").alias("first_accepted_ms"),
        F.max("timestamp_ms").alias("last_timestamp_ms"),
        count(status.isNull()).alias("rejected"),
        count(status == ENTERED).alias("entries_count"),
        *(count(status == code).alias(f"answered_{code}") for code in (201, 202, 503, 504)),
        count(answered & ~status.isin(201, 202, 503, 504)).alias("answered_other"),
        count(F.col("replayed")).alias("replayed"),
        F.min(F.when(status == ENTERED, F.greatest("timestamp_ms", "accepted_ms"))).alias("entry_seen_ms"),
        F.min(F.when(answered & placed, F.col("timestamp_ms"))).alias("answer_seen_ms"),
        F.min("batch_hash").alias("batch_hash"),
        F.max_by("topic_id_hash", F.when(status == ENTERED, F.col("timestamp_ms"))).alias("topic_id_hash"),
        F.shiftright(in_doubt, _POSITION_BITS).alias("in_doubt_ms"),
        F.when(in_doubt.isNull() | (freed > in_doubt), F.shiftright(freed, _POSITION_BITS)).alias("freed_ms"),
    )


def without(rows: DataFrame, there: DataFrame, spans: Mapping[tuple[str, int], tuple[int, int]], run: int) -> DataFrame:
    """ROWs to be merged → the same, and rows for the records that are `there` between these offsets, with `vanished`.

    Such a record stands in its log no more: a leader without it was elected. What is said of its place stays.
    """
    within = F.lit(False)
    for (topic, partition), (first, end) in spans.items():
        place = (F.col("topic") == topic) & (F.col("partition") == partition)
        within = within | (place & (F.col("offset") >= first) & (F.col("offset") < end))
    gone = there.where(within & (F.col("count") > 0)).select(*ROW_KEY, F.lit(True).alias("gone"))
    joined = rows.join(gone, list(ROW_KEY), "full_outer")
    columns = {"run": F.lit(run), **{name: F.coalesce(name, F.lit(0)) for name in ("is_clean", *SUMS)}}
    return joined.select(
        *(columns.get(name, F.col(name)).cast(kind).alias(name) for name, kind in ROW.items()),
        F.coalesce("gone", F.lit(False)).alias("vanished"),
    )


def merged(*, vanished: bool = False) -> dict[str, Column]:
    """ROW columns of a row that is `there` and a `new` one of the same place, as one row; without the record of the
    former where that has `vanished`."""

    def pair(name: str) -> tuple[Column, Column]:
        return F.col(f"there.{name}"), F.col(f"new.{name}")

    # But for the count: a record that is written back to its place, in a topic made anew, is one record still.
    one = {name: pair(name)[0] + pair(name)[1] for name in SUMS}
    one |= {name: F.least(*pair(name)) for name in LEAST}
    one |= {name: F.greatest(*pair(name)) for name in GREATEST}
    # Where both have a record the topic was made anew, or cut off: the later one stands in it.
    later = F.col("new.timestamp_ms").isNotNull()
    one |= {name: F.when(later, pair(name)[1]).otherwise(F.coalesce(*pair(name))) for name in RECORD}
    if vanished:
        one |= {name: F.col(f"new.{name}") for name in ("count", *RECORD)}
    one["topic_id_hash"] = F.coalesce(F.col("new.topic_id_hash"), F.col("there.topic_id_hash"))
    freed, in_doubt = F.greatest(*pair("freed_ms")), one["in_doubt_ms"]
    one["freed_ms"] = F.when(in_doubt.isNull() | (freed >= in_doubt), freed)
    one["is_clean"] = _is_clean(one, one["has_fencepost_header"], "there.").cast("tinyint")
    return one


def gathered(rows: DataFrame, *, by_hour: bool = True) -> DataFrame:
    """ROWs of events → GATHERED: one row for each id, and each of its hours or (`by_hour` false) the last of them."""
    whole = ["accepted_hour", "id"] if by_hour else ["id"]
    first = F.coalesce("timestamp_ms", "entry_seen_ms", "answer_seen_ms")
    # Records come before mere claims, and of records first those by which the others are judged.
    weight = (F.desc("count"), F.col("entry_seen_ms").isNull(), F.desc_nulls_last("has_fencepost_header"))
    order = Window.partitionBy(*whole).orderBy(*weight, first, "topic", "partition", "offset")
    homes = F.collect_set(
        F.when(
            _claimed() | (F.col("has_fencepost_header") & F.col("alternative_fingerprints").isNull()), F.col("topic")
        )
    )
    numbered = (
        rows.withColumn("nth", F.row_number().over(order))
        .withColumn("homes", homes.over(Window.partitionBy(*whole)))
        .withColumn("derived", _derived())
    )
    kept = F.col("nth") <= COORDINATES_MAX
    columns = {
        "accepted_hour": F.max("accepted_hour"),
        "kind": F.lit(EVENT),
        **{name: F.min(name) for name in ("accepted_ms", "key", "topic")},
        **{name: F.max(name) for name in ("last_ms", "in_doubt_ms", "freed_ms", "run")},
        "elsewhere": F.coalesce(F.max("elsewhere"), F.lit(False)),
        **{name: F.sum(name) for name in SUMS},
        "rows": F.count("*"),
        "is_clean": F.when(F.count("*") == 1, F.max("is_clean")).otherwise(0),
        "with_header": F.count(F.when(F.col("has_fencepost_header"), 1)),
        "derived": F.count(F.when(F.col("derived"), 1)),
        "coordinates": F.array_sort(F.collect_list(F.when(kept, _copy()))),
        "entries": F.array_sort(F.collect_list(F.when(kept, _claim("entry_seen_ms")))),
        "answered": F.array_sort(F.collect_list(F.when(kept, _claim("answer_seen_ms")))),
    }
    fingerprints = F.when(F.col("fingerprint").isNotNull() & ~F.col("derived"), F.struct(*_fingerprint()))
    ends = [F.min(fingerprints).alias("least_fingerprint"), F.max(fingerprints).alias("greatest_fingerprint")]
    keys = {"accepted_hour"} & set(whole)
    grouped = numbered.groupBy(*whole).agg(
        *(column.alias(name) for name, column in columns.items() if name not in keys), *ends
    )
    kept_fingerprints = F.transform(
        F.filter("coordinates", lambda copy: ~copy["derived"]),
        lambda copy: F.struct(
            copy["fingerprint"].alias("fingerprint"), copy["alternative_fingerprints"].alias("alternative_fingerprints")
        ),
    )
    every = F.array_distinct(
        F.concat(F.array_compact(F.array("least_fingerprint", "greatest_fingerprint")), kept_fingerprints)
    )
    return _cast(grouped.withColumn("fingerprints", F.slice(every, 1, FINGERPRINTS_MAX)))


def alone(rows: DataFrame) -> DataFrame:
    """ROWs of events that have no other row in their hour → GATHERED, without an exchange."""

    def one(item: Column) -> Column:
        return F.array_compact(F.array(item))

    lists = {
        "coordinates": one(_copy()),
        "entries": one(_claim("entry_seen_ms")),
        "answered": one(_claim("answer_seen_ms")),
        "fingerprints": one(F.when(F.col("fingerprint").isNotNull(), F.struct(*_fingerprint()))),
    }
    rows = rows.withColumn("derived", F.lit(False))
    columns = {
        **lists,
        "rows": F.lit(1),
        "derived": F.lit(0),
        "with_header": F.coalesce(F.col("has_fencepost_header").cast("bigint"), F.lit(0)),
        "elsewhere": F.coalesce("elsewhere", F.lit(False)),
    }
    return _cast(rows.withColumns(columns))


def _cast(rows: DataFrame) -> DataFrame:
    return rows.select(*(F.col(name).cast(kind) for name, kind in GATHERED.items()))


def _copy() -> Column:
    """The record of a row, null where it has none."""
    return F.when(
        F.col("count") > 0,
        F.struct(
            F.col("timestamp_ms").alias("timestamp"),
            "topic",
            "partition",
            "offset",
            *_fingerprint(),
            F.col("record_accepted_ms").alias("accepted_at"),
            "slot",
            "pid",
            "epoch",
            "instance",
            "has_fencepost_header",
            "derived",
        ),
    )


def each_fingerprint(joined: Column) -> Column:
    """The fingerprints that lie in a binary column one after the other, as an array; null for null."""
    size = wire.FINGERPRINT_BYTES
    starts = F.sequence(F.lit(1), F.octet_length(joined) - size + 1, F.lit(size))
    return F.when(
        F.octet_length(joined) >= size, F.transform(starts, lambda start: F.substring(joined, start, F.lit(size)))
    )


def _claimed() -> Column:
    """Whether the ledger or a 201 names the place of a row."""
    return F.col("entries_count") + F.col("answered_201") > 0


def _fingerprint() -> list[Column]:
    """`fingerprint` and `alternative_fingerprints` of a row's record.

    Of a copy that neither the ledger nor a 201 names, the record's own fingerprint counts, not its header's.
    """
    alone = (
        F.col("has_fencepost_header")
        & F.col("alternative_fingerprints").isNotNull()
        & ~rule_table.is_believed(_claimed())
    )
    own = F.when(alone, F.col("alternative_fingerprints")).otherwise(F.col("fingerprint"))
    return [
        own.alias("fingerprint"),
        F.when(~F.col("has_fencepost_header"), F.col("alternative_fingerprints")).alias("alternative_fingerprints"),
    ]


def _derived() -> Column:
    """`rules.is_derived` of a row; `homes` are the topics to which its id was written."""
    elsewhere = (F.size("homes") > 0) & ~F.array_contains("homes", F.col("topic"))
    derived = rule_table.is_derived(F.col("has_fencepost_header"), _claimed(), elsewhere)
    return F.coalesce(derived, F.lit(False))


def _claim(seen_ms: str) -> Column:
    """The place of a row as the ledger or the journal named it, null where it did not."""
    past = F.coalesce("was_past_end", F.lit(False)).alias("was_past_end")
    place = F.struct(
        F.col(seen_ms).alias("seen_ms"), "accepted_ms", "topic", "partition", "offset", "topic_id_hash", past
    )
    return F.when(F.col(seen_ms).isNotNull(), place)


def _is_clean(sums: Mapping[str, Column], has_header: Column, row: str = "") -> Column:
    """Whether a row leaves nothing to be said, 1 or 0."""
    entries, answered = sums["entries_count"], sums["answered_201"]
    only_answered = (entries == 0) & (answered > 0)
    clean = (entries == 1) | only_answered | ((entries == 0) & ~F.coalesce(has_header, F.lit(False)))
    return F.when((F.col(f"{row}kind") == EVENT) & (sums["count"] == 1) & clean, 1).otherwise(0)
