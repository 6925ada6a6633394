"""Tests atomic batches that commit the offsets of a consumer group: with their events or not at all, on real parts."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition

from service.contract.wire.ids import event_id
from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.ledger_entries import CommittedOffset
from service.contract.wire.names import ledger_topic
from tests.conftest import MakeTopic
from tests.integration.conftest import Stage
from tests.integration.judge import ledger_faults, read_committed
from tests.integration.plan import Fault

PLACES = ("write", "ledger", "commit", "commit.done", "mark.done")


class Member:
    """A member of a consumer group that reads `source`, of a group of its own unless one is given."""

    def __init__(self, stage: Stage, source: str, group: str = "") -> None:
        self.group = group or f"group-{uuid.uuid4().hex[:8]}"
        self._stage = stage
        self._source = source
        self._consumer = AIOKafkaConsumer(
            source,
            bootstrap_servers=stage.kafka.bootstrap,
            group_id=self.group,
            enable_auto_commit=False,
            heartbeat_interval_ms=200,
            auto_offset_reset="earliest",
        )

    @contextlib.asynccontextmanager
    async def joined(self) -> AsyncIterator["Member"]:
        await self._consumer.start()
        try:
            async with asyncio.timeout(30):
                while not self._consumer.assignment():  # noqa: ASYNC110 - aiokafka has no event for it
                    await asyncio.sleep(0.05)
            yield self
        finally:
            await self._consumer.stop()

    def offsets(self, offset: int, **others: object) -> dict[str, Any]:
        """Make the `offsets` of a batch by which the member commits one offset in partition 0."""
        coordinator = self._consumer._coordinator
        position = {"topic": self._source, "partition": 0, "offset": offset, "metadata": f"to {offset}"}
        identity = {"group": self.group, "member": coordinator.member_id, "generation": coordinator.generation}
        return {**identity, "positions": [position], **others}

    async def committed(self) -> int:
        """Read the group's offset in partition 0, 0 if none is committed, once no transaction holds it (KIP-447)."""
        asked = ConsumerGroupTopicPartitions(self.group, [TopicPartition(self._source, 0)])
        admin = self._stage.kafka.admin()
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(KafkaException):  # a transaction holds it
                    (future,) = admin.list_consumer_group_offsets([asked], require_stable=True).values()
                    (found,) = (await asyncio.wrap_future(future)).topic_partitions
                    if found.error is None:
                        return int(max(0, found.offset))
                await asyncio.sleep(0.05)

    async def metadata(self) -> str:
        """Read what is stored with the group's offset in partition 0. confluent_kafka returns garbage behind it."""
        found = await self._consumer._coordinator.fetch_committed_offsets([AioPartition(self._source, 0)])
        (committed,) = found.values()
        return str(committed.metadata)


async def post(stage: Stage, url: str, key: str, events: list[dict[str, Any]], offsets: object) -> httpx.Response:
    body = json.dumps({"atomic": True, "events": events, "offsets": offsets})
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    return await stage.client.http.post(f"{url}/events/batch", content=body, headers=headers)


async def settle(stage: Stage, url: str, key: str, events: list[dict[str, Any]], offsets: object) -> httpx.Response:
    """Send a batch again until it is answered with something else than "try again"."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await post(stage, url, key, events, offsets)
                if answer.status_code not in (503, 504) and answer.json().get("code") != "in-progress":
                    return answer
            await asyncio.sleep(0.05)


async def values_in(stage: Stage, topic: str) -> list[bytes | None]:
    return [record.value for record in await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])]


async def offsets_in_ledger(stage: Stage) -> Mapping[bytes, LedgerRecord]:
    """Read the ledger's records with offsets, by the id of their batch."""
    found = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [ledger_topic(stage.namespace)])
    records = [decode_ledger(record.value) for record in found]
    return {each.offsets.batch: each for each in records if isinstance(each, LedgerRecord) and each.offsets is not None}


