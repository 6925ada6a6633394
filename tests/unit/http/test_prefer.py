"""Tests the preferences of a request (RFC 7240), also malformed ones."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from service.claims.keys import StoreGeneration
from service.claims.states import Claim, Claimed, Delivered
from service.core.problems import FINGERPRINT_MISMATCH, IN_PROGRESS
from service.http.prefer import NO_PREFERENCE, Preference, parse_prefer
from service.pipeline import waiters
from service.pipeline.request import Committed, WriteResult
from service.slots.slot import Slot
from tests.unit.fakes import NOW_MS, World, ended, grows_in_proportion, kind_of, make_event, until

WAIT_3 = Preference(3, False, b"preference-applied: wait=3\r\n")
ASYNC = Preference(0, True, b"")


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (None, NO_PREFERENCE),
        ("wait=3", WAIT_3),
        ("Wait = 3", WAIT_3),
        ('wait="3"', WAIT_3),
        ("wait=3, wait=9", WAIT_3),
        ('handling=lenient; foo="a", wait=3;x=y', WAIT_3),
        ("respond-async", ASYNC),
        ("return=minimal,respond-async", ASYNC),
        ("respond-async, wait=3", WAIT_3._replace(respond_async=True)),
        ("", NO_PREFERENCE),
        (",,=,;", NO_PREFERENCE),
        ("wait", NO_PREFERENCE),
        ("wait=", NO_PREFERENCE),
        ("wait=-1", NO_PREFERENCE),
        ("wait=soon", NO_PREFERENCE),
        ("wait=0", NO_PREFERENCE),
        ("wait=99999999999", NO_PREFERENCE),
        ("no-wait=3", NO_PREFERENCE),
    ],
)
def test_preferences(raw: str | None, wanted: Preference) -> None:
    assert parse_prefer(raw) == wanted


@pytest.mark.parametrize("piece", ["a", " ", ",", ", ", ",a", ",a=", ',a="', '"', "=", ";", ";a", "-"])
def test_preferences_of_any_length_are_read_at_once(piece: str) -> None:
    """In linear time: a head may have 64 KiB."""
    assert grows_in_proportion(lambda chars: parse_prefer(f",{piece * (chars // len(piece))},"))


@dataclass
class HeldWrite:
    """The write of the event "a" by one slot, held until `gate` is set. `others` serves another slot, `second`."""

    world: World
    gate: asyncio.Event
    result: "asyncio.Task[WriteResult]"
    second: Slot
    others: "asyncio.Task[None]"


@pytest.fixture
async def held() -> AsyncIterator[HeldWrite]:
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    gate = world.producers[0].trouble.hold("write")
    serving = world.serve(first)
    result = world.submit("a")
    await world.producers[0].trouble.reached["write"].wait()
    held = HeldWrite(world, gate, result, second, world.serve(second))
    yield held
    for task in (serving, held.others):
        await ended(task)


async def test_a_request_that_waits_gets_the_result_of_another_s_write(held: HeldWrite) -> None:
    world = held.world
    assert kind_of(await world.submit("a")) is IN_PROGRESS
    waits = world.admission.submit(make_event("a"), asyncio.get_running_loop().time(), wait_s=3)
    await asyncio.sleep(0.12)
    assert not waits.done()
    held.gate.set()
    written = await held.result
    assert isinstance(written, Committed)
    assert await waits == replace(written, replayed=True)


async def test_a_wait_ends_at_its_time(held: HeldWrite) -> None:
    world = held.world
    began = asyncio.get_running_loop().time()
    waits = world.admission.submit(make_event("a"), began, wait_s=0.2)
    answer = await waits
    assert kind_of(answer) is IN_PROGRESS
    assert asyncio.get_running_loop().time() - began >= 0.2


async def test_requests_that_wait_for_the_same_key_share_its_repeated_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are answered soon after the write, also a request for another event."""
    world = World()
    serving = world.serve(await world.slot())
    keys, event = world.keys.server.keys, make_event("a")
    keys[event.id] = Claimed(5, 50, NOW_MS, event.fp)  # by another process
    world.keys.server.freed[5] = 50
    claims: list[bytes] = []
    claim = world.keys.claim

    async def counted(
        generation: StoreGeneration, slot: int, term: int, asked: Sequence[tuple[bytes, bytes]], ttls_s: Sequence[int]
    ) -> list[Claim]:
        claims.extend(id for id, _ in asked)
        return await claim(generation, slot, term, asked, ttls_s)

    monkeypatch.setattr(world.keys, "claim", counted)
    await world.topic_metadata.get("orders", asyncio.get_running_loop().time())
    asked = [make_event("a", value=b"2" if n == 7 else b"1") for n in range(50)]
    waits = [world.admission.submit(each, asyncio.get_running_loop().time(), wait_s=4) for each in asked]
    await asyncio.sleep(0.7)
    assert len(claims) <= 50 + 4
    delivered = keys[event.id] = Delivered(NOW_MS, event.fp, "orders", 0, 3, NOW_MS)
    async with asyncio.timeout(3):
        answers = [await each for each in waits]
    assert kind_of(answers.pop(7)) is FINGERPRINT_MISMATCH
    assert answers == [Committed(NOW_MS, ((event.id, delivered),), replayed=True)] * 49
    assert len(claims) <= 50 + 6 + 50
    assert not world.writer.unwritten.waiters
    await ended(serving)


