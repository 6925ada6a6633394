"""The topic of findings: what stands now, one record a finding, keyed by its `finding_id`, for others to act on.

The table `published` is an outbox: for each finding the value that the topic has, or is about to get. What changed is
written down first, then sent, then marked as sent. Cut off anywhere, the next run sends again what is not marked: the
same key with the newest value, to a compacted topic. A finding that does not stand any more gets a tombstone.
"""

from typing import Final

from delta.tables import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings, wire
from spark.reading.kafka_admin import Broker, connection
from spark.rules import current_findings
from spark.tables.lake import Lake

VERSION: Final = 1
TABLE: Final = "published"


def prepare(broker: Broker, namespace: str) -> None:
    """See to the topic; CannotRun where it is there and not compacted."""
    broker.ensure_compacted(wire.findings_topic(namespace), "pass --no-publish")


def publish(lake: Lake, shared: SharedSettings, found: DataFrame) -> None:
    """Bring the topic up to what stands: standing.FIELDS. Nothing is sent for a finding that is as it was."""
    if not lake.exists(TABLE) and found.isEmpty():
        return
    _write_down(lake, found)
    unsent = lake.read(TABLE).where(~F.col("sent")).persist()
    if not unsent.isEmpty():
        _send(unsent, shared)
        _mark(lake)
    unsent.unpersist()


def _write_down(lake: Lake, found: DataFrame) -> None:
    """The outbox gets what is not yet as it stands; a null value for what does not stand any more."""
    value = F.to_json(F.struct(F.lit(VERSION).alias("v"), *current_findings.FIELDS), {"ignoreNullFields": "false"})
    now = found.select("finding_id", value.alias("value"))
    there = lake.read(TABLE).select("finding_id", F.col("value").alias("was"))
    changed = (
        now.join(there, "finding_id", "full_outer")
        .where(~F.col("value").eqNullSafe(F.col("was")))
        .select("finding_id", "value", F.lit(False).alias("sent"))
        .localCheckpoint()
    )
    if not lake.exists(TABLE):
        lake.add(TABLE, changed)
    elif not changed.isEmpty():
        outbox = DeltaTable.forPath(lake.spark, lake.path(TABLE)).alias("there")
        merge = outbox.merge(changed.alias("new"), "there.finding_id = new.finding_id")
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()


def _send(unsent: DataFrame, shared: SharedSettings) -> None:
    """Kafka's idempotent producer, acks=all: when this returns, everything is there."""
    records = unsent.select(F.col("finding_id").cast("binary").alias("key"), F.col("value").cast("binary"))
    options = {f"kafka.{name}": value for name, value in connection(shared).items()}
    topic = wire.findings_topic(shared.namespace)
    records.write.format("kafka").options(**options).option("topic", topic).save()


def _mark(lake: Lake) -> None:
    outbox = DeltaTable.forPath(lake.spark, lake.path(TABLE))
    outbox.delete("NOT sent AND value IS NULL")
    outbox.update("NOT sent", {"sent": "true"})
