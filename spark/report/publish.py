"""The topic of findings: one record for each current finding, keyed by its `finding_id`.

The table `published` is an outbox with the value of each finding in the topic, or the value to be sent. A run stores
the changed values, sends them, and then marks them as sent. After an interruption the next run sends the unmarked ones
again: the same key with the newest value, to a compacted topic. A finding that is no longer current gets a tombstone.

The outbox belongs to a lake, the topic to a namespace. A lake without an outbox takes the records of the topic as its
outbox, and so replaces the findings that another lake has published; unless an earlier run on the lake has seen the
topic, this has to be asked for (`--replace-findings`).

The outbox is right only while the topic keeps what was sent. Each run compares the topic with its state in the summary
of the last run (PublishedTopic). If the topic was recreated, has lost records, or has records that this state does not
have (an interrupted run sent them, possibly after the next run), every current finding is sent again, and a finding
that the outbox does not have gets a tombstone.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from service.contract.wire.names import findings_topic
from spark.engine import frames
from spark.errors import CannotRun
from spark.reading import connection, source
from spark.reading.kafka_admin import KafkaAdmin, Topic
from spark.reading.planning import Admin
from spark.rules import current_findings
from spark.tables.lake import Lake

VERSION: Final = 1
TABLE: Final = "published"


@dataclass(frozen=True, slots=True)
class PublishedTopic:
    """The topic with what was sent: its id (KIP-516), and by partition the first offsets and the high watermarks."""

    topic_id: str
    log_starts: tuple[int, ...]
    high_watermarks: tuple[int, ...]

    @classmethod
    def of(cls, summary: Mapping[str, Any] | None) -> "PublishedTopic | None":
        """Read the topic from a run's summary (`asdict` in JSON); None if no run has published, or an earlier version
        did, which did not store the topic."""
        if summary is None:
            return None
        return cls(summary["topic_id"], tuple(summary["log_starts"]), tuple(summary["high_watermarks"]))

    @property
    def is_empty(self) -> bool:
        """Whether the topic has no record."""
        return self.log_starts == self.high_watermarks

    def has_records_of(self, last: "PublishedTopic | None") -> bool:
        """Check whether the topic has exactly the records that it had in the state `last`.

        Compaction moves neither end of a log. DeleteRecords and retention raise the first offset; a leader without the
        records, or a broker that has lost its disk, lowers the high watermark. A run that was interrupted, or lost its
        lease, after it had sent records raises the high watermark.
        """
        if last is None or last.topic_id != self.topic_id:
            return False
        starts = zip(last.log_starts, self.log_starts, strict=False)
        high_watermarks = zip(last.high_watermarks, self.high_watermarks, strict=False)
        return all(then == now for then, now in starts) and all(then == now for then, now in high_watermarks)

    def with_sent(self, high_watermarks: tuple[int, ...], sent: int) -> "PublishedTopic":
        """Return the topic with the high watermarks after sending; unchanged if not exactly `sent` records were added.

        The idempotent producer stores each record once: others are of a run that has lost its lease. Id and first
        offsets stay those before sending. If any of these has changed, the next run finds a difference.
        """
        is_exact = sum(high_watermarks) - sum(self.high_watermarks) == sent
        return replace(self, high_watermarks=high_watermarks) if is_exact else self


def prepare(admin: KafkaAdmin, namespace: str) -> PublishedTopic:
    """Create the topic if needed, and return its state; CannotRun if the topic exists and is not compacted."""
    topic = admin.ensure_compacted(findings_topic(namespace), "pass --no-publish")
    return state_of(admin, topic)


def check_owner(lake: Lake, shared: SharedSettings, topic: PublishedTopic, run: int, *, replaces: bool) -> bool:
    """Take the topic's records as the outbox of a lake that has none; CannotRun if there are any, unless `replaces`.

    Returns whether it has, so that the outbox has the records of the topic in this state.
    """
    if lake.exists(TABLE) or topic.is_empty:
        return False
    sent = _in_topic(lake, shared, topic)
    if sent.isEmpty():
        return False
    if not replaces:
        raise CannotRun(
            f"topic {findings_topic(shared.namespace)!r} has findings that another lake has published: pass "
            f"--replace-findings if --lake {lake.root} takes the place of that lake, else --no-publish"
        )
    lake.append(TABLE, sent, run, in_memory=sent)
    return True


def _in_topic(lake: Lake, shared: SharedSettings, topic: PublishedTopic) -> DataFrame:
    """Read the findings in the topic (PUBLISHED), without those with a tombstone."""
    name = findings_topic(shared.namespace)
    spans = {
        (name, partition): span
        for partition, span in enumerate(zip(topic.log_starts, topic.high_watermarks, strict=True))
    }
    records = source.read(lake.spark, shared, spans, headers=False)
    newest = records.groupBy(F.col("key").cast("string").alias("finding_id")).agg(
        F.max_by(F.col("value").cast("string"), "offset").alias("value")
    )
    return frames.checkpointed(newest.where("value IS NOT NULL").withColumn("sent", F.lit(True)))


def state_of(admin: Admin, topic: Topic) -> PublishedTopic:
    """List the ends of the topic."""
    ends = admin.ends([(topic.name, partition) for partition in range(topic.partitions)]).values()
    return PublishedTopic(
        topic.topic_id, tuple(end.log_start for end in ends), tuple(end.high_watermark for end in ends)
    )


def publish(
    lake: Lake, shared: SharedSettings, found: DataFrame, topic: PublishedTopic, last: PublishedTopic | None, run: int
) -> PublishedTopic:
    """Update the topic to the current findings (current_findings.FIELDS) of a run, and return the topic with these.

    `topic` is its state before (`prepare`), `last` the state whose records the outbox has (None: not known). Unchanged
    findings are not sent, unless the topic has lost or got records since.
    """
    is_new = not lake.exists(TABLE)
    if is_new and found.isEmpty():
        return topic
    if not is_new and not topic.has_records_of(last):
        _store_foreign(lake, shared, topic, run)
        mark_unsent(lake, run)
    unsent = _unsent(lake, found)
    (counts,) = unsent.agg(
        F.count("*").alias("values"),
        F.count_if("is_changed").alias("changed"),
        F.count_if(F.col("value").isNull()).alias("gone"),
    ).collect()
    if counts["changed"]:
        store(lake, unsent.where("is_changed"), run)
    if counts["values"]:
        lake.check_held()
        _send(unsent, shared)
        if is_new:
            # All values are those of this run: nothing is to be looked for.
            lake.overwrite(TABLE, _outbox_rows(unsent, sent=True), run)
        else:
            mark_sent(lake, run, with_tombstones=counts["gone"] > 0)
        topic = _with_sent(lake, shared, topic, counts["values"])
    return topic


def _store_foreign(lake: Lake, shared: SharedSettings, topic: PublishedTopic, run: int) -> None:
    """Store the findings in the topic that the outbox does not have: they get tombstones, unless they are current."""
    if topic.is_empty:
        return
    foreign = frames.checkpointed(_in_topic(lake, shared, topic).join(lake.read(TABLE), "finding_id", "left_anti"))
    if not foreign.isEmpty():
        lake.append(TABLE, foreign, run)


def mark_unsent(lake: Lake, run: int) -> None:
    """Mark every value to be sent again; repeated by the next run if this one is interrupted before it has sent all."""
    with lake.begin_commit(TABLE, run) as outbox:
        outbox.update("sent", {"sent": "false"})


def _with_sent(lake: Lake, shared: SharedSettings, topic: PublishedTopic, sent: int) -> PublishedTopic:
    """Return the topic after so many records were sent; unchanged if it was deleted or recreated meanwhile, or has
    other records."""
    name = findings_topic(shared.namespace)
    with closing(KafkaAdmin(lake.spark, shared)) as admin:
        described = admin.describe([name]).get(name)
        if described is None or described.topic_id != topic.topic_id:
            return topic
        return topic.with_sent(state_of(admin, described).high_watermarks, sent)


def _unsent(lake: Lake, found: DataFrame) -> DataFrame:
    """Find the values to be sent: → `finding_id string, value string, is_changed boolean`.

    These differ from the outbox (`is_changed`; the value is null for a finding that is no longer current), or an
    interrupted run has stored them and not marked them as sent.
    """
    value = F.to_json(F.struct(F.lit(VERSION).alias("v"), *current_findings.FIELDS), {"ignoreNullFields": "false"})
    now = found.select("finding_id", value.alias("value"))
    if not lake.exists(TABLE):
        return frames.checkpointed(now.withColumn("is_changed", F.lit(True)))
    stored = lake.read_cached(TABLE).select("finding_id", F.col("value").alias("stored_value"), "sent")
    is_changed = ~F.col("value").eqNullSafe(F.col("stored_value"))
    compared = now.join(stored, "finding_id", "full_outer").withColumn("is_changed", is_changed)
    return frames.checkpointed(compared.where("is_changed OR NOT sent").select("finding_id", "value", "is_changed"))


def store(lake: Lake, changed: DataFrame, run: int) -> None:
    """Store changed values in the outbox, to be sent."""
    rows = _outbox_rows(changed, sent=False)
    if not lake.exists(TABLE):
        lake.append(TABLE, rows, run)
    else:
        with lake.begin_commit(TABLE, run) as outbox:
            merge = outbox.alias("old").merge(rows.alias("new"), "old.finding_id = new.finding_id")
            merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()


def _outbox_rows(values: DataFrame, *, sent: bool) -> DataFrame:
    """Return rows of the outbox with these values."""
    return values.select("finding_id", "value", F.lit(sent).alias("sent"))


def _send(unsent: DataFrame, shared: SharedSettings) -> None:
    """Send values with Kafka's idempotent producer and acks=all; returns when all of them are acknowledged."""
    records = unsent.select(F.col("finding_id").cast("binary").alias("key"), F.col("value").cast("binary"))
    options = {f"kafka.{name}": value for name, value in connection.for_kafka_clients(shared).items()}
    topic = findings_topic(shared.namespace)
    records.write.format("kafka").options(**options).option("topic", topic).save()


def mark_sent(lake: Lake, run: int, *, with_tombstones: bool) -> None:
    """Mark the unsent values as sent, and delete sent tombstones."""
    if with_tombstones:
        with lake.begin_commit(TABLE, run) as outbox:
            outbox.delete("NOT sent AND value IS NULL")
    with lake.begin_commit(TABLE, run) as outbox:
        outbox.update("NOT sent", {"sent": "true"})
