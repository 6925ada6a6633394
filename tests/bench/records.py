"""Writes histories of millions of records for the audit's benchmark with Spark, because Python would be too slow."""

import time
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from deploy.stack import Kafka
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER
from service.contract.wire.names import ledger_topic, requests_topic
from service.contract.wire.versions import VERSION
from spark.reading import wire_expressions

PARTITIONS: Final = 8
GROUP: Final = 500
"""Events in a transaction; each has a ledger record and a journal record."""

REPLAYED_EVERY: Final = 100
COPIED_EVERY: Final = 10_000
HOUR_MS: Final = 3_600_000
_HEADERS: Final = "array<struct<key: string, value: binary>>"


@dataclass(frozen=True)
class Records:
    """A healthy history of `count` events over `hours`, which ends at `now_ms`.

    Every hundredth event was answered twice, and a foreign writer copied every ten-thousandth.
    """

    namespace: str
    count: int
    now_ms: int
    hours: int = 4

    @property
    def topic(self) -> str:
        return f"{self.namespace}-orders"

    @property
    def partitions(self) -> int:
        return PARTITIONS

    @property
    def copies(self) -> int:
        return -(-self.count // COPIED_EVERY)

    @property
    def replays(self) -> int:
        return -(-self.count // REPLAYED_EVERY)

    def write(self, spark: SparkSession, kafka: Kafka) -> float:
        """Create the topics and fill them; returns the seconds that this took.

        A task writes one partition, in order, to a new log, so that the offsets are known in advance.
        """
        assert self.count % (PARTITIONS * GROUP) == 0
        started = time.monotonic()
        log_append = {"message.timestamp.type": "LogAppendTime"}
        kafka.create_topic(self.topic, PARTITIONS)
        kafka.create_topic(ledger_topic(self.namespace), PARTITIONS, log_append)
        kafka.create_topic(requests_topic(self.namespace), PARTITIONS, log_append)
        events = self._events(spark)
        self._send(kafka, events, self.topic)
        copies = events.where(F.col("nth") % COPIED_EVERY == 0)
        self._send(kafka, copies, self.topic)
        groups = events.groupBy("partition", F.floor(F.col("offset") / GROUP).alias("nth"))
        entries = groups.agg(F.sort_array(F.collect_list(F.struct("offset", self._entry().alias("text")))).alias("all"))
        self._send(kafka, entries.select("partition", self._whole("entries").alias("value")), self._ledger)
        told = groups.agg(F.sort_array(F.collect_list(F.struct("offset", self._answer().alias("text")))).alias("all"))
        self._send(kafka, told.select("partition", self._whole("answers").alias("value")), self._requests)
        return time.monotonic() - started

    @property
    def _ledger(self) -> str:
        return ledger_topic(self.namespace)

    @property
    def _requests(self) -> str:
        return requests_topic(self.namespace)

    def _events(self, spark: SparkSession) -> DataFrame:
        share = self.count // PARTITIONS
        nth = F.col("id")
        key = F.concat(F.lit("order-"), F.lpad(nth.cast("string"), 9, "0"), F.lit("-"), F.hex(F.xxhash64(nth)))
        rows = spark.range(0, self.count, 1, PARTITIONS).select(
            nth.alias("nth"),
            F.floor(nth / share).cast("int").alias("partition"),
            (nth % share).alias("offset"),
            (F.lit(self.now_ms) - F.floor((1 - nth / self.count) * self.hours * HOUR_MS).cast("bigint")).alias("at"),
            key.alias("name"),
        )
        value = F.concat(
            F.lit('{"order":"'), "name", F.lit('","total":12.5,"note":"'), F.repeat(F.lit("x"), 120), F.lit('"}')
        )
        named = rows.withColumns(
            {
                "event": F.lower(F.hex(wire_expressions.event_id(wire_expressions.as_binary(F.col("name"))))),
                "key": wire_expressions.as_binary(
                    F.concat(F.lit("customer-"), (F.col("nth") % 100_000).cast("string"))
                ),
                "value": wire_expressions.as_binary(value),
            }
        )
        asked = wire_expressions.fingerprint(
            F.lit(self.topic), None, F.col("key"), F.lit(None).cast(_HEADERS), F.col("value")
        )
        return named.withColumn("fp", F.lower(F.hex(asked))).select(
            "nth",
            "partition",
            "offset",
            "at",
            "event",
            "fp",
            "key",
            "value",
            F.timestamp_millis(F.col("at") + 5).alias("timestamp"),
            F.array(self._header(KEY_HEADER, F.col("name")), self._header(STAMP_HEADER, self._stamp())).alias(
                "headers"
            ),
        )

    def _header(self, name: str, value: Column) -> Column:
        return F.struct(F.lit(name).alias("key"), wire_expressions.as_binary(value).alias("value"))

    def _stamp(self) -> Column:
        writer = [F.col("partition").cast("string"), F.lit("7001"), F.lit("0"), F.lit("10.0.0.7:8000")]
        return F.concat_ws(";", F.lit(str(VERSION)), "event", "fp", F.col("at").cast("string"), *writer)

    def _entry(self) -> Column:
        text = f'{{"id":"%s","fp":"%s","at":%d,"topic":"{self.topic}","partition":%d,"offset":%d,"ts":%d}}'
        return F.format_string(text, "event", "fp", "at", "partition", "offset", F.col("at") + 5)

    def _answer(self) -> Column:
        def told(replayed: str) -> Column:
            text = (
                f'{{"id":"%s","fp":"%s","at":%d,"status":201,"code":null,"replayed":{replayed},"latency_ms":3.250,'
                f'"topic":"{self.topic}","partition":%d,"offset":%d}}'
            )
            return F.format_string(text, "event", "fp", "at", "partition", "offset")

        once = told("false")
        return F.when(F.col("nth") % REPLAYED_EVERY == 0, F.concat_ws(",", once, told("true"))).otherwise(once)

    def _whole(self, what: str) -> Column:
        writer = '"slot":%d,"pid":7001,"epoch":0,' if what == "entries" else ""
        head = F.format_string(
            f'{{"v":1,{writer}"instance":"10.0.0.7:8000","{what}":[', *(["partition"] if writer else [])
        )
        return wire_expressions.as_binary(F.concat(head, F.array_join(F.col("all.text"), ","), F.lit("]}")))

    def _send(self, kafka: Kafka, rows: DataFrame, topic: str) -> None:
        names = [name for name in ("key", "value", "headers", "partition", "timestamp") if name in rows.columns]
        writer = rows.select(*names).write.format("kafka").option("topic", topic)
        writer = writer.option("kafka.bootstrap.servers", kafka.bootstrap).option("includeHeaders", "true")
        writer.option("kafka.batch.size", "262144").option("kafka.linger.ms", "5").option(
            "kafka.enable.idempotence", "true"
        ).save()