async def test_a_wait_for_a_write_of_this_process_ends_as_soon_as_it_is_written(
    held: HeldWrite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "PAUSE_LEAST_S", 60.0)
    world = held.world
    waits = world.admission.submit(make_event("a"), asyncio.get_running_loop().time(), wait_s=4)
    await until(lambda: len(world.writer.unwritten.waiters) == 1)
    held.gate.set()
    written = await held.result
    assert isinstance(written, Committed)
    async with asyncio.timeout(3):
        assert await waits == replace(written, replayed=True)


async def test_a_waiting_request_claims_the_key_when_the_one_that_claimed_has_gone(held: HeldWrite) -> None:
    """The first request's wait ends while its claim is in flight, and no slot takes it."""
    world = held.world
    arrived = asyncio.get_running_loop().time()
    short, long = (world.admission.submit(make_event("a"), arrived, wait_s=wait_s) for wait_s in (0.1, 4))
    await until(lambda: len(world.writer.unwritten.waiters) == 1)
    await ended(held.others)
    assert kind_of(await short) is IN_PROGRESS
    held.others = world.serve(held.second)
    held.gate.set()
    written = await held.result
    assert isinstance(written, Committed)
    async with asyncio.timeout(3):
        assert await long == replace(written, replayed=True)
    await until(lambda: not world.writer.unwritten.waiters)


async def test_a_request_that_prefers_not_to_wait_is_accepted_once_its_key_is_claimed() -> None:
    world = World()
    slot = await world.slot()
    accepted = asyncio.get_running_loop().create_future()
    arrived = asyncio.get_running_loop().time()
    await world.checks.check(make_event("a"), arrived)
    result = world.admission.submit(make_event("a"), arrived, on_claim=accepted)
    assert not accepted.done()
    gate = world.producers[0].trouble.hold("write")
    serving = world.serve(slot)
    await accepted
    assert world.keys.is_claimed("a")
    assert not result.done()
    gate.set()
    answer = await result
    assert isinstance(answer, Committed)
    assert world.journal.answers == [("a", 202), ("a", 201)]
    # A committed event is answered as usual.
    accepted = asyncio.get_running_loop().create_future()
    arrived = asyncio.get_running_loop().time()
    again = await world.admission.submit(make_event("a"), arrived, on_claim=accepted)
    assert again == replace(answer, replayed=True)
    assert not accepted.done()
    await ended(serving)
