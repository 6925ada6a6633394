"""Rows about transactional ids: used by another program, expired, or without epochs left."""

import time

from service.contract.wire.names import transactional_id
from tests.faults.batches import batches
from tests.faults.injectors import steal
from tests.faults.matrix import row
from tests.faults.wire import Broker
from tests.faults.world import TOPICS, World

# Kafka gives a new producer id when the epoch would reach 32767.
LAST_EPOCH = 32766
EXPIRES_MS = 3_000


@row("every transactional id of the service stolen, three times")
def transactional_ids_stolen(world: World) -> None:
    for _ in range(3):
        for each in world.transactional_ids():
            steal(world.cluster.coordinator(each), each)
        world.wait_acked(20)


@row(
    "transactional ids expired while nothing was written",
    load=False,
    kafka={
        "transactional.id.expiration.ms": str(EXPIRES_MS),
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
        "producer.id.expiration.ms": str(EXPIRES_MS),
    },
)
def transactional_ids_expired(world: World) -> None:
    """The coordinator has forgotten the ids: the next transaction is refused, and all answers must be right."""
    time.sleep(2 * EXPIRES_MS / 1000 + 2)
    world.start_load()


@row("epochs exhausted: the next fence gives a new producer id at epoch 0", services=0, load=False)
def epochs_exhausted(world: World) -> None:
    slot = transactional_id(world.namespace, 0)
    (service,) = world.start_services(1, slots=1, slots_max=1)
    world.start_load()
    service.stop()
    coordinator = world.cluster.coordinator(slot)
    with Broker("127.0.0.1", coordinator.port) as broker:
        epoch = 0
        while epoch < LAST_EPOCH - 2:
            _, epoch = broker.init_producer_id(slot)
    service.start()
    world.wait_acked(20)
    for _ in range(4):
        steal(coordinator, slot)
        world.wait_acked(10)
    bootstrap, topic = world.cluster.bootstrap, world.topics[0]
    read = [batch for partition in range(TOPICS["a"]) for batch in batches(bootstrap, topic, partition)]
    ids, most = {batch.producer_id for batch in read}, max(batch.epoch for batch in read)
    assert len(ids) >= 2, ids
    assert most > LAST_EPOCH - 10, most
    world.notes.append(f"{len(ids)} producer ids; epochs up to {most}, and again from 0")
