"""Rows with processors: members of a consumer group that commit its offsets with their results, in one transaction.

The checker of the clients' events judges these rows too; `Processing.finish` judges invoices and offsets.
"""

import time

from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports them from here
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from service.kafka.group_offsets import OFFSETS_TOPIC
from tests.faults.matrix import row
from tests.faults.processing import SESSION_MS, Processing
from tests.faults.proxy import Do, Loss
from tests.faults.world import World

WARM = 5  # transactions with offsets before the one that a fault meets
WAIT_S = 30.0
ZOMBIES_MOST = 6
BELOW_S = 10.0
EXPECT = "each event once, one invoice an order, offsets as in the ledger"


def offsets_of_the_group(world: World, processing: Processing, do: Do, nth: int = WARM) -> Loss:
    """Wait until a commit of the group's offsets meets a fault."""
    loss = world.cluster.proxy.plan("TxnOffsetCommit", do, nth=nth, containing=processing.group.encode())
    loss.wait(WAIT_S)
    return loss


def end_txn_of_the_group(world: World, processing: Processing, do: Do) -> Loss:
    """Wait until the EndTxn of a transaction with the group's offsets, or its reply, is held."""
    offsets = offsets_of_the_group(world, processing, "hold")
    end = world.cluster.proxy.plan("EndTxn", do, client=offsets.client_id)
    world.cluster.proxy.let_go(offsets)
    end.wait(WAIT_S)
    return end


@row("processors killed before the EndTxn of their offsets", services=1, proxied=True, expect=EXPECT)
def processors_killed_before_end_txn(world: World) -> None:
    processing = world.start_processors(2)
    end = end_txn_of_the_group(world, processing, "hold")
    processing.kill()
    world.cluster.proxy.let_go(end)
    processing.start_dead()


@row("processors killed amid it: Kafka has it, its reply is held", services=1, proxied=True, expect=EXPECT)
def processors_killed_amid_end_txn(world: World) -> None:
    processing = world.start_processors(2)
    end = end_txn_of_the_group(world, processing, "hold-reply")
    processing.kill()
    world.cluster.proxy.let_go(end)
    processing.start_dead()


@row("processors killed after it: they have not read the answer", services=1, proxied=True, expect=EXPECT)
def processors_killed_after_end_txn(world: World) -> None:
    processing = world.start_processors(2)
    end = end_txn_of_the_group(world, processing, "hold-reply")
    for each in processing.processors:
        each.pause()
    world.cluster.proxy.let_go(end)
    world.wait_acked(20)  # the batch is marked and answered meanwhile
    processing.kill()
    processing.start_dead()


@row("a processor stands still past its session, and goes on in its old generation", services=1, expect=EXPECT)
def zombie_processor(world: World) -> None:
    processing = world.start_processors(2)
    zombie, tries = processing.processors[0], 0
    while not zombie.count("dropped") and tries < ZOMBIES_MOST:
        tries += 1
        written = zombie.count("written")
        world.until(lambda written=written: zombie.count("written") > written, WAIT_S, "the zombie has work")  # type: ignore[misc]
        zombie.pause()
        time.sleep(2 * SESSION_MS / 1000)
        zombie.resume()
        time.sleep(SESSION_MS / 1000)
    assert zombie.count("dropped"), f"no batch of an old generation in {tries} pauses"
    world.notes.append(f"{zombie.count('dropped')} batches refused after {tries} pauses")


@row(
    "the group's coordinator killed when it has the offsets, and its reply is held",
    brokers=3,
    services=1,
    proxied=True,
    expect=EXPECT,
)
def group_coordinator_killed_during_a_commit(world: World) -> None:
    processing = world.start_processors(2)
    held = offsets_of_the_group(world, processing, "hold-reply")
    assert held.broker is not None
    world.cluster.brokers[held.broker].kill()
    world.cluster.proxy.let_go(held)


@row(
    "the group rebalances while its offsets, or their EndTxn, are on their way", services=1, proxied=True, expect=EXPECT
)
def rebalance_during_a_commit(world: World) -> None:
    processing = world.start_processors(3)
    for hold in (offsets_of_the_group, end_txn_of_the_group):
        held = hold(world, processing, "hold")
        processing.processors[1].stop()  # it leaves the group, which rebalances at once
        time.sleep(0.8)  # two heartbeats of the others
        world.cluster.proxy.let_go(held)
        processing.start_dead()
    world.notes.append(f"{processing.count('dropped')} batches refused")


@row(
    "the group's partition below its min ISR for 12 s where one slot serves",
    brokers=3,
    services=1,
    settings={"FENCEPOST_SLOTS": "1"},
    expect=EXPECT,
)
def group_below_its_min_isr(world: World) -> None:
    """Kafka writes the group's marker only then, and may hold back the markers of other transactions meanwhile."""
    assert world.load is not None
    processing = world.start_processors(2)
    min_isr(world, 3)
    try:
        world.cluster.brokers[2].kill()
        time.sleep(2.0)  # the group has failed a batch
        before, acked = processing.committed(), world.load.acked
        time.sleep(BELOW_S)
        world.notes.append(f"{world.load.acked - acked} others acknowledged in {BELOW_S:.0f} s of it")
        assert processing.committed() == before, "offsets were committed without enough replicas"
    finally:
        world.cluster.heal()
        min_isr(world, 2)


def min_isr(world: World, count: int) -> None:
    """Set min.insync.replicas of the topic of offsets."""
    entry = ConfigEntry("min.insync.replicas", f"{count}", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, OFFSETS_TOPIC, incremental_configs=[entry])
    admin = world.cluster.admin()  # kept until its future is done
    (done,) = admin.incremental_alter_configs([resource]).values()
    done.result(WAIT_S)
