"""Tests that the proxy applies a fault to the planned request only, with a real broker and the service's producers."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from confluent_kafka import IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined] # its own documentation imports it from here

from deploy.stack import Kafka
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway
from service.kafka import connection
from service.kafka.admin import KafkaAdmin
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.kafka.producer import TransactionalProducer
from service.kafka.records import Record
from service.kafka.topic_admin import TopicAdmin
from tests.faults.proxy import Do, Proxy
from tests.integration.judge import read_committed

TIMEOUT_MS = 2_000


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def kafka(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker with a second listener, behind the proxy."""
    with Kafka(tmp_path_factory.mktemp("proxied"), listeners=[proxy.listener(0)]) as broker:
        yield broker


class ProxiedProducer:
    """A topic with its ledger, and a transactional id whose producers know the broker by the proxy only."""

    def __init__(self, kafka: Kafka, proxy: Proxy) -> None:
        self.kafka = kafka
        self.name = f"data-{uuid.uuid4().hex[:8]}"
        self.cluster = KafkaAdmin(
            proxy.bootstrap, client_id="proxied", request_timeout_ms=TIMEOUT_MS, telemetry=Telemetry()
        )
        for topic in (self.name, f"{self.name}-ledger"):
            kafka.create_topic(topic)
        self.producer = self._life()

    def _life(self) -> TransactionalProducer:
        return TransactionalProducer(self.cluster, self.name, 4 * self.cluster.request_timeout_ms)

    async def replace(self) -> None:
        """Start the next session of the transactional id, which fences the one before."""
        await self.producer.close()
        self.producer = self._life()
        await self.producer.start()

    async def write(self, value: bytes = b"v") -> None:
        record = Record(self.name, 0, None, value, [], 1)
        await self.producer.send([record], (f"{self.name}-ledger", 0))
        await self.producer.commit(b"{}")

    async def committed(self) -> list[bytes | None]:
        found = await asyncio.to_thread(read_committed, self.kafka.bootstrap, [self.name])
        return [record.value for record in found]

    async def end(self) -> int:
        """Return the high watermark, which counts markers, and records of open transactions."""
        place = TopicPartition(self.name, 0)
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        admin = self.kafka.admin()
        offsets = admin.list_offsets({place: latest}, isolation_level=IsolationLevel.READ_UNCOMMITTED)
        return int((await asyncio.to_thread(offsets[place].result, 10)).offset)


@pytest.fixture
async def proxied(kafka: Kafka, proxy: Proxy) -> AsyncIterator[ProxiedProducer]:
    proxied = ProxiedProducer(kafka, proxy)
    await proxied.producer.start()
    yield proxied
    await proxied.producer.close()
    await proxied.cluster.close()


async def test_a_client_that_bootstraps_by_the_proxy_knows_no_other_way(proxied: ProxiedProducer, proxy: Proxy) -> None:
    apis = ("Metadata", "FindCoordinator", "InitProducerId", "AddPartitionsToTxn", "Produce", "EndTxn")
    before = {api: proxy.count(api) for api in apis}
    await proxied.replace()
    await proxied.write()
    assert await proxied.committed() == [b"v"]
    assert all(proxy.count(api) > before[api] for api in apis)


def test_another_vendor_s_client_comes_through_it_too(kafka: Kafka, proxy: Proxy) -> None:
    kafka.create_topic("librdkafka")
    before = proxy.count("Produce")
    producer = Producer({"bootstrap.servers": proxy.bootstrap})
    producer.produce("librdkafka", b"v")
    assert producer.flush(10) == 0
    assert proxy.count("Produce") == before + 1


async def test_a_held_request_has_not_reached_the_broker(proxied: ProxiedProducer, proxy: Proxy) -> None:
    proxied.cluster.request_timeout_ms = 15 * TIMEOUT_MS  # a busy machine may take a second to look up a leader
    await proxied.replace()
    held = proxy.plan("Produce", "hold", containing=proxied.name.encode())
    writing = asyncio.create_task(proxied.write())
    await asyncio.to_thread(held.wait)
    assert await proxied.end() == 0
    assert not writing.done()
    proxy.let_go(held)
    await writing
    assert await proxied.committed() == [b"v"]


async def test_a_held_request_outlives_its_client(proxied: ProxiedProducer, proxy: Proxy) -> None:
    """It arrives after its sender has given up, and takes effect unless the producer was fenced."""
    held = proxy.plan("EndTxn", "hold", client=proxied.name)
    with pytest.raises(TransactionFailed) as failed:
        await proxied.write()
    assert failed.value.outcome is TransactionOutcome.UNKNOWN
    await proxied.producer.close()
    before = await proxied.end()
    proxy.let_go(held)
    assert await proxied.committed() == [b"v"]
    assert await proxied.end() == before + 1  # the marker


