"""What the lake knows of each id: one row for an id and hour, made from evidence and merged with what is there.

ROW is the schema of the table `deliveries`. Copies, entries and answered places are kept up to a cap each; how many
there were, and whether fingerprints differ, stays exact beyond it.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from spark.decode import ANSWER, ANSWER_201, COPY, ENTRY, EVENT

# Enough to see what happened; an id beyond it is one that a broken writer put on everything.
COPIES_MAX: Final = 128
ENTRIES_MAX: Final = 32
ANSWERED_MAX: Final = 8
FINGERPRINTS_MAX: Final = 16

COPY_FIELDS: Final = (
    "timestamp: bigint, topic: string, partition: int, offset: bigint, fp: binary, alt: binary, accepted_at: bigint, "
    "slot: int, pid: bigint, epoch: int, instance: string, stamped: boolean"
)
ENTRY_FIELDS: Final = (
    "seen_ms: bigint, topic: string, partition: int, offset: bigint, accepted_at: bigint, fp: binary, slot: int, "
    "pid: bigint, epoch: int, instance: string"
)
ANSWERED_FIELDS: Final = "seen_ms: bigint, topic: string, partition: int, offset: bigint, accepted_at: bigint"
FINGERPRINT_FIELDS: Final = "fp: binary, alt: binary"

ROW: Final = {
    "accepted_hour": "timestamp",
    "kind": "string",
    "id": "binary",
    "fingerprint": "binary",
    "accepted_ms": "bigint",
    "run": "bigint",
    "plain": "tinyint",
    "key": "string",
    "topic": "string",
    "first_ms": "bigint",
    "last_ms": "bigint",
    "low_offset": "bigint",
    "high_offset": "bigint",
    "count": "bigint",
    "stamped": "bigint",
    "entries_count": "bigint",
    "answered_201": "bigint",
    "answered_202": "bigint",
    "answered_503": "bigint",
    "answered_504": "bigint",
    "answered_other": "bigint",
    "replayed": "bigint",
    "unsure_ms": "bigint",
    "fingerprints": f"array<struct<{FINGERPRINT_FIELDS}>>",
    "coordinates": f"array<struct<{COPY_FIELDS}>>",
    "entries": f"array<struct<{ENTRY_FIELDS}>>",
    "answered": f"array<struct<{ANSWERED_FIELDS}>>",
}
"""Name and type of each column of `deliveries`, in order.

