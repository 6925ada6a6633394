"""The topic of findings: one record for each current finding, keyed by its `finding_id`.

The table `published` is an outbox with the value of each finding in the topic, or the value to be sent. A run stores
the changed values, sends them, and then marks them as sent. After an interruption the next run sends the unmarked ones
again: the same key with the newest value, to a compacted topic. A finding that is no longer current gets a tombstone.
"""

from typing import Final

from delta.tables import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings, wire
from spark.reading.kafka_admin import KafkaAdmin, connection
from spark.rules import current_findings
from spark.tables.lake import Lake, checkpointed

VERSION: Final = 1
TABLE: Final = "published"


def prepare(admin: KafkaAdmin, namespace: str) -> None:
    """Create the topic if needed; CannotRun if the topic exists and is not compacted."""
    admin.ensure_compacted(wire.findings_topic(namespace), "pass --no-publish")


def publish(lake: Lake, shared: SharedSettings, found: DataFrame) -> None:
    """Update the topic to the current findings (current_findings.FIELDS). Unchanged findings are not sent."""
    if not lake.exists(TABLE) and found.isEmpty():
        return
    _store_changes(lake, found)
    unsent = lake.read(TABLE).where(~F.col("sent")).persist()
    if not unsent.isEmpty():
        _send(unsent, shared)
        _mark_sent(lake)
    unsent.unpersist()


def _store_changes(lake: Lake, found: DataFrame) -> None:
    """Store the values that differ from the outbox, null for findings that are no longer current."""
    value = F.to_json(F.struct(F.lit(VERSION).alias("v"), *current_findings.FIELDS), {"ignoreNullFields": "false"})
    now = found.select("finding_id", value.alias("value"))
    stored = lake.read(TABLE).select("finding_id", F.col("value").alias("stored_value"))
    changed = checkpointed(
        now.join(stored, "finding_id", "full_outer")
        .where(~F.col("value").eqNullSafe(F.col("stored_value")))
        .select("finding_id", "value", F.lit(False).alias("sent"))
    )
    if not lake.exists(TABLE):
        lake.add(TABLE, changed)
    elif not changed.isEmpty():
        outbox = DeltaTable.forPath(lake.spark, lake.path(TABLE)).alias("old")
        merge = outbox.merge(changed.alias("new"), "old.finding_id = new.finding_id")
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()


def _send(unsent: DataFrame, shared: SharedSettings) -> None:
    """Send values with Kafka's idempotent producer and acks=all; returns when all of them are acknowledged."""
    records = unsent.select(F.col("finding_id").cast("binary").alias("key"), F.col("value").cast("binary"))
    options = {f"kafka.{name}": value for name, value in connection(shared).items()}
    topic = wire.findings_topic(shared.namespace)
    records.write.format("kafka").options(**options).option("topic", topic).save()


def _mark_sent(lake: Lake) -> None:
    """Mark the unsent values as sent, and delete sent tombstones."""
    outbox = DeltaTable.forPath(lake.spark, lake.path(TABLE))
    outbox.delete("NOT sent AND value IS NULL")
    outbox.update("NOT sent", {"sent": "true"})
