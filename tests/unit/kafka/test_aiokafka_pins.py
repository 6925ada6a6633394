"""Pins the private names of aiokafka that the service uses, and the behaviour on which it relies.

test_library_names.py lists the names and says why each is used.
"""

import asyncio
import importlib.metadata
import inspect
import re
import subprocess
import sys
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.conn import AIOKafkaConnection, OAuthAuthenticator, SaslPlainAuthenticator, ScramAuthenticator
from aiokafka.consumer import consumer as consumer_module
from aiokafka.consumer import fetcher, group_coordinator
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import CoordinatorGroupRebalance, GroupCoordinator
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.structs import TopicPartition

from deploy.places import ROOT
from service.contract import SharedSettings
from service.kafka.client import BaseClient, Consumer
from service.kafka.deadline import Abandoned, within
from service.kafka.security import Security

OPTIONS: Final[dict[str, Any]] = {
    "client_id": "c",
    "request_timeout_ms": 1_000,
    "security": Security(SharedSettings()),
}


def test_the_pinned_version_is_installed() -> None:
    assert importlib.metadata.version("aiokafka") == "0.14.0"


@pytest.mark.parametrize(
    "name",
    [
        "send",
        "close",
        "bootstrap",
        "add_topic",
        "set_topics",
        "force_metadata_update",
        "get_random_node",
        "coordinator_lookup",
        "_maybe_wait_metadata",
        "ready",
    ],
)
def test_the_client_has_the_methods_that_are_called(name: str) -> None:
    assert callable(getattr(AIOKafkaClient, name))


async def test_the_client_keeps_topics_and_leaders_where_they_are_read() -> None:
    client = BaseClient(bootstrap_servers="127.0.0.1:1", **OPTIONS)
    client.set_topics(["a", "c"])
    client.set_topics(["a"])
    client.add_topic("b")
    assert client.tracked_topics == {"a", "b"}
    assert client.cluster.partitions_for_topic("none") is None
    assert client.cluster.topics(exclude_internal_topics=False) == set()
    assert client.cluster.unauthorized_topics == set()
    assert client.cluster.controller is None
    assert client.cluster._brokers == client.cluster._partitions == {}
    assert client.cluster.internal_topics == set()
    assert client.cluster.config["metadata_max_age_ms"] == 300_000
    assert client.cluster.leader_for_partition(TopicPartition("none", 0)) is None
    await client.close()


async def test_a_connection_has_the_private_names_that_are_used() -> None:
    connection = AIOKafkaConnection("127.0.0.1", 1, request_timeout_ms=1_000)
    assert not connection._requests
    assert isinstance(connection._last_action, float)
    connection.close()


def test_the_authenticators_of_a_login_have_the_parameters_that_are_passed() -> None:
    credentials = ["loop", "sasl_plain_password", "sasl_plain_username"]
    for kind, parameters in {
        SaslPlainAuthenticator: credentials,
        ScramAuthenticator: [*credentials, "sasl_mechanism"],
        OAuthAuthenticator: ["sasl_oauth_token_provider"],
    }.items():
        assert list(inspect.signature(kind.__init__).parameters)[1:] == parameters
        assert list(inspect.signature(kind.step).parameters) == ["self", "payload"]


