"""Rows with processors: members of a consumer group that commit its offsets with their results, in one transaction.

The checker of the clients' events judges these rows too; `Processing.finish` judges invoices and offsets.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator

import httpx
from aiokafka import AIOKafkaConsumer, TopicPartition
from confluent_kafka import Consumer
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
from tests.integration.judge import read_committed

WARM = 5  # transactions with offsets before the one that a fault meets
WAIT_S = 30.0
ZOMBIES_MOST = 6
BELOW_S = 10.0
EXPECT = "each event once, one invoice an order, offsets as in the ledger"
# A commit is held while the group rebalances, which waits 5 s (GroupReader.finish_s) for the member whose batch it is.
PATIENT = {"FENCEPOST_REQUEST_TIMEOUT_MS": "60000", "FENCEPOST_TRANSACTION_TIMEOUT_MS": "60000"}
POLL_S = 0.1
SILENT: tuple[Do, ...] = ("hold-reply", "hold")
IMPATIENT = {"FENCEPOST_REQUEST_TIMEOUT_MS": "2000", "FENCEPOST_TRANSACTION_TIMEOUT_MS": "3000"}
# The request timeout of IMPATIENT, and the rest for a loaded machine.
ANSWERED_S = 2.0 + 1.5


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
    "the group rebalances while its offsets, or their EndTxn, are on their way",
    services=1,
    proxied=True,
    settings=PATIENT,
    expect=f"{EXPECT}; offsets of the old generation refused",
)
def rebalance_during_a_commit(world: World) -> None:
    processing = world.start_processors(2)
    end = end_txn_of_the_group(world, processing, "hold")
    with another_member(world, processing):  # the offsets came before it
        world.cluster.proxy.let_go(end)
    dropped = processing.count("dropped")
    offsets = offsets_of_the_group(world, processing, "hold")
    with another_member(world, processing):
        world.cluster.proxy.let_go(offsets)
        world.until(lambda: processing.count("dropped") > dropped, WAIT_S, "the old generation is refused")
    world.notes.append(f"{processing.count('dropped')} batches refused")


@contextlib.contextmanager
def another_member(world: World, processing: Processing) -> Iterator[None]:
    """Let another member join the group, which has its next generation inside the block, and leave it in the end.

    The new member has partitions as soon as all others have joined the new generation.
    """
    servers = {"bootstrap.servers": world.cluster.bootstrap, "log_level": 0}
    joins = {"group.id": processing.group, "partition.assignment.strategy": "range", "enable.auto.commit": False}
    member = Consumer({**servers, **joins})
    try:
        member.subscribe([processing.source])

        def has_joined() -> bool:
            member.poll(POLL_S)
            return bool(member.assignment())

        world.until(has_joined, WAIT_S, "the group has another generation")
        yield
    finally:
        member.close()


@row(
    "the group's coordinator does not answer a commit of offsets",
    services=1,
    proxied=True,
    settings=IMPATIENT,
    expect="each event once; the batch gets 503 or 504 in time, its retry a 201",
)
def group_coordinator_silent(world: World) -> None:
    asyncio.run(commit_through_silence(world))


async def commit_through_silence(world: World) -> None:
    """Send batches with offsets whose TxnOffsetCommit is held: the reply, or the request, which arrives late."""
    source, result, group = (f"{world.namespace}.{name}" for name in ("source", "results", "silent"))
    for topic in (source, result):
        world.cluster.create_topic(topic)
    consumer = AIOKafkaConsumer(
        source, bootstrap_servers=world.cluster.bootstrap, group_id=group, enable_auto_commit=False
    )
    await consumer.start()
    try:
        async with httpx.AsyncClient(base_url=world.services[0].url, timeout=WAIT_S) as http:
            async with asyncio.timeout(WAIT_S):
                while not consumer.assignment():  # noqa: ASYNC110 - aiokafka has no event for it
                    await asyncio.sleep(POLL_S)
            for offset, do in enumerate(SILENT, 1):
                coordinator = consumer._coordinator
                member = {"group": group, "member": coordinator.member_id, "generation": coordinator.generation}
                position = {"topic": source, "partition": 0, "offset": offset}
                events = [{"topic": result, "value": offset}]
                batch = {"atomic": True, "events": events, "offsets": {**member, "positions": [position]}}
                await send_through_silence(world, http, do, group, batch)
        committed = await consumer.committed(TopicPartition(source, 0))
    finally:
        await consumer.stop()
    values = [record.value for record in read_committed(world.cluster.bootstrap, [result])]
    assert (values, committed) == ([b"1", b"2"], 2)


async def send_through_silence(
    world: World, http: httpx.AsyncClient, do: Do, group: str, batch: dict[str, object]
) -> None:
    """Send a batch until it is written; what was held goes on then, and the batch is sent once more."""
    headers = {"Idempotency-Key": f"{group}/{do}"}
    held = world.cluster.proxy.plan("TxnOffsetCommit", do, containing=group.encode())
    begun = time.monotonic()
    answer = await http.post("/events/batch", json=batch, headers=headers)
    took_s = time.monotonic() - begun
    assert held.happened
    assert answer.status_code in (503, 504), answer.text
    assert took_s < ANSWERED_S, f"answered after {took_s:.1f} s"
    world.notes.append(f"{do}: {answer.status_code} after {took_s:.1f} s")
    async with asyncio.timeout(WAIT_S):
        while answer.status_code != 201:
            assert answer.status_code in (409, 503, 504), answer.text
            await asyncio.sleep(POLL_S)
            answer = await http.post("/events/batch", json=batch, headers=headers)
    world.cluster.proxy.let_go(held)
    again = await http.post("/events/batch", json=batch, headers=headers)
    assert (again.content, again.headers.get("idempotent-replayed")) == (answer.content, "true")


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