`plain` is 1 for one copy, one ledger entry that names its place, and answers, if any, that name it too: most rows,
of which nothing else has to be read to judge them. `fingerprint` is that of the first copy, null where its record has
no key; `accepted_ms` the earliest acceptance; `topic` the first in the alphabet that its evidence names; `first_ms` and
`last_ms` bound all its evidence; offsets are only of rows that stand for records without id; `stamped` counts copies
with our header; `unsure_ms` is when the last 202 or 504 was journaled; `answered` has each place once, as first named.
"""

SUMS: Final = (
    "count",
    "stamped",
    "entries_count",
    "answered_201",
    "answered_202",
    "answered_503",
    "answered_504",
    "answered_other",
    "replayed",
)
LEAST: Final = ("accepted_ms", "topic", "first_ms", "low_offset", "key")
GREATEST: Final = ("run", "last_ms", "high_offset", "unsure_ms")
ARRAYS: Final = {
    "fingerprints": FINGERPRINTS_MAX,
    "coordinates": COPIES_MAX,
    "entries": ENTRIES_MAX,
    "answered": ANSWERED_MAX,
}

HOUR_S: Final = 3600


def hour_of(ms: Column) -> Column:
    """The hour in which a time (ms) lies, as a timestamp."""
    return F.timestamp_seconds(F.floor(ms / (HOUR_S * 1000)) * HOUR_S)


def reduce(evidence: DataFrame, run: int) -> DataFrame:
    """EVIDENCE → ROW, one row for each (accepted_hour, kind, id).

    One sort by id serves both the numbering, which bounds what is collected, and the aggregation after it.
    """
    whole = ["id", "accepted_hour", "kind"]
    order = Window.partitionBy(*whole, "role").orderBy("ts", "topic", "partition", "offset", "status")
    rows = (
        evidence.withColumn("accepted_hour", hour_of(F.col("at")))
        .withColumn("nth", F.row_number().over(order))
        .groupBy(*whole)
        .agg(*_aggregates())
        .withColumn("answered", _each_once(F.col("answered")))
    )
    return rows.select(
        "accepted_hour",
        "kind",
        "id",
        F.when(F.col("keyed"), F.col("first_fp")).alias("fingerprint"),
        "accepted_ms",
        F.lit(run).cast("bigint").alias("run"),
        _plain(
            F.col("count"),
            F.col("entries_count"),
            F.get("coordinates", F.lit(0)),
            F.get("entries", F.lit(0)),
            F.size("answered") <= 1,
            [F.get("answered", F.lit(0))],
        ).alias("plain"),
        "key",
        "topic",
        "first_ms",
        "last_ms",
        "low_offset",
        "high_offset",
        *SUMS,
        "unsure_ms",
        F.slice(
            F.array_distinct(F.concat(F.array_compact(F.array("fp_least", "fp_greatest")), "fingerprints_seen")),
            1,
            FINGERPRINTS_MAX,
        ).alias("fingerprints"),
        "coordinates",
        "entries",
        "answered",
    ).select(*(F.col(name).cast(kind) for name, kind in ROW.items()))


def _aggregates() -> list[Column]:
    role, nth = F.col("role"), F.col("nth")
    copy = role == COPY
    event = F.col("kind") == EVENT
    fingerprints = F.when(copy & event, F.struct("fp", "alt"))
    coordinate = F.struct(
        F.col("ts").alias("timestamp"),
        "topic",
        "partition",
        "offset",
        "fp",
        "alt",
        F.col("at").alias("accepted_at"),
        "slot",
        "pid",
        "epoch",
        "instance",
        "stamped",
    )
    place = F.struct(F.col("ts").alias("seen_ms"), "topic", "partition", "offset", F.col("at").alias("accepted_at"))
    entry = F.struct(
        F.greatest(F.col("ts"), F.col("at")).alias("seen_ms"),
        "topic",
        "partition",
        "offset",
        F.col("at").alias("accepted_at"),
        "fp",
        "slot",
        "pid",
        "epoch",
        "instance",
    )
    first_copy = copy & event & (nth == 1)
    answered = role.isin(ANSWER_201, ANSWER)
    return [
        F.max(F.when(first_copy, F.col("fp"))).alias("first_fp"),
        F.max(F.when(first_copy, F.col("keyed"))).alias("keyed"),
        F.min("at").alias("accepted_ms"),
        F.min("key").alias("key"),
        F.min("topic").alias("topic"),
        F.min("ts").alias("first_ms"),
        F.max("ts").alias("last_ms"),
        F.min(F.when(~event, F.col("offset"))).alias("low_offset"),
        F.max(F.when(~event, F.col("offset"))).alias("high_offset"),
        _count(copy | ~event).alias("count"),
        _count(copy & F.col("stamped")).alias("stamped"),
        _count(event & (role == ENTRY)).alias("entries_count"),
        *(
            _count(event & answered & (F.col("status") == status)).alias(f"answered_{status}")
            for status in (201, 202, 503, 504)
        ),
        _count(event & answered & ~F.col("status").isin(201, 202, 503, 504)).alias("answered_other"),
        _count(event & answered & F.col("replayed")).alias("replayed"),
        F.max(F.when(answered & F.col("status").isin(202, 504), F.col("ts"))).alias("unsure_ms"),
        F.collect_list(F.when(copy & (nth <= FINGERPRINTS_MAX), fingerprints)).alias("fingerprints_seen"),
        F.min(fingerprints).alias("fp_least"),
        F.max(fingerprints).alias("fp_greatest"),
        F.collect_list(F.when(copy & event & (nth <= COPIES_MAX), coordinate)).alias("coordinates"),
        F.collect_list(F.when(event & (role == ENTRY) & (nth <= ENTRIES_MAX), entry)).alias("entries"),
        F.collect_list(F.when(event & (role == ANSWER_201) & (nth <= ANSWERED_MAX), place)).alias("answered"),
    ]


def _count(condition: Column) -> Column:
    return F.count(F.when(condition, F.lit(1)))


def merged(there: str = "there", new: str = "new") -> dict[str, Column]:
    """ROW columns of a row that is there and one that is new, of the same id and hour, as one row."""

    def pair(name: str) -> tuple[Column, Column]:
        return F.col(f"{there}.{name}"), F.col(f"{new}.{name}")

    first = F.col(f"{there}.count") > 0
    one: dict[str, Column] = {"fingerprint": F.when(first, pair("fingerprint")[0]).otherwise(pair("fingerprint")[1])}
    one |= {name: pair(name)[0] + pair(name)[1] for name in SUMS}
    firsts = {name: [F.get(side, F.lit(0)) for side in pair(name)] for name in ("coordinates", "entries", "answered")}
    one["plain"] = _plain(
        one["count"],
        one["entries_count"],
        F.coalesce(*firsts["coordinates"]),
        F.coalesce(*firsts["entries"]),
        (F.size(pair("answered")[0]) <= 1) & (F.size(pair("answered")[1]) <= 1),
        firsts["answered"],
    )
    one |= {name: F.least(*pair(name)) for name in LEAST}
    one |= {name: F.greatest(*pair(name)) for name in GREATEST}
    one |= {name: _joined(F.concat(*pair(name)), most) for name, most in ARRAYS.items()}
    one["answered"] = _each_once(one["answered"])
    return one


def united(rows: DataFrame) -> DataFrame:
    """ROW → ROW, one row for each (kind, id) over all its hours; the hour is the last one's."""
    columns = {
        "accepted_hour": F.max("accepted_hour"),
        "plain": F.lit(0),
        "fingerprint": F.min_by("fingerprint", F.when(F.col("count") > 0, F.col("accepted_ms"))),
        **{name: F.sum(name) for name in SUMS},
        **{name: F.min(name) for name in LEAST},
        **{name: F.max(name) for name in GREATEST},
        **{name: _joined(F.flatten(F.collect_list(name)), most) for name, most in ARRAYS.items()},
    }
    grouped = rows.groupBy("kind", "id").agg(*(column.alias(name) for name, column in columns.items()))
    grouped = grouped.withColumn("answered", _each_once(F.col("answered")))
    return grouped.select(*(F.col(name).cast(kind) for name, kind in ROW.items()))


