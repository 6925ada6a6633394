"""Tests how a batch is cut into chunks, and the result of each of its events."""

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from service import native
from service.contract import CallerRule
from service.contract.wire.ids import event_id, member_id
from service.core.problems import (
    FORBIDDEN_GROUP,
    FORBIDDEN_TOPIC,
    IN_PROGRESS,
    INVALID_EVENT,
    INVALID_JSON,
    INVALID_KEY,
    KEY_EXPIRED,
    MISSING_KEY,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RECORD_REFUSED,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX
from service.events import cloudevents
from service.events.event import BATCH_EVENTS_MAX, ENTRY_BYTES, Event
from service.http import batch as module
from service.http.batch import (
    BatchBody,
    member_of,
    parse_batch,
    parse_long_batch,
    write_atomic,
    write_each,
)
from service.http.caller import Caller
from service.http.lines import Lines, line_of
from service.kafka import topics
from service.kafka.topic_admin import Topic
from service.pipeline.request import CHUNK_EVENTS_MAX, BatchChunk, Committed, WriteResult, fit
from tests.unit.fakes import FakeProducer, Turns, World, ended, kind_of, make_event, until

TRACE = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"


def chunks_of(*events: Event) -> list[BatchChunk]:
    chunks = [BatchChunk()]
    for event in events:
        if not chunks[-1].add(event):
            chunks.append(BatchChunk())
            assert chunks[-1].add(event)
    return chunks


def cut(*events: Event) -> list[list[str]]:
    return [[event.key for event in chunk.events] for chunk in chunks_of(*events)]


def batch_of(*events: dict[str, Any], atomic: bool = False) -> BatchBody:
    return parse_batch(json.dumps({"atomic": atomic, "events": events}).encode())


def one(key: str | None, value: Any = 1, topic: str = "orders") -> dict[str, Any]:
    event = {"topic": topic, "value": value}
    return event if key is None else event | {"idempotency_key": key}


def lines_of(body: bytes) -> list[Any]:
    lines = Lines()
    lines.feed(body)
    texts = list(iter(lines.next, None))
    lines.end()
    return texts + list(iter(lines.next, None))


async def written(world: World, batch: BatchBody) -> list[WriteResult]:
    """Write a batch through a slot, as a serving process does."""
    serving = world.serve(await world.slot())
    groups = write_each(world.admission, batch.events, member_of, asyncio.get_running_loop().time())
    answers = [answer async for some in groups for answer in some]
    await ended(serving)
    return answers


# ----------------------------------------------------------------------------------------------------------- chunks


def test_events_with_different_keys_share_a_chunk_in_their_order() -> None:
    assert cut(*(make_event(key) for key in "cab")) == [["c", "a", "b"]]


def test_a_key_that_repeats_begins_a_new_chunk() -> None:
    """The second claim of a key in one call would find the first."""
    assert cut(*(make_event(key) for key in "abacab")) == [["a", "b"], ["a", "c"], ["a", "b"]]
    assert cut(*(make_event("a") for _ in range(3))) == [["a"], ["a"], ["a"]]


def test_a_chunk_closes_at_the_bytes_of_one_transaction() -> None:
    third = GROUP_EVENT_BYTES_MAX // 3
    events = [make_event(key, value=b"x" * third) for key in "abcdefg"]
    assert cut(*events) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert all(fit(chunk.ledger_bytes, chunk.event_bytes) for chunk in chunks_of(*events))


def test_the_ledger_bounds_a_chunk_too() -> None:
    chunk = BatchChunk(ledger_bytes_max=3 * (ENTRY_BYTES + len("orders")))
    for key in "abc":
        assert chunk.add(make_event(key))
    assert not chunk.add(make_event("d"))
    assert [event.key for event in chunk.events] == ["a", "b", "c"]


def test_a_chunk_closes_at_a_number_of_events() -> None:
    chunks = cut(*(make_event(str(n)) for n in range(CHUNK_EVENTS_MAX + 1)))
    assert [len(chunk) for chunk in chunks] == [CHUNK_EVENTS_MAX, 1]


@pytest.mark.parametrize(("ledger", "events", "holds"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_a_transaction_fits_up_to_its_ledger_and_event_bytes(ledger: int, events: int, holds: bool) -> None:
    assert fit(GROUP_LEDGER_BYTES_MAX + ledger, GROUP_EVENT_BYTES_MAX + events) is holds


def test_an_event_that_fills_a_transaction_is_a_chunk_of_its_own() -> None:
    large = make_event("b", value=b"x" * GROUP_EVENT_BYTES_MAX)
    assert cut(make_event("a"), large, make_event("c")) == [["a"], ["b"], ["c"]]


# -------------------------------------------------------------------------------------------------- each for itself


async def test_the_answers_are_in_the_order_of_the_events() -> None:
    answers = await written(World(), batch_of(one("a"), one(None), one("c"), one("é")))
    assert [kind_of(answer) for answer in answers] == [None, MISSING_KEY, None, INVALID_KEY]
    first, _, third, _ = answers
    assert isinstance(first, Committed)
    assert isinstance(third, Committed)
    assert (first.deliveries[0][0], third.deliveries[0][0]) == (make_event("a").id, make_event("c").id)


async def test_events_that_their_topic_refuses_are_found_among_plain_ones() -> None:
    """Plain events of one topic are checked together, all others one by one."""
    world = World()
    world.topic_admin.topics["small"] = Topic("small", 3, {"max.message.bytes": "1000"})
    world.topic_admin.topics["compacted"] = Topic("compacted", 3, {"cleanup.policy": "compact"})
    events = [
        one("a", topic="small"),
        one("b", "x" * 800, topic="small"),
        one("c", topic="small") | {"partition": 3},
        one("d", topic="compacted"),
        one("e", topic="compacted") | {"key": "k"},
        one("f", topic="small"),
        one("g", topic="gone"),
    ]
    kinds = [kind_of(answer) for answer in await written(world, batch_of(*events))]
    assert kinds == [None, TOO_LARGE, INVALID_EVENT, RECORD_REFUSED, None, None, UNKNOWN_TOPIC]


async def test_a_batch_without_a_valid_event_submits_nothing() -> None:
    world = World()
    answers = await asyncio.wait_for(written(world, batch_of(one(None), one("é"))), 3.0)
    assert [kind_of(answer) for answer in answers] == [MISSING_KEY, INVALID_KEY]
    assert world.journal.answers == []


async def test_a_key_that_repeats_is_replayed_and_not_in_progress() -> None:
    world = World()
    first, other, again = await written(world, batch_of(one("a"), one("b"), one("a")))
    assert isinstance(first, Committed)
    assert again == replace(first, replayed=True)
    assert kind_of(other) is not IN_PROGRESS
    assert world.keys_written() == [["a", "b"]]


async def test_a_batch_that_the_queue_has_no_room_for_is_refused_as_a_whole() -> None:
    world = World(queue_events_max=2)
    waiting = world.submit("z")
    await asyncio.sleep(0)
    groups = write_each(
        world.admission, batch_of(one("a"), one("b")).events, member_of, asyncio.get_running_loop().time()
    )
    answers = [answer async for some in groups for answer in some]
    assert [kind_of(answer) for answer in answers] == [NOT_WRITTEN, NOT_WRITTEN]
    assert world.journal.answers == [("a", 503), ("b", 503)]
    waiting.cancel()


async def test_a_batch_larger_than_the_queue_comes_in_by_parts() -> None:
    """Refused as a whole it could never be admitted."""
    world = World(queue_events_max=2)
    answers = await written(world, batch_of(*map(one, "abcde")))
    assert [kind_of(answer) for answer in answers] == [None] * 5
    assert world.keys_written() == [["a", "b"], ["c", "d"], ["e"]]
    with pytest.raises(Problem, match="at most 2 may wait") as raised:
        await atomically(world, batch_of(*[one(None)] * 3, atomic=True))
    assert raised.value.kind is TOO_LARGE


async def test_a_bad_event_fails_alone_and_bad_json_fails_the_whole_batch() -> None:
    answers = await written(World(), batch_of({"topic": "orders", "nonsense": 1, "idempotency_key": "a"}, one("b")))
    assert [kind_of(answer) for answer in answers] == [INVALID_EVENT, None]
    with pytest.raises(Problem):
        parse_batch(b'{"events": [{"a": NaN}]}')
    with pytest.raises(Problem):
        parse_batch(b'{"events": []}')
    with pytest.raises(Problem) as raised:
        parse_batch(b'{"events": [' + b"1," * BATCH_EVENTS_MAX + b"1]}")
    assert raised.value.kind is TOO_LARGE


OFFSETS: dict[str, Any] = {
    "group": "g",
    "member": "m",
    "generation": 7,
    "positions": [{"topic": "orders", "partition": 1, "offset": 5}],
}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"events": [], "offsets": OFFSETS}, "offsets"),
        ({"events": [{}], "atomic": False, "offsets": OFFSETS}, "offsets"),
        ({"events": [], "atomic": True}, "events"),
        ({"atomic": True, "offsets": OFFSETS}, "events"),
    ],
)
async def test_only_an_atomic_batch_takes_offsets_and_without_them_it_has_events(body: object, detail: str) -> None:
    text = json.dumps(body).encode()
    with pytest.raises(Problem, match=detail) as refused:
        parse_batch(text)
    assert refused.value.kind.status == 400
    with pytest.raises(Problem, match=detail):
        await parse_long_batch(text)


