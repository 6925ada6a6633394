"""Tests `POST /events/batch`: independent events in order, and atomic batches."""

import asyncio
import contextlib
import json
from typing import Any

import httpx

from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import batch_fingerprint, event_id, fingerprint, member_id
from tests.conftest import MakeTopic
from tests.integration.conftest import Stage, plan_of
from tests.integration.judge import Delivered, ledger_faults, read_committed
from tests.integration.plan import Fault, until

JSON = {"Content-Type": "application/json"}


async def post_batch(stage: Stage, url: str, body: object, key: str | None = None) -> httpx.Response:
    headers = JSON if key is None else {**JSON, "Idempotency-Key": key}
    return await stage.client.http.post(f"{url}/events/batch", content=json.dumps(body), headers=headers)


def member(topic: str, key: str, /, **fields: object) -> dict[str, object]:
    return {"topic": topic, "value": key, "idempotency_key": key, **fields}


async def settle_atomic(stage: Stage, url: str, events: list[dict[str, Any]], key: str) -> httpx.Response:
    """Send an atomic batch again until it is answered 201."""
    async with asyncio.timeout(30):
        while True:
            try:
                answer = await post_batch(stage, url, {"atomic": True, "events": events}, key)
            except httpx.TransportError:
                continue
            if answer.status_code == 201:
                return answer
            assert answer.status_code in (409, 503, 504), answer.text
            await asyncio.sleep(0.05)


def members_at(records: list[Delivered], key: str, count: int) -> list[int]:
    """Count the records of each member of an atomic batch."""
    ids = [Stamp.decode(dict(record.headers)[STAMP_HEADER]).id for record in records]
    return [ids.count(member_id(key, index)) for index in range(count)]


# ------------------------------------------------------------------------------------------------ each for itself


async def test_results_come_in_order_and_a_bad_event_fails_alone(stage: Stage, topic: str) -> None:
    service = await stage.started()
    batch = {
        "events": [
            member(topic, "first"),
            {"topic": topic, "value": 1},
            member("not-there", "second"),
            {**member(topic, "third"), "colour": "red"},
            member(topic, "fourth", headers={"fencepost": "x"}),
            member(topic, "first"),
            member(topic, "first", partition=1),
            member(topic, "fifth", value=None),
        ]
    }
    answer = await post_batch(stage, service.url, batch)
    results = answer.json()["results"]

    assert answer.status_code == 207
    assert [result["status"] for result in results] == [201, 400, 404, 400, 400, 201, 422, 400]
    assert [result["problem"]["code"] for result in results if "problem" in result] == [
        "missing-key",
        "unknown-topic",
        "invalid-event",
        "invalid-event",
        "fingerprint-mismatch",
        "invalid-event",
    ]
    first, again = results[0], results[5]
    assert (first["replayed"], again["replayed"]) == (False, True)
    assert {**first, "replayed": True} == again
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert [record.place for record in records] == [(first["topic"], first["partition"], first["offset"])]


async def test_a_batch_keeps_its_order_for_each_record_key(stage: Stage, topic: str) -> None:
    """Also a batch of more than one transaction, beside other traffic, over all slots of the process."""
    service = await stage.started(slots=4)
    events = [member(topic, f"k{number}", value=number, key=f"r{number % 7}") for number in range(4000)]

    async def others() -> None:
        for number in range(40):
            await post_batch(stage, service.url, {"events": [member(topic, f"o{number}", key="other")]})

    answer, _ = await asyncio.gather(post_batch(stage, service.url, {"events": events}), others())
    assert {result["status"] for result in answer.json()["results"]} == {201}

    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    for record_key in {f"r{number}".encode() for number in range(7)}:
        values = [int(record.value or b"") for record in sorted(records, key=by_place) if record.key == record_key]
        assert values == sorted(values)
        assert len(values) > 500
    assert len(records) == 4040


def by_place(record: Delivered) -> tuple[str, int, int]:
    return record.place


async def test_an_invalid_batch_is_refused_and_its_bound_is_named(stage: Stage, topic: str) -> None:
    service = await stage.started(body_bytes_max=2_000_000)
    refused = {
        400: [{"events": []}, {"events": 1}, {}, {"events": [1], "order": "any"}, {"atomic": "yes", "events": [{}]}],
        413: [{"events": [0] * 10_001}, {"events": [member(topic, "k", value="x" * 2_100_000)]}],
    }
    for status, bodies in refused.items():
        for body in bodies:
            answer = await post_batch(stage, service.url, body)
            assert answer.status_code == status, body
    assert "10000" in (await post_batch(stage, service.url, {"events": [0] * 10_001})).json()["detail"]


# -------------------------------------------------------------------------------------------------- all or none


