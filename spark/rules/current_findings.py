"""The current findings: findings of the lake that are not revoked and lie in the window, each with a stable id."""

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.reading import wire_expressions
from spark.rules.findings import IDS
from spark.rules.kinds import KINDS, with_subject, with_surplus
from spark.settings import glob_regex
from spark.silences import Silence
from spark.tables import hours, schemas
from spark.tables.deliveries import hour_of

# The service accepts keys up to this length; a foreign writer may put longer ones into the header.
KEY_CHARS: Final = 255

FIELDS: Final = (
    "finding_id",
    "kind",
    "cause",
    "severity",
    "id",
    "fingerprint",
    "key",
    "topic",
    "partition",
    "count",
    "first_offset",
    "last_offset",
    "coordinates",
    "sink",
    "sink_ms",
    "sink_coordinates",
)
"""The fields of a finding, in this order. `id` and `fingerprint` are in hexadecimal digits."""

_COPIES: Final = with_surplus("with_cause")
"""Kinds whose records are surplus copies, each with its cause."""

_OF_PARTITIONS: Final = with_subject("partition")
_OF_SINKS: Final = with_subject("sink")
OF_SINKS: Final = {name: schemas.SINK[name] for name in ("sink", "sink_ms", "sink_coordinates")}
"""The columns that only findings about sinks have."""
_PARTITION_KEY: Final = ("kind", "cause", "topic", "partition")


def by_hour(findings: DataFrame, since_ms: int) -> DataFrame:
    """Filter schemas.FINDING to current findings; those about partitions are still separate for each hour.

    `since_ms` is the start of the window, and of the first hour that the balance counts.
    """
    seen = F.col("last_ms") >= since_ms
    counted = F.col("accepted_hour") >= F.timestamp_millis(F.lit(since_ms))
    decided = F.col("late_ms") >= since_ms
    return unrevoked(findings).where(rule_table.is_in_window(seen, counted, decided))


def oldest_ms(current: DataFrame) -> int | None:
    """Return the last start of a window (ms) with all of these findings (`by_hour`); None if there are none."""
    newest = F.greatest("last_ms", F.unix_millis("accepted_hour"), "late_ms")
    found: int | None = current.agg(F.min(newest)).collect()[0][0]
    return found


def unrevoked(findings: DataFrame) -> DataFrame:
    """Filter schemas.FINDING to the findings that no pass over all ids has revoked, of any time.

    `findings` are all rows of the ids that any of them is about.
    """
    made = findings.where("kind is not null")
    revoking = findings.where((F.col("scope") == IDS) & F.col("kind").isNull())
    passes = revoking.select("id", F.coalesce("run", F.lit(0)).alias("passed"))
    over_hours = (F.col("scope") == IDS) | F.col("kind").isin(*_OF_PARTITIONS, *_OF_SINKS)
    revoked = rule_table.is_revoked(F.coalesce("run", F.lit(0)), F.col("passed"))
    of_hours = made.where(~over_hours).join(passes, "id", "left")
    of_hours = of_hours.where(F.col("passed").isNull() | ~revoked).select(*made.columns)
    return made.where(over_hours).unionByName(of_hours)


def subject() -> Column:
    """Return what a finding (schemas.FINDING) is about, as hexadecimal digits: the content of a client's duplicates,
    else an id; null for a finding about a partition."""
    return wire_expressions.hex_digits(F.coalesce("fingerprint", "id"))


def by_finding(current: DataFrame) -> DataFrame:
    """Convert current findings (`by_hour`) to FIELDS, one row a finding: those about partitions are summed over hours.

    `finding_id` is the same in every run: `duplicate:<id>`; `client_duplicate:<fingerprint>`, since an id may be in
    several of these; `unkeyed::orders:3` for a finding about a partition; `missing_in_sink:warehouse:<id>`;
    `evidence_gap:warehouse` for a sink that could not be read. If two hours have a finding of one kind about an id (but
    for sinks only without the pass over all ids), the later one is kept.
    """
    with_sink = _with_sink(current)
    of_partitions = _is_about_partition()
    newest = _newest_of_each_subject(with_sink.where(~of_partitions))
    kept = [name for name in with_sink.columns if name in FIELDS]
    rows = newest.select(*kept).unionByName(
        _summed_over_hours(with_sink.where(of_partitions)), allowMissingColumns=True
    )
    severity = F.create_map(*(F.lit(word) for kind in KINDS.values() for word in (kind.name, kind.severity)))
    columns = {
        "finding_id": _finding_id(),
        "severity": severity[F.col("kind")],
        "id": wire_expressions.hex_digits(F.col("id")),
        "fingerprint": wire_expressions.hex_digits(F.col("fingerprint")),
        "key": F.substring("key", 1, KEY_CHARS),
        "coordinates": F.coalesce("coordinates", F.array().cast(schemas.COORDINATES)),
        "sink_coordinates": F.coalesce("sink_coordinates", F.array().cast(OF_SINKS["sink_coordinates"])),
    }
    return rows.select(*(columns.get(name, F.col(name)).alias(name) for name in FIELDS))


