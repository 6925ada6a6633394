"""Read committed Kafka records between frozen offsets with Spark."""

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from spark.engine import frames
from spark.reading import connection
from spark.reading.kafka_admin import TopicPartition

SCHEMA: Final = (
    "topic string, partition int, offset bigint, timestamp_ms bigint, key binary, value binary, "
    "headers array<struct<key: string, value: binary>>"
)

# All records of a span exist already. After the last record of a partition the client sends one more fetch, and the
# broker holds it for this time, before it answers Spark's next request on that connection (for the partition's ends).
FETCH_WAIT_MS: Final = 10

LOG_APPEND_TIME: Final = 1
"""The type of a timestamp that is the broker's (message.timestamp.type=LogAppendTime), in Kafka's protocol."""

Span = tuple[int, int]
"""First offset, and the offset after the last."""


def read(
    spark: SparkSession,
    shared: SharedSettings,
    spans: Mapping[TopicPartition, Span],
    *,
    headers: bool = True,
    tasks: int | None = None,
) -> DataFrame:
    """Read the committed records of these spans, in SCHEMA; no rows for no spans. `headers` false: without headers.

    Each partition of Kafka is read by one task; with `tasks` long spans are divided, so that there are about so many.

    Both offsets of each partition are given, and no end may lie above the last stable offset: Spark would report
    undecided records past that offset as lost data. The query fails if records of a span were deleted.
    """
    spans = {partition: span for partition, span in spans.items() if span[1] > span[0]}
    if not spans:
        return frames.rows_of(spark, SCHEMA, [])
    return _load(spark, shared, spans, headers=headers, tasks=tasks).select(*_columns(headers=headers))


def read_with_type(spark: SparkSession, shared: SharedSettings, spans: Mapping[TopicPartition, Span]) -> DataFrame:
    """Read records as `read` does, with `is_append_time boolean`: whether their timestamp is the broker's, at which it
    appended them, and not a client's. `spans` must have a record each, or a transaction marker."""
    is_append_time = F.col("timestampType") == LOG_APPEND_TIME
    return _load(spark, shared, spans, headers=True).select(
        *_columns(headers=True), is_append_time.alias("is_append_time")
    )


def _load(
    spark: SparkSession,
    shared: SharedSettings,
    spans: Mapping[TopicPartition, Span],
    *,
    headers: bool,
    tasks: int | None = None,
) -> DataFrame:
    """Return the rows of Spark's Kafka source for spans that are not empty."""
    reader = (
        spark.read.format("kafka")
        .options(**{f"kafka.{name}": value for name, value in connection.for_kafka_clients(shared).items()})
        .option("kafka.isolation.level", "read_committed")
        .option("kafka.fetch.max.wait.ms", str(FETCH_WAIT_MS))
        .option("assign", _by_topic(dict.fromkeys(spans)))
        .option("startingOffsets", _by_topic({partition: span[0] for partition, span in spans.items()}))
        .option("endingOffsets", _by_topic({partition: span[1] for partition, span in spans.items()}))
        .option("failOnDataLoss", "true")
        .option("includeHeaders", str(headers).lower())
    )
    if tasks is not None:
        reader = reader.option("minPartitions", str(tasks))
    return reader.load()


def _columns(*, headers: bool) -> list[Column]:
    """Return the columns of SCHEMA over the rows of Spark's Kafka source."""
    no_headers = F.lit(None).cast("array<struct<key: string, value: binary>>").alias("headers")
    return [
        *map(F.col, ("topic", "partition", "offset")),
        F.unix_millis("timestamp").alias("timestamp_ms"),
        *map(F.col, ("key", "value")),
        F.col("headers") if headers else no_headers,
    ]


def _by_topic(offsets: Mapping[TopicPartition, int | None]) -> str:
    """Encode offsets for Spark's Kafka source: {"topic": {"0": 17}}, or {"topic": [0]} without offsets."""
    topics: dict[str, dict[str, int]] = {}
    names: dict[str, list[int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        if offset is None:
            names.setdefault(topic, []).append(partition)
        else:
            topics.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(topics or names)
