"""Reads what a plan is decided on: findings and rows of the lake, the fingerprints in ledger and journal, and earlier
plans."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from service.contract.wire.names import ledger_topic, requests_topic
from spark.engine import frames
from spark.errors import CannotRun
from spark.reading import source, wire_expressions
from spark.reading.decode import EVENT
from spark.reading.kafka_admin import KafkaAdmin, TopicPartition
from spark.repair.entries import Claimed, Coordinates, Executed, History, claimed
from spark.rules import current_findings, kinds
from spark.tables.deliveries import is_of_earlier_topic
from spark.tables.lake import Lake

ENTRIES_MAX: Final = 100_000
"""Entries of one plan about lost and missing events, which the driver holds."""
DROPPED_MAX: Final = 200_000
"""Copies that `--clean` leaves out of one topic: the driver holds their offsets."""

# The clocks of Redis, by which an event is accepted, and of the brokers, by which the ledger is indexed.
_CLOCKS_APART_MS: Final = 3_600_000


def collected(found: DataFrame) -> list[dict[str, Any]]:
    """Collect findings (current_findings.FIELDS) in their order; CannotRun for more than a plan may have."""
    rows = current_findings.in_order(found).limit(ENTRIES_MAX + 1).collect()
    if len(rows) > ENTRIES_MAX:
        raise CannotRun(f"a plan has at most {ENTRIES_MAX} findings: select fewer, by --topic, --kind or --since")
    return [row.asDict(recursive=True) for row in rows]


def rows_of_ids(lake: Lake, ids: Iterable[str]) -> dict[str, list[Row]]:
    """Read what the lake knows of these ids (hexadecimal digits), by id.

    → rows of `hex_id, accepted_ms, key, topic, partition, offset, count, has_fencepost_header, fingerprint`.
    """
    wanted = _ids(lake.spark, ids)
    rows = lake.read("deliveries").where(F.col("kind") == EVENT).join(F.broadcast(wanted), "id", "left_semi")
    columns = ("accepted_ms", "key", "topic", "partition", "offset", "count", "has_fencepost_header", "fingerprint")
    found: dict[str, list[Row]] = {}
    for row in rows.select(wire_expressions.hex_digits(F.col("id")).alias("hex_id"), *columns).collect():
        found.setdefault(row["hex_id"], []).append(row)
    return found


def record_of(rows: Iterable[Row]) -> Coordinates | None:
    """Return the coordinates of a record among rows of an id; None if none was read."""
    return next(((row["topic"], row["partition"], row["offset"]) for row in rows if row["count"]), None)


def _ids(spark: SparkSession, ids: Iterable[str]) -> DataFrame:
    return frames.rows_of(spark, "digits string", [{"digits": id} for id in sorted(set(ids))]).select(
        F.unhex("digits").alias("id")
    )


_OF_RECORD: Final = "id: string, fp: string, topic: string, partition: int, offset: bigint"
_LEDGER: Final = f"entries array<struct<{_OF_RECORD}, batch: string, refused: string>>"
_JOURNAL: Final = f"answers array<struct<{_OF_RECORD}, status: int>>"
"""What `claims` needs of a record of ledger and journal."""


def claims(
    spark: SparkSession,
    shared: SharedSettings,
    accepted_ms: Mapping[str, int],
    lost_at: Mapping[str, Collection[Coordinates]],
) -> dict[str, Claimed]:
    """Read what ledger and journal say of these ids, from shortly before the first of their acceptances (ms) on.

    `lost_at` are the coordinates of each id that have no record of the event.
    """
    if not accepted_ms:
        return {}
    topics = [ledger_topic(shared.namespace), requests_topic(shared.namespace)]
    with closing(KafkaAdmin(spark, shared)) as admin:
        spans = _spans_since(admin, topics, min(accepted_ms.values()) - _CLOCKS_APART_MS)
    wanted = F.broadcast(frames.rows_of(spark, "id string", [{"id": id} for id in accepted_ms]))
    found: dict[str, list[Mapping[str, Any]]] = {}
    for topic, schema, field in zip(topics, (_LEDGER, _JOURNAL), ("entries", "answers"), strict=True):
        records = source.read(spark, shared, {at: span for at, span in spans.items() if at[0] == topic}, headers=False)
        body = F.from_json(F.col("value").cast("string"), schema)
        each = records.select(body[field].alias("items")).select(F.explode("items").alias("item"))
        of_ids = each.select("item.*").withColumns({"id": F.lower("id"), "fp": F.lower("fp")})
        for row in of_ids.join(wanted, "id", "left_semi").distinct().collect():
            found.setdefault(row["id"], []).append(row.asDict())
    return {id: claimed(rows, lost_at.get(id, ())) for id, rows in found.items()}


def _spans_since(admin: KafkaAdmin, topics: Sequence[str], since_ms: int) -> dict[TopicPartition, source.Span]:
    """Return the spans of topics from the first record of a time (ms) on, up to the last stable offset."""
    described = admin.describe(topics)
    partitions = [(topic.name, number) for topic in described.values() for number in range(topic.partitions)]
    if not partitions:
        return {}
    ends, firsts = admin.ends(partitions), admin.first_since(partitions, since_ms)
    return {at: (firsts.get(at, ends[at].last_stable), ends[at].last_stable) for at in partitions}


def history(lake: Lake) -> History:
    """Read what earlier plans have done."""
    plans = lake.read("repairs").where("state != 'planned'").select("plan", "run", "layout").collect()
    executed = {
        row["plan"]: Executed(row["run"], msgspec.json.decode(row["layout"] or "{}").get("topic_ids", {}))
        for row in plans
    }
    if not executed:
        return History()
    rows = lake.read("repair_entries").where(F.col("kind") != kinds.DUPLICATE.name).toLocalIterator()
    return History.of((row.asDict() for row in rows), executed)


def surplus(lake: Lake, topic: str, topic_ids: Mapping[str, str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the copies in a topic of the findings `duplicate`, and what is copied nevertheless.

    Copies are `id, finding_id, key, topic, partition, offset, cause, nth`, without those whose record was in an earlier
    topic of this name. The counts: `conflicts`, ids with different contents; `unlisted`, copies without coordinates.
    """
    found = current_findings.by_finding(current_findings.unrevoked(lake.read("findings")))
    duplicates = found.where(F.col("kind") == kinds.DUPLICATE.name)
    names = ("finding_id", "id", "key")
    each = duplicates.select(*names, F.posexplode("coordinates").alias("nth", "copy")).where(
        F.col("copy.topic") == topic
    )
    copies = each.select(*names, "nth", "copy.topic", "copy.partition", "copy.offset", "copy.cause")
    present = lake.read("deliveries").where((F.col("kind") == EVENT) & (F.col("topic") == topic) & (F.col("count") > 0))
    present = present.where(~is_of_earlier_topic(topic_ids)).select(
        wire_expressions.hex_digits(F.col("id")).alias("id"), "topic", "partition", "offset"
    )
    rows = copies.join(present, ["id", "topic", "partition", "offset"], "left_semi").limit(DROPPED_MAX + 1).collect()
    if len(rows) > DROPPED_MAX:
        raise CannotRun(f"--clean {topic}: a plan leaves out at most {DROPPED_MAX} copies")
    (unlisted,) = duplicates.where(F.col("topic") == topic).agg(F.sum(F.col("count") - F.size("coordinates"))).collect()
    conflicts = found.where((F.col("kind") == kinds.CONFLICT.name) & (F.col("topic") == topic)).count()
    return [row.asDict() for row in rows], {"conflicts": conflicts, "unlisted": unlisted[0] or 0}