async def test_an_atomic_batch_has_the_same_answer_from_every_process_and_from_the_ledger(
    own_stage: Stage, make_topic: MakeTopic
) -> None:
    stage = own_stage
    topics = [make_topic(2), make_topic(3)]
    one, two = stage.service(), stage.service()
    await stage.start(one, two)
    events = [{"topic": topics[number % 2], "value": number, "key": f"r{number}"} for number in range(9)]
    first = await settle_atomic(stage, one.url, events, "the whole")

    body = first.json()
    assert body["id"] == event_id("the whole").hex()
    assert [result["id"] for result in body["results"]] == [member_id("the whole", i).hex() for i in range(9)]
    assert first.headers["location"] == "/events/the%20whole"
    again = await post_batch(stage, two.url, {"atomic": True, "events": events}, "the whole")
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")

    stage.redis.flush()
    after = await settle_atomic(stage, two.url, events, "the whole")
    assert (after.content, after.headers["idempotent-replayed"]) == (first.content, "true")
    for other in (events[:8], [*events, events[0]], [*events[1:], events[0]]):
        answer = await post_batch(stage, one.url, {"atomic": True, "events": other}, "the whole")
        assert (answer.status_code, answer.json().get("code")) in ((422, "fingerprint-mismatch"), (503, "not-written"))

    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, topics)
    assert members_at(records, "the whole", 9) == [1] * 9
    assert len(records) == 9
    assert await asyncio.to_thread(ledger_faults, stage.kafka.bootstrap, stage.namespace, topics) == []


async def test_an_atomic_batch_survives_crashes_whole(stage: Stage, make_topic: MakeTopic) -> None:
    """Killed at each point of a write and sent again to another process, every member is there once."""
    topics = [make_topic(1), make_topic(1)]
    other = await stage.started(slots=1)
    events = [{"topic": topics[number % 2], "value": number} for number in range(4)]
    for place in ("write", "ledger", "commit", "commit.done", "mark.done"):
        doomed = await stage.started(faults=(Fault(place, "kill"),), slots=1)
        with contextlib.suppress(httpx.TransportError):
            await post_batch(stage, doomed.url, {"atomic": True, "events": events}, place)
        assert doomed.wait(5) == -9
        answer = await settle_atomic(stage, other.url, events, place)
        assert ("idempotent-replayed" in answer.headers) is (place in ("commit.done", "mark.done")), place
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, topics)
    for place in ("write", "ledger", "commit", "commit.done", "mark.done"):
        assert members_at(records, place, 4) == [1] * 4
    assert len(records) == 20


async def test_a_part_of_an_atomic_batch_is_in_progress_while_the_batch_is_written(stage: Stage, topic: str) -> None:
    service = await stage.started(faults=(Fault("commit", "hold"),), slots=2)
    events = [{"topic": topic, "value": number} for number in range(3)]
    writing = asyncio.create_task(post_batch(stage, service.url, {"atomic": True, "events": events}, "whole"))
    await asyncio.to_thread(until, lambda: plan_of(service).happened("commit"))

    second = await post_batch(stage, service.url, {"atomic": True, "events": events[:2]}, "whole")
    assert (second.status_code, second.json()["code"]) == (409, "in-progress")
    assert (await stage.client.http.get(f"{service.url}/events/whole")).json()["state"] == "in_progress"
    plan_of(service).let_go("commit")
    assert (await writing).status_code == 201
    assert (await stage.client.http.get(f"{service.url}/events/whole")).json()["members"] == 3


async def test_an_atomic_batch_that_is_refused_leaves_its_key_free(stage: Stage, make_topic: MakeTopic) -> None:
    topic, small = make_topic(1), make_topic(1, {"max.message.bytes": "2000"})
    service = await stage.started()
    good = {"topic": topic, "value": 1}
    refused: list[tuple[int, str, list[dict[str, object]]]] = [
        (400, "events[1].idempotency_key", [good, {**good, "idempotency_key": "own"}]),
        (404, "events[1].topic", [good, {"topic": "not-there", "value": 1}]),
        (413, "events[1].value", [good, {"topic": small, "value": "x" * 3000}]),
        (413, "one transaction holds", [good] * 5000),
    ]
    for status, where, events in refused:
        answer = await post_batch(stage, service.url, {"atomic": True, "events": events}, "the key")
        assert (answer.status_code, where in answer.json()["detail"]) == (status, True), answer.text
    missing = await post_batch(stage, service.url, {"atomic": True, "events": [good]})
    assert (missing.status_code, missing.json()["code"]) == (400, "missing-key")
    answer = await post_batch(stage, service.url, {"atomic": True, "events": [good, good]}, "the key")
    assert answer.status_code == 201
    assert "idempotent-replayed" not in answer.headers


def test_the_fingerprint_of_a_batch_depends_on_its_members_and_their_order() -> None:
    prints = [fingerprint("t", None, None, [], value) for value in (b"1", b"2")]
    assert batch_fingerprint(prints) != batch_fingerprint(reversed(prints))
    assert batch_fingerprint(prints[:1]) != batch_fingerprint(prints)