def _newest_of_each_subject(current: DataFrame) -> DataFrame:
    """Keep the finding of the latest hour of each kind about an id or a content."""
    newest = F.max_by(F.struct(*current.columns), F.struct("accepted_hour", "last_ms")).alias("newest")
    return current.groupBy("kind", "sink", subject().alias("subject")).agg(newest).select("newest.*")


def _summed_over_hours(current: DataFrame) -> DataFrame:
    """Sum up the findings about each partition: → _PARTITION_KEY, `sink, sink_ms, count, first_offset, last_offset`."""
    return current.groupBy(*_PARTITION_KEY, "sink").agg(
        F.min("sink_ms").alias("sink_ms"),
        F.sum("count").alias("count"),
        F.min("first_offset").alias("first_offset"),
        F.max("last_offset").alias("last_offset"),
    )


def _finding_id() -> Column:
    """Return the id of a finding, which is the same in every run (`by_finding`)."""
    partition_key = F.concat_ws(":", *(F.coalesce(F.col(name).cast("string"), F.lit("")) for name in _PARTITION_KEY))
    of_partition = F.nullif(F.concat_ws(":", "topic", "partition"), F.lit(""))
    of_sink = F.concat_ws(":", "kind", "sink", F.coalesce(subject(), of_partition))
    return (
        F.when(F.col("sink").isNotNull(), of_sink)
        .when(F.col("id").isNull(), partition_key)
        .otherwise(F.concat_ws(":", "kind", subject()))
    )


def _with_sink(current: DataFrame) -> DataFrame:
    """Add the columns about a sink, null, to findings without them."""
    missing = {name: data_type for name, data_type in OF_SINKS.items() if name not in current.columns}
    return current.withColumns({name: F.lit(None).cast(data_type) for name, data_type in missing.items()})


def _is_about_partition() -> Column:
    """Check whether a finding is about a partition: by its kind, or about coordinates in a sink."""
    return F.col("kind").isin(*_OF_PARTITIONS) | (F.col("kind").isin(*_OF_SINKS) & F.col("id").isNull())


def as_json() -> Column:
    """Encode a row of FIELDS as JSON, nulls included."""
    return F.to_json(F.struct(*FIELDS), {"ignoreNullFields": "false"})


def in_order(found: DataFrame) -> DataFrame:
    """Sort rows of FIELDS, in the same order in every run: by kind as in KINDS, topic, partition, cause, sink, id."""
    rank = F.array_position(F.array(*(F.lit(name) for name in KINDS)), F.col("kind"))
    return found.orderBy(rank, "topic", "partition", "cause", "sink", "id")


BY_RULE: Final = -1
"""In place of the index of a silence: the rule of the finding's topic says that its kind does not count."""


def with_silence(
    found: DataFrame, silences: Sequence[Silence], uncounted: Mapping[str, Collection[str]] = MappingProxyType({})
) -> DataFrame:
    """Add `silence int` to rows of FIELDS: the index of the silence that is of the finding, BY_RULE, or null for none.

    Of several silences the first one that names the finding counts, else the first glob. `uncounted` are the kinds by
    topic that do not count.
    """
    exact = {silence.finding: nth for nth, silence in reversed([*enumerate(silences)]) if not silence.is_glob}
    globs = [(nth, glob_regex([silence.finding])) for nth, silence in enumerate(silences) if silence.is_glob]
    of_finding = F.lit(None).cast("int")
    if uncounted:
        by_topic = F.from_json(
            F.lit(json.dumps({topic: [*kinds] for topic, kinds in uncounted.items()})), "map<string, array<string>>"
        )
        of_topic = F.array_contains(F.try_element_at(by_topic, F.col("topic")), F.col("kind"))
        of_finding = F.when(of_topic, BY_RULE).otherwise(of_finding)
    if globs:
        # One expression with a branch for each glob: one within the other would be as deep as there are globs.
        (nth, regex), *others = globs
        of_glob = F.when(F.col("finding_id").rlike(regex), nth)
        for nth, regex in others:
            of_glob = of_glob.when(F.col("finding_id").rlike(regex), nth)
        of_finding = of_glob.otherwise(of_finding)
    if exact:
        # JSON: a map of literals takes a call into the JVM for each of them.
        named = F.from_json(F.lit(json.dumps(exact)), "map<string, int>")
        of_finding = F.coalesce(F.try_element_at(named, F.col("finding_id")), of_finding)
    return found.withColumn("silence", of_finding)