async def test_offsets_are_committed_with_their_events_and_answered_alike_ever_after(
    own_stage: Stage, make_topic: MakeTopic
) -> None:
    stage, source, out = own_stage, make_topic(2), make_topic(1)
    one, two = stage.service(), stage.service()
    await stage.start(one, two)
    async with Member(stage, source).joined() as member:
        events, offsets = [{"topic": out, "value": n} for n in range(3)], member.offsets(5)
        first = await settle(stage, one.url, "k", events, offsets)
        assert first.status_code == 201, first.text
        assert await member.committed() == 5
        assert await member.metadata() == "to 5"
        alone = await settle(stage, one.url, "alone", [], member.offsets(6))
        assert (alone.status_code, alone.json()) == (201, {"id": event_id("alone").hex(), "results": []})
        assert await member.committed() == 6

        for flush in (False, True):
            if flush:
                stage.redis.flush()
            for key, of, answer in (("k", events, first), ("alone", [], alone)):
                moved = member.offsets(5 if key == "k" else 6, generation=10_000)  # of a later generation
                again = await settle(stage, two.url, key, of, moved)
                assert (again.content, again.headers["idempotent-replayed"]) == (answer.content, "true")
                assert again.headers["idempotency-key-expires"] == answer.headers["idempotency-key-expires"]
        other = await settle(stage, one.url, "k", events, member.offsets(7))
        assert (other.status_code, other.json()["code"]) == (422, "fingerprint-mismatch")
        assert await member.committed() == 6

    assert await values_in(stage, out) == [b"0", b"1", b"2"]
    ledger = await offsets_in_ledger(stage)
    named = {batch: record.offsets.positions for batch, record in ledger.items() if record.offsets is not None}
    assert named == {event_id("k"): [CommittedOffset(source, 0, 5)], event_id("alone"): [CommittedOffset(source, 0, 6)]}
    assert all(record.offsets is not None and record.offsets.offset is not None for record in ledger.values())
    assert await asyncio.to_thread(ledger_faults, stage.kafka.bootstrap, stage.namespace, [out]) == []


async def test_a_member_of_a_passed_generation_writes_nothing_and_commits_nothing(
    stage: Stage, make_topic: MakeTopic
) -> None:
    source, out = make_topic(2), make_topic(1)
    service = await stage.started(slots=1)
    event = {"topic": out, "value": 1}
    async with Member(stage, source).joined() as member:
        stale = member.offsets(5)
        assert (await settle(stage, service.url, "before", [event], stale)).status_code == 201
        async with Member(stage, source, member.group).joined():  # the group has another generation now
            for key, offsets in (
                ("stale", member.offsets(9, generation=stale["generation"])),
                ("gone", member.offsets(9, member="nobody")),
                ("no group", member.offsets(9, group=f"none-{uuid.uuid4().hex}")),
            ):
                answer = await settle(stage, service.url, key, [event], offsets)
                assert (answer.status_code, answer.json()["code"]) == (409, "stale-member"), answer.text
            assert await member.committed() == 5
            missing = member.offsets(9)
            missing["positions"].append({"topic": source, "partition": 2, "offset": 0})
            answer = await settle(stage, service.url, "stale", [event], missing)
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown-topic")
        assert await values_in(stage, out) == [b"1"]
        async with asyncio.timeout(30):
            while True:  # until the member that is left knows its generation
                written = await settle(stage, service.url, "stale", [event], member.offsets(9))  # its key was not used
                if written.status_code != 409:
                    break
                await asyncio.sleep(0.1)
        assert (written.status_code, "idempotent-replayed" in written.headers) == (201, False), written.text
        assert await member.committed() == 9
    assert await values_in(stage, out) == [b"1", b"1"]


async def test_a_process_that_is_killed_leaves_offsets_and_events_together(stage: Stage, make_topic: MakeTopic) -> None:
    """Killed at each point of a write: the group is where the topic is, before and after another process goes on."""
    source, out = make_topic(1), make_topic(1)
    other = await stage.started(slots=1)
    async with Member(stage, source).joined() as member:
        for number, place in enumerate(PLACES, 1):
            doomed = await stage.started(faults=(Fault(place, "kill"),), slots=1)
            events, offsets = [{"topic": out, "value": number}], member.offsets(number)
            with contextlib.suppress(httpx.TransportError):
                await post(stage, doomed.url, place, events, offsets)
            assert doomed.wait(5) == -9
            is_committed = place in ("commit.done", "mark.done")
            at = await member.committed()
            assert len(await values_in(stage, out)) == at == (number if is_committed else number - 1)
            answer = await settle(stage, other.url, place, events, offsets)
            assert answer.status_code == 201, answer.text
            assert ("idempotent-replayed" in answer.headers) is is_committed
            assert await member.committed() == number
    assert await values_in(stage, out) == [b"%d" % number for number in range(1, len(PLACES) + 1)]
