"""Tests that partitions are read through a record completely, however large their records are."""

import os

from deploy.stack import Kafka
from service.core.metrics import Telemetry
from service.kafka.admin import KafkaAdmin
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.reader import FETCH_BYTES_MAX, Span, read_through
from tests.conftest import MakeTopic

TIMEOUT_S = 20.0


async def test_records_larger_than_a_fetch_are_read_from_every_partition(kafka: Kafka, make_topic: MakeTopic) -> None:
    """Kafka returns the first large record whole, and nothing of the others that do not fit: that is not the end."""
    topic = make_topic(3)
    cluster = KafkaAdmin(kafka.bootstrap, client_id="t", request_timeout_ms=10_000, telemetry=Telemetry())
    producer = IdempotentProducer(cluster, "t")
    contents = [(n % 3, b"%d" % n, os.urandom(3 * FETCH_BYTES_MAX if n % 2 else 10)) for n in range(18)]
    try:
        offsets = [place.offset for place in await producer.send_all(topic, contents)]
        spans = {partition: Span(None, offsets[15 + partition]) for partition in range(3)}
        found = [
            item async for some in read_through(cluster, topic, spans, "read_committed", TIMEOUT_S) for item in some
        ]
    finally:
        await producer.close()
        await cluster.close()
    numbered = zip(offsets, contents, strict=True)
    written = [(partition, offset, key, value) for offset, (partition, key, value) in numbered]
    assert sorted(tuple(item) for item in found) == sorted(written)