def _each_once(places: Column) -> Column:
    """Answered places in order of time, each as it was named first: a replay names it again."""

    def fresh(place: Column, nth: Column) -> Column:
        return ~F.exists(
            F.slice(places, F.lit(1), nth),
            lambda other: (
                (other["offset"] == place["offset"])
                & (other["partition"] == place["partition"])
                & (other["topic"] == place["topic"])
            ),
        )

    return F.when(F.size(places) <= 1, places).otherwise(F.filter(places, fresh))


def _plain(
    count: Column, entries_count: Column, copy: Column, entry: Column, few: Column, answered: list[Column]
) -> Column:
    """1 where one copy, one entry and every answered place (null for none; `few`: there are no others) are one."""

    def same(place: Column) -> Column:
        return F.coalesce(
            (copy["offset"] == place["offset"])
            & (copy["partition"] == place["partition"])
            & (copy["topic"] == place["topic"]),
            F.lit(False),
        )

    plain = (count == 1) & (entries_count == 1) & few & same(entry)
    for place in answered:
        plain = plain & (place.isNull() | same(place))
    return F.when(plain, 1).otherwise(0).cast("tinyint")


def _joined(items: Column, most: int) -> Column:
    """An array without repetition, in the order of its first field (a time, or a fingerprint), up to the cap.

    The last one stays, so that the greatest fingerprint still differs from the least beyond the cap.
    """
    ordered = F.array_sort(F.array_distinct(items))
    capped = F.concat(F.slice(ordered, 1, most - 1), F.slice(ordered, -1, 1))
    return F.when(F.size(ordered) <= most, ordered).otherwise(capped)
