"""Chooses the broker of a request, and names the errors after which the request is sent again."""

import random
from collections.abc import Collection
from typing import Final

from aiokafka import errors
from aiokafka.client import CoordinationType

from service.kafka.client import Client

RETRY_PAUSE_S: Final = 0.02
# The coordinator moves, loads its log or ends an older transaction, or a broker cannot be reached.
RETRIABLE: Final = (
    errors.ConcurrentTransactions,
    errors.CoordinatorLoadInProgressError,
    errors.CoordinatorNotAvailableError,
    errors.NotCoordinatorError,
    errors.RequestTimedOutError,
    errors.NodeNotReadyError,
    errors.KafkaConnectionError,
)


async def any_node(client: Client, but_not: Collection[int] = ()) -> int:
    """Choose a random broker, outside `but_not` if there is another.

    Raises NodeNotReadyError where Kafka lists no broker: a single broker lists none while its controller fences it.
    """
    node = client.get_random_node()
    if node is None:
        await client.force_metadata_update()
        node = client.get_random_node()
    if node is None:
        raise errors.NodeNotReadyError("Kafka lists no broker")
    if node in but_not:
        others = {broker.nodeId for broker in client.cluster.brokers()}.difference(but_not)
        node = random.choice([*others]) if others else node  # noqa: S311
    return int(node)


async def coordinator(client: Client, name: str, kind: CoordinationType = CoordinationType.TRANSACTION) -> int:
    """Look up the node id of the coordinator of a transactional id, or of a group. Raises KafkaError without one."""
    await any_node(client)  # without a known broker, coordinator_lookup fails an assertion
    return int(await client.coordinator_lookup(kind, name))