def cause_counts(found: DataFrame) -> list[dict[str, Any]]:
    """Count findings (FIELDS with `silence`) and their records by kind, topic, cause and silence.

    The number of rows is bounded. For _COPIES the records are the surplus copies. Each counts for its own topic and
    cause; copies without kept coordinates count with their finding.
    """
    uncounted = F.col("count") - F.size("coordinates")
    has_copies = F.col("kind").isin(*_COPIES)
    each = found.select(
        "kind",
        "topic",
        "cause",
        "silence",
        F.lit(1).alias("findings"),
        F.when(has_copies, uncounted).otherwise(F.col("count")).alias("records"),
    )
    copies = (
        found.where(has_copies)
        .select("kind", "silence", F.explode("coordinates").alias("copy"))
        .where("copy.cause is not null")
    )
    surplus = copies.select(
        "kind", "copy.topic", "copy.cause", "silence", F.lit(0).alias("findings"), F.lit(1).alias("records")
    )
    summed = (
        each.unionByName(surplus)
        .groupBy("kind", "topic", "cause", "silence")
        .agg(F.sum("findings").alias("findings"), F.sum("records").alias("records"))
    )
    rows = [row.asDict() for row in summed.collect()]
    ranks = {name: rank for rank, name in enumerate(KINDS)}
    return sorted(rows, key=lambda row: (ranks[row["kind"]], row["topic"] or "", row["cause"] or ""))


def finding_counts(current: DataFrame, *, partitions: bool) -> DataFrame:
    """Count the records of current findings (`by_hour`): → `hour string, topic, partition, kind, cause, records`.

    A copy counts at its own partition, in the hour of its timestamp; a missing record at the claimed partition, and a
    finding without coordinates with partition null, both in the hour of acceptance. Without `partitions` every
    partition is null.
    """
    found = _with_coordinates(current).unionByName(_without_coordinates(current))
    partition = F.col("partition") if partitions else F.lit(None).cast("int")
    return (
        found.withColumn("partition", partition)
        .groupBy("hour", "topic", "partition", "kind", "cause")
        .agg(F.sum("records").alias("records"))
        .withColumn("hour", hours.as_text(F.col("hour")))
    )


def _with_coordinates(current: DataFrame) -> DataFrame:
    """Return a row for each record that a finding lists and that counts: of copies those with a cause, and of kinds
    that allow a first record all others."""
    copy = F.col("copy")
    counts = F.when(F.col("kind").isin(*_COPIES), copy["cause"].isNotNull()).when(
        F.col("kind").isin(*with_surplus("after_first")), F.col("nth") > 0
    )
    return (
        current.select("accepted_hour", "kind", "cause", F.posexplode("coordinates").alias("nth", "copy"))
        .where(F.coalesce(counts, F.lit(True)))
        .select(
            F.coalesce(hour_of(copy["timestamp"]), F.col("accepted_hour")).alias("hour"),
            copy["topic"].alias("topic"),
            copy["partition"].alias("partition"),
            "kind",
            F.when(F.col("kind").isin(*_COPIES), copy["cause"]).otherwise(F.col("cause")).alias("cause"),
            F.lit(1).cast("bigint").alias("records"),
        )
    )


def _without_coordinates(current: DataFrame) -> DataFrame:
    """Return a row for the records of each finding that it does not list: they count at the last coordinates listed."""
    last_copy = F.try_element_at("coordinates", F.lit(-1))
    return current.select(
        F.coalesce(hour_of(last_copy["timestamp"]), F.col("accepted_hour"), hour_of(F.col("last_ms"))).alias("hour"),
        F.coalesce(last_copy["topic"], F.col("topic")).alias("topic"),
        F.coalesce(last_copy["partition"], F.col("partition")).alias("partition"),
        "kind",
        "cause",
        (F.col("count") - F.coalesce(F.size("coordinates"), F.lit(0))).alias("records"),
    ).where("records > 0")