async def test_a_late_request_of_a_fenced_producer_changes_nothing(proxied: ProxiedProducer, proxy: Proxy) -> None:
    held = proxy.plan("EndTxn", "hold", client=proxied.name)
    with pytest.raises(TransactionFailed):
        await proxied.write(b"given up")
    await proxied.replace()
    before = await proxied.end()
    proxy.let_go(held)
    await proxied.write(b"the next")
    assert await proxied.committed() == [b"the next"]
    assert await proxied.end() == before + 2  # a record and its marker


@pytest.mark.parametrize("do", ["drop-reply", "cut"])
async def test_a_commit_whose_reply_is_lost_has_happened(proxied: ProxiedProducer, proxy: Proxy, do: Do) -> None:
    lost = proxy.plan("EndTxn", do, client=proxied.name)
    started = time.monotonic()
    with pytest.raises(TransactionFailed) as failed:
        await proxied.write()
    took_s = time.monotonic() - started
    lost.wait(0)
    assert failed.value.outcome is TransactionOutcome.UNKNOWN
    assert await proxied.committed() == [b"v"]
    if do == "drop-reply":
        assert took_s >= TIMEOUT_MS / 1000  # the client sees silence


async def test_a_request_before_which_the_connection_is_cut_never_arrives(
    proxied: ProxiedProducer, proxy: Proxy
) -> None:
    lost = proxy.plan("EndTxn", "cut-before", client=proxied.name, nth=2)
    await proxied.write(b"first")
    with pytest.raises(TransactionFailed):
        await proxied.write(b"second")
    assert lost.happened
    await proxied.replace()  # aborts the transaction
    assert b"first" in await proxied.committed()


async def test_a_held_reply_comes_when_it_is_let_go(proxied: ProxiedProducer, proxy: Proxy) -> None:
    held = proxy.plan("EndTxn", "hold-reply", client=proxied.name)
    writing = asyncio.create_task(proxied.write())
    await asyncio.to_thread(held.wait)
    assert await proxied.committed() == [b"v"]
    assert not writing.done()
    proxy.let_go(held)
    await writing


async def test_a_request_is_delayed(proxied: ProxiedProducer, proxy: Proxy) -> None:
    proxy.plan("AddPartitionsToTxn", "delay", client=proxied.name, delay_ms=400)
    started = time.monotonic()
    await proxied.write()
    assert time.monotonic() - started >= 0.4


async def test_only_the_nth_of_those_that_fit(proxied: ProxiedProducer, proxy: Proxy) -> None:
    other = proxy.plan("Produce", "cut", client="another client")
    third = proxy.plan(
        "Produce", "cut-before", client=proxied.name, containing=proxied.name.encode() + b"-ledger", nth=3
    )
    await proxied.write()
    await proxied.write()
    assert (third.seen, third.happened, third.broker) == (2, False, None)
    with pytest.raises(TransactionFailed):
        await proxied.write()
    assert (third.seen, third.happened, third.broker) == (3, True, 0)
    assert (other.seen, other.happened) == (0, False)


async def test_an_idle_connection_that_is_forgotten_costs_its_producer_a_probe_and_no_term(
    proxied: ProxiedProducer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error is reported: sent bytes are lost, and a new connection works."""
    await proxied.write(b"first")
    monkeypatch.setattr(connection, "IDLE_S", 0.2)
    await asyncio.sleep(0.3)
    proxy.forget()
    await proxied.write(b"second")
    assert await proxied.committed() == [b"first", b"second"]


async def test_a_forgotten_connection_costs_a_look_up_a_probe(
    proxied: ProxiedProducer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await TopicAdmin(proxied.cluster).partitions([proxied.name]) == {proxied.name: 1}
    monkeypatch.setattr(connection, "IDLE_S", 0.2)
    await asyncio.sleep(0.3)
    proxy.forget()
    assert await TopicAdmin(proxied.cluster).partitions([proxied.name]) == {proxied.name: 1}


def test_a_plan_that_names_no_api_or_fault(proxy: Proxy) -> None:
    with pytest.raises(AssertionError, match="no such API: EndTx"):
        proxy.plan("EndTx", "cut")
    with pytest.raises(AssertionError, match="no such fault: lose"):
        proxy.plan("EndTxn", "lose")  # type: ignore[arg-type]


async def test_a_broker_that_is_down_is_down_by_the_proxy(kafka: Kafka, proxied: ProxiedProducer) -> None:
    """The last test of this module: the broker stays down."""
    kafka.kill()
    with pytest.raises(TransactionFailed):
        await proxied.write()
    with pytest.raises(KafkaAway):
        await proxied.replace()
