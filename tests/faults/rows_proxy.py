"""Rows that lose, hold or delay one chosen request to Kafka, or its reply."""

import time
from typing import Final

from tests.faults.matrix import row
from tests.faults.proxy import Do, Loss
from tests.faults.world import World

# A request without a reply is given up soon, which bounds the recovery time: two of these, and a recovery.
SHORT: Final = {"FENCEPOST_REQUEST_TIMEOUT_MS": "2000", "FENCEPOST_TRANSACTION_TIMEOUT_MS": "3000"}
WARM: Final = 5  # requests of the kind before the lost one
WAIT_S: Final = 30.0


def lose(world: World, api: str, do: Do, *, nth: int = WARM, containing: str = "", producer: str = "") -> Loss:
    """Plan a fault for a request of the first process, which the load sends.

    `producer`: how the name of the producer begins, to leave out others; records of the journal name topics too.
    """
    client = f"{world.services[0].name}/{producer}" if producer else world.services[0].name
    return world.cluster.proxy.plan(api, do, nth=nth, client=client, containing=containing.encode())


@row("an EndTxn cut off after the broker has committed", proxied=True, settings=SHORT, in_run=True)
def end_txn_cut(world: World) -> None:
    lose(world, "EndTxn", "cut").wait(WAIT_S)


@row("an EndTxn committed, its reply dropped", proxied=True, settings=SHORT)
def end_txn_reply_dropped(world: World) -> None:
    lose(world, "EndTxn", "drop-reply").wait(WAIT_S)


@row("a late EndTxn arrives in its slot's next transaction", services=1, proxied=True, settings=SHORT, in_run=True)
def late_end_txn(world: World) -> None:
    """The EndTxn, given up by its producer, arrives between the sends and the commit of the next group (KAFKA-17754).

    Of the same epoch it would commit a group whose own commit is still to be asked for.
    """
    late = lose(world, "EndTxn", "hold")
    late.wait(WAIT_S)
    arrive_in_the_next_group(world, late)


def arrive_in_the_next_group(world: World, late: Loss) -> None:
    """Release a held request when the next session of the producer has sent a group and not requested its commit."""
    proxy = world.cluster.proxy
    # The first commit of a session is that of its begin record.
    open_group = proxy.plan("EndTxn", "hold", nth=2, client=late.client_id)
    open_group.wait(WAIT_S)
    commits = proxy.count("EndTxn")
    proxy.let_go(late)
    time.sleep(0.3)
    proxy.let_go(open_group)
    world.until(lambda: proxy.count("EndTxn") > commits, WAIT_S, "commits go on")


@row("killed between produce and EndTxn, which arrives after the heir's fence", proxied=True)
def killed_with_a_late_end_txn(world: World) -> None:
    proxy = world.cluster.proxy
    doomed = world.services[0]
    late = lose(world, "EndTxn", "hold")
    late.wait(WAIT_S)
    transactional_id = late.client_id.rpartition("/")[2]
    fence = proxy.plan("InitProducerId", "hold-reply", containing=transactional_id.encode())
    doomed.kill()
    world.retire(doomed)
    fence.wait(WAIT_S)
    proxy.let_go(late)
    time.sleep(0.3)
    proxy.let_go(fence)


@row("a Produce written, its reply dropped", proxied=True, settings=SHORT, in_run=True)
def produce_reply_dropped(world: World) -> None:
    lose(world, "Produce", "drop-reply", containing=world.topics[0]).wait(WAIT_S)


@row("a Produce written, its reply dropped, the leader killed right after", brokers=3, proxied=True, settings=SHORT)
def produce_reply_dropped_and_leader_killed(world: World) -> None:
    lost = lose(world, "Produce", "drop-reply", containing=world.topics[0])
    lost.wait(WAIT_S)
    assert lost.broker is not None
    world.cluster.brokers[lost.broker].kill()


@row("an AddPartitionsToTxn done, its reply dropped", proxied=True, settings=SHORT)
def add_partitions_reply_dropped(world: World) -> None:
    lose(world, "AddPartitionsToTxn", "drop-reply").wait(WAIT_S)


@row("an InitProducerId done, its reply dropped", proxied=True, settings=SHORT)
def init_producer_id_reply_dropped(world: World) -> None:
    """The request is the fence of a recovery after a lost commit."""
    fence = lose(world, "InitProducerId", "drop-reply", nth=1)
    lose(world, "EndTxn", "cut").wait(WAIT_S)
    fence.wait(WAIT_S)


@row("a fence held until after the next owner's", proxied=True, settings=SHORT)
def late_init_producer_id(world: World) -> None:
    """The late fence fences the slot's new owner, which must recover again."""
    proxy = world.cluster.proxy
    late = lose(world, "InitProducerId", "hold", nth=1)
    lose(world, "EndTxn", "cut").wait(WAIT_S)
    late.wait(WAIT_S)
    doomed = world.services[0]
    doomed.kill()
    world.retire(doomed)
    world.wait_acked(20)
    proxy.let_go(late)


@row("a late Produce arrives in its slot's next transaction", services=1, proxied=True, settings=SHORT)
def late_produce(world: World) -> None:
    """With the same epoch it would become part of that transaction (KIP-890)."""
    late = lose(world, "Produce", "hold", containing=world.topics[0], producer=f"{world.namespace}.slot.")
    late.wait(WAIT_S)
    arrive_in_the_next_group(world, late)