async def test_an_atomic_batch_of_offsets_alone_is_written_for_a_group_of_its_caller() -> None:
    world = World()
    serving = world.serve(await world.slot())
    batch = parse_batch(json.dumps({"events": [], "atomic": True, "offsets": OFFSETS}).encode())
    assert not parse_batch(json.dumps({"atomic": True, "events": [1]}).encode()).offsets
    arrived = asyncio.get_running_loop().time()
    id, answer = await write_atomic(world.admission, batch, "k", arrived)
    assert (id, kind_of(answer)) == (event_id("k"), None)
    assert [each.group for each in world.producers[0].offsets] == ["g"]
    caller = Caller.of_rule(CallerRule("shop", ("00" * 32,), groups=("other",)))
    with pytest.raises(Problem) as refused:
        await write_atomic(world.admission, batch, "k", arrived, caller=caller)
    assert refused.value.kind is FORBIDDEN_GROUP
    await ended(serving)


async def test_answers_are_given_chunk_by_chunk_in_the_order_of_the_lines() -> None:
    world = World()
    serving = world.serve(await world.slot())
    lines = [json.dumps(event).encode() for event in (one("a"), one(None), one("b"), one("a"), one(None))]
    groups = write_each(world.admission, lines, line_of, asyncio.get_running_loop().time())
    assert [[kind_of(answer) for answer in some] async for some in groups] == [
        [None, MISSING_KEY, None],
        [None, MISSING_KEY],
    ]
    await ended(serving)


