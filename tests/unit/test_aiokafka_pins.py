"""The names inside aiokafka that service/kafka uses although they are not its interface. Why it is pinned."""

import functools
import importlib.metadata
import inspect

import aiokafka.client
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.producer.sender import Sender
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

from service.kafka import producer


def test_the_version() -> None:
    assert importlib.metadata.version("aiokafka") == "0.14.0"


async def test_names_inside_a_producer() -> None:
    made = AIOKafkaProducer(transactional_id="t", bootstrap_servers="127.0.0.1:1")
    try:
        manager = made._txn_manager
        assert isinstance(manager, TransactionManager)
        assert (manager.producer_id, manager.producer_epoch) == (-1, -1)
        assert manager._transaction_waiter is None
        assert callable(manager.maybe_add_partition_to_txn)
        assert isinstance(made._sender, Sender)
        assert made._sender.sender_task is None
        assert made._sender.client is made.client, "what is put in front of client.send is what the sender calls"
        assert made._closed is False
    finally:
        made._closed = True


async def test_an_idempotent_producer_has_a_manager_too() -> None:
    made = AIOKafkaProducer(enable_idempotence=True, bootstrap_servers="127.0.0.1:1")
    made._closed = True
    assert made._txn_manager.transactional_id is None
    assert made._txn_manager._transaction_waiter is None


@pytest.mark.parametrize(
    "name",
    [
        "send",
        "close",
        "bootstrap",
        "add_topic",
        "force_metadata_update",
        "get_random_node",
        "coordinator_lookup",
    ],
)
def test_names_of_the_client(name: str) -> None:
    assert callable(getattr(AIOKafkaClient, name))


async def test_names_inside_the_client() -> None:
    client = AIOKafkaClient(bootstrap_servers="127.0.0.1:1")
    assert isinstance(client._topics, set)
    assert client.cluster.partitions_for_topic("none") is None
    assert client.cluster.controller is None
    await client.close()


def test_the_sender_hands_requests_to_the_client_s_send() -> None:
    """The watch stands there: were it circumvented, a lost EndTxn reply would look like success."""
    from aiokafka.producer import sender

    text = inspect.getsource(sender)
    assert text.count("client.send(") == 2
    assert "self._sender.client.send(node_id, req, group=self.group)" in text
    assert "self._client.send(node_id, request)" in text


def test_metadata_is_asked_for_by_the_name_that_is_replaced() -> None:
    """Look-ups must not make topics."""
    assert "MetadataRequest(" in inspect.getsource(aiokafka.client)
    replaced = aiokafka.client.MetadataRequest
    assert isinstance(replaced, functools.partial)
    assert replaced.func is MetadataRequest
    assert replaced.keywords == {"allow_auto_topic_creation": False}
    assert "allow_auto_topic_creation" in inspect.signature(MetadataRequest.__init__).parameters


def test_the_sender_makes_its_tasks_by_the_name_that_is_replaced() -> None:
    source = inspect.getsource(aiokafka.producer.sender.Sender)
    assert source.count("create_task(") >= 4
    assert aiokafka.producer.sender.create_task.__module__ == "service.kafka.producer"


def test_api_keys() -> None:
    assert ProduceRequest.API_KEY == producer.PRODUCE
    assert AddPartitionsToTxnRequest.API_KEY == producer.ADD_PARTITIONS
    assert EndTxnRequest.API_KEY == producer.END_TXN
    assert CoordinationType.TRANSACTION in CoordinationType
    assert list(inspect.signature(InitProducerIdRequest.__init__).parameters)[1:] == [
        "transactional_id",
        "transaction_timeout_ms",
    ]


def test_a_batch_says_when_it_is_full() -> None:
    batch = BatchBuilder(400, 0, is_transactional=True)
    assert batch.append(timestamp=0, key=None, value=b"x" * 200, headers=[]) is not None
    assert batch.append(timestamp=0, key=None, value=b"x" * 200, headers=[]) is None
