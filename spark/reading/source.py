"""Kafka's records, read by Spark between frozen offsets, committed ones only."""

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from spark.reading import wire_expressions
from spark.reading.kafka_admin import TopicPartition, connection

SCHEMA: Final = (
    "topic string, partition int, offset bigint, timestamp_ms bigint, key binary, value binary, "
    "headers array<struct<key: string, value: binary>>"
)

# What is read is there already. With the last of a partition the client asks for more of it, which the broker answers
# when this time is up, and only then Spark's next question on that connection, which is for the partition's ends.
FETCH_WAIT_MS: Final = 10

Span = tuple[int, int]
"""First offset and the one after the last."""


def read(
    spark: SparkSession, shared: SharedSettings, spans: Mapping[TopicPartition, Span], *, headers: bool = True
) -> DataFrame:
    """The committed records of these spans, in SCHEMA; none for no spans.

    Every partition is named with both its ends, and no end lies above the last stable offset: beyond it Spark would
    report lost data that is merely undecided. A span whose records went away in the meantime fails the query.
    """
    spans = {place: span for place, span in spans.items() if span[1] > span[0]}
    if not spans:
        return wire_expressions.rows_of(spark, SCHEMA, [])
    records = (
        spark.read.format("kafka")
        .options(**{f"kafka.{name}": value for name, value in connection(shared).items()})
        .option("kafka.isolation.level", "read_committed")
        .option("kafka.fetch.max.wait.ms", str(FETCH_WAIT_MS))
        .option("assign", _by_topic(dict.fromkeys(spans)))
        .option("startingOffsets", _by_topic({place: span[0] for place, span in spans.items()}))
        .option("endingOffsets", _by_topic({place: span[1] for place, span in spans.items()}))
        .option("failOnDataLoss", "true")
        .option("includeHeaders", str(headers).lower())
        .load()
    )
    return records.select(
        "topic",
        "partition",
        "offset",
        F.unix_millis("timestamp").alias("timestamp_ms"),
        "key",
        "value",
        F.col("headers") if headers else F.lit(None).cast("array<struct<key: string, value: binary>>").alias("headers"),
    )


def _by_topic(offsets: Mapping[TopicPartition, int | None]) -> str:
    """JSON as Spark's Kafka source reads it: {"topic": {"0": 17}}, or {"topic": [0]} for places without offsets."""
    topics: dict[str, dict[str, int]] = {}
    names: dict[str, list[int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        if offset is None:
            names.setdefault(topic, []).append(partition)
        else:
            topics.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(topics or names)