def test_importing_the_service_replaces_nothing_of_aiokafka() -> None:
    """An application that uses the reader has clients of its own, which the service must not change."""
    code = """
import inspect, sys
import aiokafka, aiokafka.client, aiokafka.conn, aiokafka.consumer
modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "aiokafka"]
classes = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
def known():
    return [dict(vars(each)) for each in (*modules, *classes)]
before = known()
import service.app, service.fencepost.reader
assert [name for old, new in zip(before, known()) for name in old if new.get(name) is not old[name]] == []
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_aiokafka_s_consumer_reaches_brokers_only_by_what_the_client_replaces() -> None:
    """AIOKafkaClient's own methods would open other connections, and its own requests for metadata create topics."""
    modules = (consumer_module, fetcher, group_coordinator)
    used = {name for module in modules for name in re.findall(r"\b_client\.(\w+)", inspect.getsource(module))}
    replaced = {name for name in used if name in vars(BaseClient)}
    assert used - replaced == {
        "cluster",
        "coordinator_lookup",  # by `send`
        "_wait_on_metadata",  # by `add_topic` and `force_metadata_update`
        "fetch_all_metadata",  # only in AIOKafkaConsumer.topics, which the service does not call
    }
    assert "fetch_all_metadata" in inspect.getsource(AIOKafkaConsumer.topics)
    for name in ("coordinator_lookup", "_wait_on_metadata"):
        called = set(re.findall(r"self\.(\w+)\(", inspect.getsource(getattr(AIOKafkaClient, name))))
        assert called <= {"send", "get_random_node", "add_topic", "force_metadata_update"}


async def test_a_consumer_uses_our_client() -> None:
    options = {"bootstrap_servers": "127.0.0.1:1", **OPTIONS}
    consumer = Consumer(options, enable_auto_commit=False)
    assert isinstance(consumer._client, BaseClient)
    assert consumer._client._client_id == "c"
    with pytest.raises(KafkaConnectionError):
        await consumer.start()
    await consumer.stop()


async def test_a_consumer_has_a_coordinator_that_tells_member_and_generation() -> None:
    consumer = AIOKafkaConsumer("t", bootstrap_servers="127.0.0.1:1", group_id="g")
    assert consumer._coordinator is None  # until it is started
    assert {"_coordinator"} <= set(AIOKafkaConsumer.start.__code__.co_names)
    assert {"member_id", "generation"} <= set(GroupCoordinator.__init__.__code__.co_names)
    # The listener is called with an assignment when both are those of its generation.
    joined = inspect.getsource(CoordinatorGroupRebalance)
    assert joined.index("self._coordinator.generation = response.generation_id") < joined.index("_on_join_follower()")
    rejoined = inspect.getsource(GroupCoordinator._do_rejoin_group)
    assert rejoined.index("perform_group_join()") < rejoined.index("_on_join_complete(")
    await consumer.stop()


def test_aiokafka_s_requests_have_the_parameters_that_the_service_passes() -> None:
    assert CoordinationType.TRANSACTION in CoordinationType
    for request, parameters in {
        InitProducerIdRequest: ["transactional_id", "transaction_timeout_ms"],
        AddPartitionsToTxnRequest: ["transactional_id", "producer_id", "producer_epoch", "topics"],
        EndTxnRequest: ["transactional_id", "producer_id", "producer_epoch", "transaction_result"],
        ProduceRequest: ["transactional_id", "required_acks", "timeout", "topics"],
    }.items():
        assert list(inspect.signature(request.__init__).parameters)[1:] == parameters


def test_a_full_batch_takes_no_record_and_a_batch_carries_its_producer() -> None:
    batch = DefaultRecordBatchBuilder(
        2, 0, is_transactional=True, producer_id=7, producer_epoch=3, base_sequence=11, batch_size=400
    )
    assert batch.append(0, 5, None, b"x" * 200, []) is not None
    assert batch.append(1, 5, None, b"x" * 200, []) is None
    made = DefaultRecordBatch(bytes(batch.build()))
    assert (made.producer_id, made.producer_epoch, made.base_sequence, made.is_transactional) == (7, 3, 11, True)


async def test_a_fetcher_that_closes_may_cancel_its_caller() -> None:
    """The reason for `within`: the consumer waits for a fetch that it has cancelled before it began."""
    closing = Fetcher.__new__(Fetcher)
    closing._fetch_task = asyncio.create_task(asyncio.sleep(0))
    closing._fetch_waiters = set()
    closing._pending_tasks = {asyncio.create_task(asyncio.sleep(1))}
    with pytest.raises(asyncio.CancelledError):
        await closing.close()
    closing._pending_tasks = {asyncio.create_task(asyncio.sleep(1))}
    with pytest.raises(Abandoned):
        await within(1, closing.close())
