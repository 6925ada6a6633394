"""Records that could not be decoded, as evidence: what they may have held is neither proven nor disproven.

A record of the ledger may have held the entry of a record in a topic, one of the journal an answer, and one of a topic
may be the record that a claim names. The table `rejects` has all of them; it is empty in a healthy system.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark.reading.kafka_admin import TopicPartition
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Plan
from spark.reading.source import Span
from spark.settings import HOUR_MS
from spark.tables.lake import Lake

SPANS_MAX: Final = 1_000
# With more spans in the topics, records in blocks of so many offsets are one span.
_BLOCKS: Final = (1, 1 << 10, 1 << 20)


class UndecodedClaims(NamedTuple):
    """Undecoded records of a partition of ledger or journal, written from `first_ms` to `last_ms` and read by `run`.

    Copies that runs before `since_run` have read are explained by earlier records of the ledger, or by none: every
    record that the ledger had then was read before these.
    """

    topic: str
    partition: int
    first_ms: int
    last_ms: int
    run: int
    since_run: int


class Undecoded(NamedTuple):
    """What could not be decoded: `claims` of ledger and journal, and spans of offsets of topics by partition."""

    claims: Sequence[UndecodedClaims] = ()
    data: Mapping[TopicPartition, Sequence[Span]] = {}


NOTHING: Final = Undecoded()


def read(tables: Lake, plan: Plan) -> Undecoded:
    """Read what this run and earlier ones could not decode (`rejects`), of the logs that a plan audits."""
    rejects = tables.read_cached("rejects")
    if not tables.exists("rejects") or rejects.isEmpty():
        return NOTHING
    topics = {role: sorted({log.topic for log in plan.of(role)}) for role in (DATA, LEDGER, REQUESTS)}
    claims = _claims(tables, rejects.where(F.col("topic").isin(*topics[LEDGER], *topics[REQUESTS])), topics[LEDGER])
    return Undecoded(claims, _spans(rejects.where(F.col("topic").isin(topics[DATA]))))


def _claims(tables: Lake, rejects: DataFrame, ledger: Collection[str]) -> list[UndecodedClaims]:
    """Sum up undecoded records of ledger and journal by partition, run and hour."""
    by_hour = rejects.groupBy("topic", "partition", "run", F.floor(F.col("seen_ms") / HOUR_MS)).agg(
        F.min("seen_ms").alias("first_ms"), F.max("seen_ms").alias("last_ms")
    )
    # Plans of runs that were not finished do not say what was read.
    finished = tables.read_cached("runs").select("run")
    plans = (
        tables.read_cached("progress")
        .where((F.col("role") == LEDGER) & F.col("topic").isin(*ledger))
        .join(finished, "run", "left_semi")
        .select("topic", "partition", F.col("run").alias("earlier_run"), "caught_up_run")
    )
    earlier = [by_hour[name] == plans[name] for name in ("topic", "partition")]
    joined = by_hour.join(plans, [*earlier, F.col("earlier_run") < F.col("run")], "left")
    names = [by_hour[name] for name in ("topic", "partition", "first_ms", "last_ms", "run")]
    since_run = F.coalesce(F.max("caught_up_run"), F.lit(0)) + 1
    rows = joined.groupBy(*names).agg(since_run.alias("since_run")).collect()
    return [UndecodedClaims(**row.asDict()) for row in sorted(rows)]


def _spans(rejects: DataFrame) -> dict[TopicPartition, list[Span]]:
    """Return the spans of undecoded records of topics, by partition."""
    for block in _BLOCKS:
        blocks = rejects.groupBy("topic", "partition", F.floor(F.col("offset") / block)).agg(*_span())
        rows = blocks.select("topic", "partition", "first", "end").limit(SPANS_MAX + 1).collect()
        if len(rows) <= SPANS_MAX:
            break
    spans: dict[TopicPartition, list[Span]] = {}
    for row in sorted(rows):
        spans.setdefault((row["topic"], row["partition"]), []).append((row["first"], row["end"]))
    return spans


def _span() -> tuple[Column, Column]:
    return F.min("offset").alias("first"), (F.max("offset") + 1).alias("end")