async def test_an_event_is_parsed_when_its_chunk_is_made_up() -> None:
    world = World()
    serving = world.serve(await world.slot())
    looked_at: list[bytes] = []

    def parse(line: bytes) -> Event:
        looked_at.append(line)
        return line_of(line)

    lines = [json.dumps(one(key)).encode() for key in "abacd"]
    groups = write_each(world.admission, lines, parse, asyncio.get_running_loop().time())
    seen = [(len(some), len(looked_at)) async for some in groups]
    assert seen == [(2, 3), (3, 5)]
    await ended(serving)


async def test_a_batch_for_a_topic_that_is_not_there_asks_two_brokers_for_it_once() -> None:
    world = World(request_timeout_ms=30_000)
    serving = world.serve(await world.slot())
    answers = await written(world, batch_of(*(one(str(n), topic="nowhere") for n in range(2_000))))
    assert {kind_of(answer) for answer in answers} == {UNKNOWN_TOPIC}
    assert len(world.topic_admin.asked) == 2
    await ended(serving)


async def test_a_batch_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its topic is looked up again meanwhile, and each chunk has a request's time."""
    monkeypatch.setattr(topics, "KNOWN_S", 0.1)
    world = World(request_timeout_ms=1_000)
    looking_up = world.topic_admin.describe

    async def slowly(names: Sequence[str]) -> dict[str, Topic]:
        await asyncio.sleep(0.01)
        return await looking_up(names)

    monkeypatch.setattr(world.topic_admin, "describe", slowly)
    writing = FakeProducer.send

    async def write(*arguments: Any) -> Any:
        await asyncio.sleep(0.03)
        return await writing(*arguments)

    monkeypatch.setattr(FakeProducer, "send", write)
    batch = batch_of(*(one(str(n // 2)) for n in range(80)))  # a repeated key begins a new chunk
    assert {kind_of(answer) for answer in await written(world, batch)} == {None}
    assert len(world.topic_admin.asked) > 1


@pytest.mark.parametrize("silent", ["Kafka", "Redis"])
async def test_the_look_ups_of_a_chunk_have_one_request_timeout_together(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each event would keep a batch, and its body, for hours."""
    world = World(request_timeout_ms=100)
    begun: list[object] = []

    async def silence(asked: object, **_: object) -> Any:
        begun.append(asked)
        await asyncio.sleep(60)

    if silent == "Kafka":
        monkeypatch.setattr(world.topic_admin, "describe", silence)
        events = [one(str(n), topic=f"topic-{n}") for n in range(50)]
    else:
        monkeypatch.setattr(world.store, "find", silence)
        events = [one(f"01890000-0000-7000-8000-0000000000{n}") for n in range(10, 60)]
    started = time.monotonic()
    answers = await written(world, batch_of(*events))
    assert {kind_of(answer) for answer in answers} == {NOT_WRITTEN}
    assert (len(answers), len(begun)) == (50, 1)
    assert time.monotonic() - started < 1.0


async def test_a_batch_in_which_many_events_fail_has_a_timeout_for_as_many_as_a_chunk_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis answers, only slowly: old keys that are forgotten fill no chunk."""
    monkeypatch.setattr(module, "CHUNK_EVENTS_MAX", 5)
    world = World(request_timeout_ms=200)
    find = world.store.find

    async def slowly(id: bytes) -> Any:
        await asyncio.sleep(0.02)
        return await find(id)

    monkeypatch.setattr(world.store, "find", slowly)
    keys = [f"01890000-0000-7000-8000-0000000000{n}" for n in range(10, 40)]
    assert {kind_of(answer) for answer in await written(world, batch_of(*map(one, keys)))} == {KEY_EXPIRED}


async def test_a_line_that_is_no_json_fails_alone() -> None:
    world = World()
    serving = world.serve(await world.slot())
    lines = lines_of(
        b'{"topic":"orders","value":1,"idempotency_key":"a"}\r\n\n  \n{"topic":\n{"a":NaN}\n7\n{"key":"\xff"}'
    )
    groups = write_each(world.admission, lines, line_of, asyncio.get_running_loop().time())
    answers = [answer async for some in groups for answer in some]
    assert [kind_of(answer) for answer in answers] == [None, INVALID_JSON, INVALID_JSON, INVALID_EVENT, INVALID_JSON]
    await ended(serving)


def test_an_event_of_a_batch_is_its_caller_s_and_of_the_request_s_trace() -> None:
    text = json.dumps(one("a")).encode()
    for event in (line_of(text, TRACE, "shop"), member_of(text, TRACE, "shop")):
        assert (event.id, event.traceparent) == (event_id("a", "shop"), TRACE)


# ------------------------------------------------------------------------------------------------------ all or none


async def atomically(world: World, batch: BatchBody, key: str = "whole") -> WriteResult:
    _, answer = await write_atomic(world.admission, batch, key, asyncio.get_running_loop().time())
    return answer


async def test_an_atomic_batch_is_written_in_one_group_and_replayed_as_one() -> None:
    world = World()
    serving = world.serve(await world.slot())
    batch = batch_of(one(None, 1), one(None, 2, "other"), atomic=True)
    first = await atomically(world, batch)
    assert isinstance(first, Committed)
    assert [delivered.topic for _, delivered in first.deliveries] == ["orders", "other"]
    assert await atomically(world, batch) == replace(first, replayed=True)
    assert world.keys_written() == [["whole", "whole"]]
    await ended(serving)


async def test_a_written_batch_is_answered_504_when_its_members_cannot_be_looked_up_in_time() -> None:
    """Also if its members cannot be looked up before the deadline."""
    world = World(request_timeout_ms=200)
    serving = world.serve(await world.slot())
    sweeping = asyncio.create_task(world.resolver.sweep())
    batch = batch_of(one(None, 1), one(None, 2), atomic=True)
    assert isinstance(await atomically(world, batch), Committed)
    gate = world.keys.trouble.hold("find_all")
    answer = await atomically(world, batch)
    assert isinstance(answer, Problem)
    assert answer.kind is OUTCOME_UNKNOWN
    gate.set()
    sweeping.cancel()
    await ended(serving)


async def test_a_member_with_a_key_of_its_own_is_refused_by_its_number() -> None:
    with pytest.raises(Problem) as raised:
        await atomically(World(), batch_of(one(None), one("a"), atomic=True))
    assert raised.value.kind is INVALID_EVENT
    assert raised.value.detail.startswith("events[1].")


async def test_an_atomic_batch_too_large_for_a_transaction_is_refused_before_its_key_is_claimed() -> None:
    world = World()
    with pytest.raises(Problem) as raised:
        await atomically(world, batch_of(*(one(None, "x" * 900_000) for _ in range(10)), atomic=True))
    assert raised.value.kind is TOO_LARGE
    assert not world.keys.server.keys


@pytest.mark.parametrize(
    "error", [StoreLost("flushed"), StoreAway("OOM"), StoreUnanswered("no answer"), None], ids=repr
)
async def test_a_written_batch_is_in_doubt_while_the_store_does_not_have_its_members(
    error: Exception | None,
) -> None:
    """Redis has no member or not every one (None): 504, and 201 for a retry when it has all."""
    world = World()
    slot = await world.slot()
    serving = world.serve(slot)
    batch = batch_of(one(None, 1), one(None, 2), atomic=True)
    first = await atomically(world, batch)
    assert isinstance(first, Committed)
    await until(lambda: not slot.has_pending_marks)
    (id, there), *_ = first.deliveries
    if error is not None:
        world.keys.trouble.before["find_all"].append(error)
    else:
        del world.keys.server.keys[id]
    answer = await asyncio.wait_for(atomically(world, batch), 3.0)
    assert kind_of(answer) is OUTCOME_UNKNOWN
    world.keys.server.keys[id] = there
    assert await atomically(world, batch) == replace(first, replayed=True)
    assert not serving.done()
    assert world.keys_written() == [["whole", "whole"]]
    await ended(serving)


async def test_a_batch_that_is_written_is_not_waited_for_where_no_store_is_settled() -> None:
    world = World(request_timeout_ms=100)
    slot = await world.slot()
    serving = world.serve(slot)
    batch = batch_of(one(None, 1), atomic=True)
    assert isinstance(await atomically(world, batch), Committed)
    await until(lambda: not slot.has_pending_marks)
    claimed = world.keys.trouble.hold("claim")
    again = asyncio.create_task(atomically(world, batch))
    await asyncio.sleep(0.01)
    world.store.generation = None  # it was lost since
    claimed.set()
    assert kind_of(await asyncio.wait_for(again, 1.0)) is OUTCOME_UNKNOWN
    await ended(serving)


async def test_an_atomic_batch_has_its_caller_s_scope_and_is_refused_for_a_forbidden_topic() -> None:
    world = World()
    shop = Caller.of_rule(CallerRule("shop", ("00" * 32,), ("orders",)))
    serving = world.serve(await world.slot())
    arrived = asyncio.get_running_loop().time()
    id, answer = await write_atomic(world.admission, batch_of(one(None, 1), atomic=True), "whole", arrived, TRACE, shop)
    assert isinstance(answer, Committed)
    assert (id, answer.deliveries[0][0]) == (event_id("whole", "shop"), member_id("whole", 0, "shop"))
    ((record,),) = world.producers[0].written
    assert dict(record.headers)["traceparent"] == TRACE
    with pytest.raises(Problem) as raised:
        await write_atomic(
            world.admission, batch_of(one(None, 1), one(None, 2, "other"), atomic=True), "more", arrived, TRACE, shop
        )
    assert raised.value.kind is FORBIDDEN_TOPIC
    assert raised.value.detail.startswith("events[1].topic: shop may not write to other")
    await ended(serving)


async def test_the_refusal_of_an_atomic_batch_names_the_member_with_the_unknown_topic() -> None:
    world = World()
    batch = batch_of(one(None, 1), one(None, 2, "nowhere"), atomic=True)
    with pytest.raises(Problem) as raised:
        await atomically(world, batch)
    assert (raised.value.kind, raised.value.detail.split(":")[0]) == (UNKNOWN_TOPIC, "events[1].topic")
    assert not world.queue.events


async def test_an_atomic_batch_whose_ledger_record_is_too_large_is_refused() -> None:
    entry = ENTRY_BYTES + len("orders")
    world = World()
    serving = world.serve(await world.slot())
    for holds in (3, 2):
        world.queue.limit_ledger_bytes(holds * entry)
        batch = batch_of(*(one(None, n) for n in range(3)), atomic=True)
        if holds == 3:
            assert isinstance(await atomically(world, batch, "three"), Committed)
        else:
            with pytest.raises(Problem, match="holds about 2 such events; there are 3") as raised:
                await atomically(world, batch, "again")
            assert raised.value.kind is TOO_LARGE
    await ended(serving)


# ------------------------------------------------------------------------------------------- the event loop is not held


@pytest.mark.skipif(not native.COMPILED, reason="counted beforehand only where service.native is compiled")
@pytest.mark.parametrize("event", [b"{}", b'{"topic":"t"}', b"[]", b"1"])
async def test_too_many_events_are_refused_before_any_is_made(event: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count alone decides, and reading stops at the bound."""
    monkeypatch.setattr(module, "decode", None)
    monkeypatch.setattr(cloudevents, "decode", None)
    many = BATCH_EVENTS_MAX * (event + b",") + event
    with pytest.raises(Problem, match="10000") as caught:
        await parse_long_batch(b'{"atomic":true, "events": [' + many + b", what follows is not read")
    assert caught.value.kind is TOO_LARGE
    with pytest.raises(Problem, match="10000") as caught:
        await cloudevents.parse_long_batch(b"[" + many + b", what follows is not read")
    assert caught.value.kind is TOO_LARGE


async def test_parsing_many_events_yields_to_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if all of them are refused, and nothing is written in between."""
    monkeypatch.setattr("service.core.time_slice.SLICE_S", 0.0)
    groups = write_each(World().admission, [b"{}"] * 200, line_of, asyncio.get_running_loop().time())
    with Turns() as turns:
        answers = [answer async for some in groups for answer in some]
    assert len(answers) == 200
    assert all(isinstance(answer, Problem) for answer in answers)
    assert turns.count >= 199


async def test_problems_of_a_batch_leave_no_cycles() -> None:
    """Otherwise Python's garbage collector would hold the event loop to free 10,000 of them."""
    groups = write_each(World().admission, [b"{}", b"[", b'{"topic":"t","x":1}'] * 100, line_of, 0.0)
    gc.collect()
    gc.disable()
    try:
        answers = [answer async for some in groups for answer in some]
        assert len(answers) == 300
        del answers, groups
        assert gc.collect() < 100
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"events": [one(f"{n}", "x" * 100) for n in range(900)], "atomic": True}).encode(),
        b'{"\\u0065vents": [{"a": 1} , 2]}',
        b'{"events": [{"a": 1, "a": 2}]}',
        b'{"events": [1], "events": [2]}',
        b'{"events": []}',
        b'{"events": {"a": 1}}',
        b'{"events": 1}',
        b'{"events": [1], "more": 1}',
        b'{"events": [1], "atomic": 1}',
        b'{"atomic": true}',
        b'{"events": [1]}}',
        b'{"events": [1',
        b'{"events": [' + b"[" * 62 + b"]" * 62 + b"]}",
        b'{"events": [' + b"[" * 63 + b"]" * 63 + b"]}",
        b"[1]",
        b"",
    ],
)
async def test_a_long_batch_is_parsed_as_a_short_one_is(body: bytes) -> None:
    short: BatchBody | str
    long: BatchBody | str
    try:
        short = parse_batch(body)
    except Problem as problem:
        short = str(problem)
    try:
        long = await parse_long_batch(body)
    except Problem as problem:
        long = str(problem)
    if isinstance(long, BatchBody):
        assert isinstance(short, BatchBody)
        assert long.atomic is short.atomic
        assert [bytes(raw) for raw in long.events] == [bytes(raw) for raw in short.events]
    else:
        assert long == short


@pytest.mark.parametrize("body", [b'[{"id": 1} , 2]', b"[]", b"[1", b'{"a": 1}', b"[1,[{}]]", b'[{"a": 1, "a": 2}]'])
async def test_a_long_batch_of_cloudevents_is_parsed_as_a_short_one_is(body: bytes) -> None:
    short: list[bytes] | str
    long: list[bytes] | str
    try:
        short = [bytes(raw) for raw in cloudevents.parse_batch(body)]
    except Problem as problem:
        short = str(problem)
    try:
        long = [bytes(raw) for raw in await cloudevents.parse_long_batch(body)]
    except Problem as problem:
        long = str(problem)
    assert long == short


async def test_splitting_a_long_batch_decodes_only_the_text_around_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding all of 8 MiB to find the events would hold the event loop."""
    sizes: list[int] = []

    def noted(decoder: Any, body: bytes) -> Any:
        sizes.append(len(body))
        return decoder(body)

    monkeypatch.setattr(module, "decode", noted)
    body = json.dumps({"events": [one(f"{n}", [[]] * 100) for n in range(900)], "atomic": True}).encode()
    assert len((await parse_long_batch(body)).events) == 900
    assert max(sizes) < (100 if native.COMPILED else len(body) + 1)
