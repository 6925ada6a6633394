"""Tests the client with a spool: what a later call or run sends again, and what they report."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.fencepost.client import (
    AsyncClient,
    Client,
    Event,
    KeyExpired,
    KeyReused,
    Refused,
    Spool,
    SpoolError,
    SpoolFull,
    Unsettled,
    Written,
)
from service.fencepost.client.events import Pending
from tests.unit.fencepost.clients import URL, Threads, raised, transport
from tests.unit.fencepost.fakes import CUT, EXPIRED, LOST, RETENTION_S, UNKNOWN_NAME, FakeService, FakeTime


def test_what_a_deadline_has_left_is_sent_by_the_next_run_under_its_key(
    kind: Any, clock: FakeTime, tmp_path: Path
) -> None:
    spool = tmp_path / "s"
    fake = FakeService([CUT, LOST])
    events = [Event("t", n) for n in range(3)]
    assert [type(each) for each in kind(fake, spool=spool, deadline_s=0.15).send_many(*events)] == [Unsettled] * 3
    assert fake.written == [0, 1, 2]
    with pytest.raises(SpoolError, match=r"3 events of an earlier run are open: iterate over resume\(\) first"):
        kind(fake, spool=spool).send(Event("t", 3))
    results = kind(fake, spool=spool).resume()
    assert [(each.idempotency_key, each.replayed) for each in results] == [
        (each.idempotency_key, True) for each in events
    ]
    assert fake.written == [0, 1, 2]
    assert kind(fake, spool=spool).resume() == []
    assert kind(fake, spool=spool).send(Event("t", 3)).offset == 3


def test_a_spool_that_is_older_than_its_keys_is_told_and_not_written_again(
    kind: Any, clock: FakeTime, tmp_path: Path
) -> None:
    old = [Event("t", n, idempotency_key=f"{n}" if n else EXPIRED) for n in range(3)] + [Event(UNKNOWN_NAME, 3)]
    kind(FakeService([LOST] * 9), spool=tmp_path / "s", deadline_s=0.1).send_many(*old)
    fake = FakeService()
    first, *others, last = kind(fake, spool=tmp_path / "s").resume()
    assert [type(each) for each in others] == [Written] * 2
    assert (type(last), last.may_be_written) == (Refused, True)  # an attempt of the earlier run may have written it
    assert (type(first), first.may_be_written, first.body) == (KeyExpired, True, old[0].encode())
    assert fake.written == [1, 2]
    assert kind(fake, spool=tmp_path / "s").resume() == []  # it was reported before


def test_a_result_of_resume_that_was_not_taken_comes_again(clock: FakeTime, tmp_path: Path) -> None:
    Threads(FakeService([LOST] * 9), spool=tmp_path / "s", deadline_s=0.1).send_many(Event("t", 1), Event("t", 2))
    fake = FakeService()
    with Client(URL, transport=transport(fake), spool=tmp_path / "s") as client:
        taken = next(iter(client.resume()))
        assert isinstance(taken, Written)
        with pytest.raises(SpoolError, match="iterate over resume"):
            client.send(Event("t", 3))
    again = Threads(fake, spool=tmp_path / "s").resume()
    assert again[0].idempotency_key == taken.idempotency_key
    assert fake.written == [1, 2]


async def test_a_result_of_resume_that_was_not_taken_comes_again_to_asyncio_too(
    clock: FakeTime, tmp_path: Path
) -> None:
    fake = FakeService([LOST] * 9)
    async with AsyncClient(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        await client.send_many([Event("t", 1), Event("t", 2)])
    fake.faults = iter(())
    taken = list[str]()
    for _ in range(2):
        async with AsyncClient(URL, transport=transport(fake), spool=tmp_path / "s") as client:
            async for result in client.resume():
                taken.append(result.idempotency_key)
                break
    assert taken[0] == taken[1]
    assert fake.written == [1]


def test_resume_ends_behind_an_open_event_and_the_client_may_go_on(clock: FakeTime, tmp_path: Path) -> None:
    lost = [Event("t", n) for n in range(5)]
    Threads(FakeService([LOST] * 9), spool=tmp_path / "s", deadline_s=0.1).send_many(*lost)
    fake = FakeService(["ok", LOST, LOST])
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        assert [type(each) for each in client.resume()] == [Written, Unsettled]
        assert client.send(Event("t", "new")).offset == 1
        assert [type(each) for each in client.resume()] == [Written] * 4
    assert fake.copies == Counter({json.dumps("new"): 1, **{f"{n}": 1 for n in range(5)}})


def test_a_key_of_any_form_that_is_older_than_its_retention_is_told(kind: Any, clock: FakeTime, tmp_path: Path) -> None:
    """The spool tells when it has stored the event, because a key such as an order's number does not."""
    fake = FakeService(clock=clock)
    orders = [Event("t", n, idempotency_key=f"order-{n}") for n in range(3)]
    fake.faults = iter([CUT])
    kind(fake, spool=tmp_path / "s", deadline_s=0.01).send_many(orders[0])
    clock.now += RETENTION_S - 1_000
    with Spool(tmp_path / "s") as spool:
        spool.add([Pending(order.idempotency_key, order.encode()) for order in orders[1:]])
    del fake.places["order-0"]  # forgotten
    clock.now += 2_000
    results = kind(fake, spool=tmp_path / "s").resume()
    assert [type(each) for each in results] == [KeyExpired, Written, Written]
    assert fake.written == [0, 1, 2]


