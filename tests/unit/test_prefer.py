"""Preferences of a request (RFC 7240): what is asked for, and that nonsense asks for nothing."""

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from service.errors import IN_PROGRESS
from service.prefer import NONE, Preference, parse_prefer
from service.request import Answers, Committed
from tests.unit.fakes import World, ended, grows_in_proportion, kind_of, make_event, until

WAIT_3 = Preference(3, False, b"preference-applied: wait=3\r\n")
ASYNC = Preference(0, True, b"")


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (None, NONE),
        ("wait=3", WAIT_3),
        ("Wait = 3", WAIT_3),
        ('wait="3"', WAIT_3),
        ("wait=3, wait=9", WAIT_3),
        ('handling=lenient; foo="a", wait=3;x=y', WAIT_3),
        ("respond-async", ASYNC),
        ("return=minimal,respond-async", ASYNC),
        ("respond-async, wait=3", WAIT_3._replace(respond_async=True)),
        ("", NONE),
        (",,=,;", NONE),
        ("wait", NONE),
        ("wait=", NONE),
        ("wait=-1", NONE),
        ("wait=soon", NONE),
        ("wait=0", NONE),
        ("wait=99999999999", NONE),
        ("no-wait=3", NONE),
    ],
)
def test_preferences(raw: str | None, wanted: Preference) -> None:
    assert parse_prefer(raw) == wanted


@pytest.mark.parametrize("piece", ["a", " ", ",", ", ", ",a", ",a=", ',a="', '"', "=", ";", ";a", "-"])
def test_preferences_of_any_length_are_read_at_once(piece: str) -> None:
    """A head may have 64 KiB: what grows with its square would hold up everybody else for a minute."""
    assert grows_in_proportion(lambda chars: parse_prefer(f",{piece * (chars // len(piece))},"))


async def test_who_is_patient_hears_how_another_s_write_ended() -> None:
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    gate = world.producers[0].trouble.hold("write")
    serving = world.serve(first)
    writes = world.submit("a")
    await world.producers[0].trouble.reached["write"].wait()
    others = world.serve(second)
    assert kind_of(await world.submit("a")) is IN_PROGRESS
    waits = Answers(1)
    world.intake.submit(make_event("a"), asyncio.get_running_loop().time(), partial(waits.put, 0), wait_s=3)
    await asyncio.sleep(0.12)
    assert not waits.all.done()
    gate.set()
    written = await writes
    assert isinstance(written, Committed)
    assert (await waits.all) == [replace(written, replayed=True)]
    for task in (serving, others):
        await ended(task)


async def test_patience_has_an_end() -> None:
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    world.producers[0].trouble.hold("write")
    serving = world.serve(first)
    world.submit("a")
    await world.producers[0].trouble.reached["write"].wait()
    others = world.serve(second)
    waits = Answers(1)
    began = asyncio.get_running_loop().time()
    world.intake.submit(make_event("a"), began, partial(waits.put, 0), wait_s=0.2)
    (answer,) = await waits.all
    assert kind_of(answer) is IN_PROGRESS
    assert asyncio.get_running_loop().time() - began >= 0.2
    for task in (serving, others):
        await ended(task)


async def test_who_would_rather_not_wait_is_told_once_its_claim_stands() -> None:
    world = World()
    slot = await world.slot()
    told: list[str] = []
    answers = Answers(1)

    def accepted() -> None:
        assert world.keys.is_claimed("a")
        told.append("accepted")

    arrived = asyncio.get_running_loop().time()
    await world.intake.check(make_event("a"), arrived)
    world.intake.submit(make_event("a"), arrived, partial(answers.put, 0), accepted=accepted)
    assert not told
    gate = world.producers[0].trouble.hold("write")
    serving = world.serve(slot)
    await until(lambda: bool(told))
    assert not answers.all.done()
    gate.set()
    (answer,) = await answers.all
    assert isinstance(answer, Committed)
    assert world.journal.answers == [("a", 202), ("a", 201)]
    # What is there already is told as it is.
    again = Answers(1)
    arrived = asyncio.get_running_loop().time()
    world.intake.submit(make_event("a"), arrived, partial(again.put, 0), accepted=accepted)
    assert (await again.all) == [replace(answer, replayed=True)]
    assert told == ["accepted"]
    await ended(serving)