def test_a_stored_key_that_cannot_be_sent_is_refused_and_resume_goes_on(
    kind: Any, clock: FakeTime, tmp_path: Path
) -> None:
    """A spool of a program that has stored such keys."""
    keys = ["commande-é", "order-1", "a\nb", "order-2"]
    with Spool(tmp_path / "s") as spool:
        spool.add([Pending(key, Event("t", n).encode()) for n, key in enumerate(keys)])
    fake = FakeService()
    results = kind(fake, spool=tmp_path / "s").resume()
    assert [type(each) for each in results] == [Refused, Written, Refused, Written]
    assert [each.idempotency_key for each in results] == keys
    assert (results[0].status, results[0].code, results[0].may_be_written) == (0, "invalid-key", False)
    assert fake.written == [1, 3]
    assert clock.pauses == []
    assert kind(fake, spool=tmp_path / "s").send(Event("t", 4)).offset == 2  # and the client sends again


@pytest.mark.parametrize("remedied", [True, False])
def test_a_disk_that_is_full_at_the_end_of_a_call_takes_no_result(
    kind: Any,
    clock: FakeTime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    remedied: bool,
) -> None:
    def full(*_: object) -> None:
        raise SpoolFull("s: no room for more events")

    fake = FakeService()
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "close_events", full)
        results = kind(fake, spool=tmp_path / "s").send_many(Event("t", 1), Event("t", 2), Event(UNKNOWN_NAME, 3))
        assert [type(each) for each in results] == [Written, Written, Refused]
        assert "3 settled events stay in the spool, and resume() sends them again: s: no room" in caplog.text
        if not remedied:
            assert [type(each) for each in kind(fake, spool=tmp_path / "s").resume()] == [Written, Written, Refused]
    again = kind(fake, spool=tmp_path / "s").resume()
    assert [getattr(each, "replayed", None) for each in again] == [True, True, None]
    assert fake.written == [1, 2]
    assert kind(fake, spool=tmp_path / "s").resume() == []


def test_another_event_under_an_open_key_is_not_sent(clock: FakeTime, tmp_path: Path) -> None:
    first, other = (Event("t", n, idempotency_key="order-1") for n in range(2))
    fake = FakeService([LOST, LOST])
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        with pytest.raises(Unsettled):
            client.send(first)
        sent = len(fake.requests)
        with pytest.raises(SpoolError, match="idempotency_key 'order-1': another event is open under it"):
            client.send_many([Event("t", 2), other])
        assert len(fake.requests) == sent
        fake.faults = iter(())
        assert [type(each) for each in client.resume()] == [Written]
        with pytest.raises(KeyReused):
            client.send(other)
    assert fake.written == [0]


def test_the_same_object_sent_again_tells_its_age(clock: FakeTime, tmp_path: Path) -> None:
    fake = FakeService([CUT, CUT], clock=clock)
    order = Event("t", 0, idempotency_key="order-1")
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        with pytest.raises(Unsettled):
            client.send(order)
        fake.faults = iter(())
        fake.places.clear()  # forgotten
        clock.now += RETENTION_S + 3_600
        first, expired, *last = client.send_many([Event("t", 1), order, Event("t", 2), Event("t", 3)])
        assert (type(first), type(expired)) == (Written, KeyExpired)
        assert raised(expired).may_be_written
        assert [type(each) for each in last] == [Written] * 2
        assert [type(each) for each in client.resume()] == []  # it was reported before
    assert fake.written == [0, 1, 2, 3]
    assert [request.url.path for request in fake.requests[-3:]] == ["/events", "/events", "/events/batch"]


def test_an_open_event_that_is_sent_again_and_refused_may_have_been_written(clock: FakeTime, tmp_path: Path) -> None:
    fake = FakeService([CUT, CUT], clock=clock)
    event = Event(UNKNOWN_NAME, 0)
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        with pytest.raises(Unsettled):
            client.send(event)
        fake.faults = iter(())
        with pytest.raises(Refused) as caught:
            client.send(event)
    assert caught.value.may_be_written


async def test_a_cancelled_call_leaves_its_event_in_the_spool(clock: FakeTime, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        begun.set()
        await asyncio.Future[None]()
        raise AssertionError

    fake = FakeService()
    async with AsyncClient(URL, transport=httpx.MockTransport(hang), spool=tmp_path / "s") as client:
        sending = asyncio.create_task(client.send(Event("t", 1)))
        await begun.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    async with AsyncClient(URL, transport=transport(fake), spool=tmp_path / "s") as client:
        assert [type(each) async for each in client.resume()] == [Written]
    assert fake.written == [1]
