"""Tests admission: which requests are admitted, their answers, and a stop that waits for the last answer."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from service.claims.states import Claimed, Delivered, DeliveredBatch, RequestEvent
from service.contract import Rules
from service.contract.wire.ids import event_id, member_id
from service.core.problems import (
    FORBIDDEN_TOPIC,
    KEY_EXPIRED,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RECORD_REFUSED,
    UNKNOWN_TOPIC,
    Kind,
    Problem,
)
from service.events.event import event_of
from service.kafka.topic_admin import Topic
from service.pipeline import admission as module
from service.pipeline.key_checks import UNKNOWN_AGE, KeyAge, KeyChecks
from service.pipeline.request import Committed
from tests.durations import DAY_MS, HOUR_MS
from tests.unit.fakes import NOW_MS, World, ended, kind_of, make_event, until
from tests.unit.scrape import sample

# ------------------------------------------------------------------------------------------------------ its topic


async def refused(world: World, topic: str) -> tuple[Kind, str]:
    """Return kind and first words of the refusal of an event for this topic."""
    with pytest.raises(Problem) as caught:
        await world.checks.check(make_event("a", topic), time.monotonic())
    return caught.value.kind, caught.value.detail


@pytest.mark.parametrize(
    "topic",
    ["fencepost.ledger", "fencepost.requests", "fencepost.control", "fencepost.findings", "__consumer_offsets"],
)
async def test_an_event_for_an_internal_topic_is_refused_without_a_look_up(topic: str) -> None:
    """Although the topic exists."""
    world = World()
    world.topic_admin.topics[topic] = Topic(topic, 3, {})
    assert await refused(world, topic) == (FORBIDDEN_TOPIC, f"topic: {topic} is internal: use another")
    assert not world.topic_admin.asked


def away(world: World) -> None:
    world.topic_admin.away = True


def forbids(world: World) -> None:
    world.topic_admin.forbids = True


def hangs(world: World) -> None:
    async def silence(names: Sequence[str], *, elsewhere: bool = False) -> dict[str, Topic]:
        await asyncio.sleep(60)
        return {}

    world.topic_admin.describe = silence  # type: ignore[method-assign]


def missing(world: World) -> None:
    world.topic_admin.topics.clear()


@pytest.mark.parametrize(
    ("happens", "kind"),
    [(away, NOT_WRITTEN), (hangs, NOT_WRITTEN), (forbids, FORBIDDEN_TOPIC), (missing, UNKNOWN_TOPIC)],
)
async def test_a_failed_topic_look_up_is_refused_with_the_kind_of_its_cause(
    happens: Callable[[World], None], kind: Kind
) -> None:
    world = World(request_timeout_ms=100)
    happens(world)
    assert (await asyncio.wait_for(refused(world, "orders"), 1.0))[0] is kind


async def test_an_atomic_batch_holds_no_event_that_is_idempotent() -> None:
    world = World()
    events = [make_event("a", "orders"), make_event("a", "plain.a")]
    with pytest.raises(Problem, match=r"plain\.a is idempotent") as caught:
        await world.admission.submit_atomic(events[0].key, events, (b"w" * 16, b"f" * 8), time.monotonic())
    assert caught.value.kind is RECORD_REFUSED
    assert not world.queue.events


# ---------------------------------------------------------------------------------------------------- the process


async def test_without_a_store_or_during_a_stop_events_are_refused_and_their_503_is_journaled() -> None:
    world = World()
    world.store.generation, world.store.status = None, "recovering: 3 keys replayed"
    answers = [await asyncio.gather(world.submit("a"), return_exceptions=True)]
    world.store.generation = (await World().slot()).generation
    world.queue.close()
    answers.append(await asyncio.gather(world.submit("b"), return_exceptions=True))
    details = [answer.detail for (answer,) in answers if isinstance(answer, Problem)]
    assert details == [
        "the key store is not complete (recovering: 3 keys replayed): send it again",
        "this process is stopping: send it again, to another",
    ]
    assert world.journal.answers == [("a", 503), ("b", 503)]
    assert (world.queue.events, list(world.resolver.by_deadline)) == (0, [])


async def test_drain_ends_after_the_last_deadline_though_a_request_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.pipeline.admission.DRAIN_MARGIN_S", 0.05)
    world = World(request_timeout_ms=50)
    world.queue.events = 1
    await asyncio.wait_for(world.admission.drain(), 10)


async def test_drain_refuses_new_requests_and_waits_for_the_last_answer() -> None:
    world = World()
    answer = world.submit("a")
    await until(lambda: world.queue.events == 1)
    draining = asyncio.create_task(world.admission.drain())
    await asyncio.sleep(0.03)
    assert not draining.done()
    assert not world.admission.is_accepting
    serving = world.serve(await world.slot())
    assert isinstance(await answer, Committed)
    await asyncio.wait_for(draining, 1.0)
    await ended(serving)


# -------------------------------------------------------------------------------------------------------- answers


async def test_accepting_a_request_twice_journals_one_202_before_its_201() -> None:
    world = World()
    slot = await world.slot()
    await world.topic_metadata.get("orders", time.monotonic())
    accepted = asyncio.get_running_loop().create_future()
    writing = world.producers[0].trouble.hold("write")
    result = world.admission.submit(make_event("a"), time.monotonic(), on_claim=accepted)
    assert not accepted.done()
    serving = world.serve(slot)
    await world.producers[0].trouble.reached["write"].wait()
    assert (accepted.done(), result.done()) == (True, False)
    (request,) = world.resolver.by_deadline
    world.resolver.resolve_claim(request)
    writing.set()
    assert isinstance(await result, Committed)
    assert world.journal.answers == [("a", 202), ("a", 201)]
    await ended(serving)


async def test_a_request_whose_client_went_away_does_not_keep_others_from_their_answers() -> None:
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())
    accepted = asyncio.get_running_loop().create_future()
    gone = world.admission.submit(make_event("a"), time.monotonic(), on_claim=accepted)
    here = world.admission.submit(make_event("b"), time.monotonic())
    gone.cancel()
    accepted.cancel()
    serving = world.serve(await world.slot())
    assert isinstance(await here, Committed)
    assert world.keys.is_delivered("a")
    assert not serving.done()
    assert world.queue.events == 0
    await ended(serving)


async def test_a_request_that_is_answered_twice_keeps_and_journals_its_first_answer() -> None:
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())
    result = world.admission.submit(make_event("a"), time.monotonic())
    (request,) = world.resolver.by_deadline
    for kind in (NOT_WRITTEN, OUTCOME_UNKNOWN):
        world.resolver.resolve(request, Problem(kind, "its deadline"))
    assert kind_of(await result) is NOT_WRITTEN
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    assert world.journal.answers == [("a", 503)]
    assert request.future is None, "its connection and its body are kept"


async def test_a_replay_is_counted_as_one() -> None:
    world = World()
    serving = world.serve(await world.slot())
    for replays in (0, 1):
        assert isinstance(await world.submit("a"), Committed)
        assert sample(world.telemetry, "fencepost_replays_total") == replays
    await ended(serving)


@pytest.mark.parametrize(
    ("wait_s", "patient_s"), [(0.0, None), (1.0, 1.0), (9.0, 5.0 - module.ANSWERED_BEFORE_DEADLINE_S)]
)
async def test_a_wait_that_would_pass_the_deadline_ends_before_the_deadline(
    wait_s: float, patient_s: float | None
) -> None:
    """It gets 409 before, and not 503."""
    world = World(request_timeout_ms=5_000)
    world.admission.submit(make_event("a"), 100.0, wait_s)
    (request,) = world.resolver.by_deadline
    assert request.deadline == 105.0
    assert request.wait_deadline == (0.0 if patient_s is None else 100.0 + patient_s)


async def test_the_sweep_answers_a_request_at_its_deadline_and_not_before() -> None:
    world = World(request_timeout_ms=60_000)
    for key in "abc":
        world.admission.submit(make_event(key), time.monotonic())
    first, second, third = world.resolver.by_deadline
    sweeping = asyncio.create_task(world.resolver.sweep())
    second.move(RequestEvent.ANSWER)
    await asyncio.sleep(0.15)
    assert [first.finished, third.finished] == [False, False]
    first.deadline = time.monotonic()
    await until(lambda: len(world.resolver.by_deadline) == 1)
    assert [first.finished, third.finished] == [True, False]
    assert world.resolver.by_deadline_bytes == third.size
    await ended(sweeping)


async def test_open_requests_are_kept_in_the_order_of_their_deadlines() -> None:
    """The sweep goes by order: a request behind one with more time would be answered late."""
    world = World()
    for key, arrived in (("b", 2.0), ("e", 5.0), ("a", 1.0), ("d", 4.0), ("c", 3.0), ("f", 5.0)):
        world.admission.submit(make_event(key), arrived)
    assert [request.events[0].key for request in world.resolver.by_deadline] == list("abcdef")


async def test_an_answer_that_cannot_be_noted_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a foreign record of the ledger gave the key a state that cannot be encoded."""
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())

    def broken(*_: object) -> None:
        raise UnicodeError("a bug")

    monkeypatch.setattr(world.journal, "record", broken)
    result = world.admission.submit(make_event("a"), time.monotonic())
    with capture_logs() as lines:
        serving = world.serve(await world.slot())
        answer = await result
    assert [line["event"] for line in lines] == ["an answer was not noted"]
    assert isinstance(answer, Committed)
    await ended(serving)


def old_key(age_ms: int) -> str:
    """Make a UUID of version 7 that was made so long ago."""
    digits = f"{NOW_MS - age_ms:012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-000000000000"


@pytest.mark.parametrize(
    ("topic", "age_ms", "refused"),
    [
        ("orders", DAY_MS - 30_001, False),
        ("orders", DAY_MS, True),
        ("kept", 2 * DAY_MS, False),
        ("kept", 3 * DAY_MS, True),
        ("plain.a", DAY_MS, True),
        ("filled", 100 * DAY_MS, False),  # by its rule
    ],
)
async def test_a_key_that_is_older_than_its_retention_and_not_known_is_refused(
    topic: str, age_ms: int, refused: bool
) -> None:
    world = world_of_now()
    event = make_event(old_key(age_ms), topic)
    await world.topic_metadata.get(topic, time.monotonic())
    assert world.checks.check_now(event) is not refused
    if not refused:
        await world.checks.check(event, time.monotonic())
        return
    with pytest.raises(Problem, match="key-expired: Idempotency-Key: it tells that it is older than the"):
        await world.checks.check(event, time.monotonic())
    assert event.id not in world.keys.server.keys


@pytest.mark.parametrize(
    ("left_ms", "taken"), [(3_600_000, True), (30_001, True), (30_000, False)], ids=["long", "just", "soon forgotten"]
)
@pytest.mark.parametrize("delivered", [False, True])
async def test_an_old_key_that_is_remembered_beyond_the_request_goes_on(
    left_ms: int, taken: bool, delivered: bool
) -> None:
    """It was accepted long after it was made. Were it forgotten before its claim, its event would be written again."""
    world = world_of_now()
    event, at = make_event(old_key(2 * DAY_MS)), NOW_MS - DAY_MS + left_ms
    state = Delivered(at, event.fp, "orders", 0, 7, at) if delivered else Claimed(5, 50, at, event.fp)
    world.keys.server.keys[event.id] = state
    await world.topic_metadata.get("orders", time.monotonic())
    assert not world.checks.check_now(event)
    if taken or delivered:
        written = await world.checks.check(event, time.monotonic())
        assert (written is None) is taken
    else:
        with pytest.raises(Problem, match="key-expired"):
            await world.checks.check(event, time.monotonic())


@pytest.mark.parametrize("dated", ["by the key", "by the request"])
async def test_a_key_that_grows_old_while_its_event_waits_is_looked_up(dated: str) -> None:
    """Else its claim finds nothing, after the key has expired, and the event is written again."""
    world, made_ms = world_of_now(), NOW_MS - DAY_MS + 30_000
    age = KeyAge(sent_ms=made_ms) if dated == "by the request" else UNKNOWN_AGE
    event = make_event("k" if dated == "by the request" else old_key(NOW_MS - made_ms))
    await world.topic_metadata.get("orders", time.monotonic())
    assert not world.checks.check_now(event, age)
    assert await world.checks.check(event, time.monotonic(), age=age) is None, "nothing is written under it"
    world.keys.server.keys[event.id] = Delivered(made_ms, event.fp, "orders", 0, 7, made_ms)
    written = await world.checks.check(event, time.monotonic(), age=age)
    assert isinstance(written, Committed)
    assert (written.replayed, written.deliveries[0][1].offset) == (True, 7)
    world.keys.server.keys[event.id] = Delivered(made_ms, b"another.", "orders", 0, 7, made_ms)
    with pytest.raises(Problem, match="key-expired"):
        await world.checks.check(event, time.monotonic(), age=age)


async def test_an_atomic_batch_whose_key_grows_old_while_it_waits_is_looked_up() -> None:
    world, made_ms = world_of_now(), NOW_MS - DAY_MS + 30_000
    id, deadline = event_id("k"), time.monotonic() + 5
    await world.checks.keys.check_age_of_batch("k", id, ["orders"], DAY_MS // 1000, deadline, made_ms)
    world.keys.server.keys[id] = DeliveredBatch(made_ms, b"f" * 8, 2)
    with pytest.raises(Problem, match="key-expired"):
        await world.checks.keys.check_age_of_batch("k", id, ["orders"], DAY_MS // 1000, deadline, made_ms)


RAISED = Rules.parse(
    '[[topics]]\npattern = "orders"\nkey_ttl_s = 345600\n[[sources]]\nname = "shop"\ntopic = "orders"\n'
    'key_ttl_s = 400000\nsignature = { scheme = "github", secret_files = ["s"] }\nidempotency_key = { header = "id" }\n'
)


@pytest.mark.parametrize("dated", ["by the key", "by the request", "by a source", "by a batch"])
async def test_a_key_from_before_its_retention_grew_is_forgotten_after_the_retention_of_then(dated: str) -> None:
    """It may have been written, and forgotten before the change or after it: a claim would write it again."""
    world = World()

    async def is_refused(keys: KeyChecks, made_ms: int) -> bool:
        key, topic = old_key(NOW_MS - made_ms) if dated == "by the key" else "k", "orders"
        age = KeyAge(sent_ms=None if dated == "by the key" else made_ms)
        if dated == "by a source":
            age = age._replace(ttl_s=400_000, source="shop")
        try:
            if dated == "by a batch":
                await keys.check_age_of_batch(key, event_id(key), [topic], 345_600, time.monotonic() + 5, made_ms)
            else:
                await keys.check_age(make_event(key), time.monotonic() + 5, age)
        except Problem as problem:
            return problem.kind is KEY_EXPIRED
        return False

    now_ms = NOW_MS
    world.clock.read = lambda: now_ms
    keys = world.checks.keys.with_rules(RAISED)
    now_ms += 20 * HOUR_MS
    assert not await is_refused(keys, NOW_MS - 3 * HOUR_MS)
    keys = keys.with_rules(Rules()).with_rules(RAISED)
    now_ms = NOW_MS + 24 * HOUR_MS
    assert await is_refused(keys, NOW_MS - 3 * HOUR_MS), "written under the rules before, and forgotten after them"
    assert not await is_refused(keys, NOW_MS + HOUR_MS)
    now_ms = NOW_MS + 60 * HOUR_MS
    assert not await is_refused(keys, NOW_MS + 22 * HOUR_MS), "long after the last change the new retention counts"
    world.keys.server.keys[event_id("k")] = Delivered(NOW_MS, b"f" * 8, "orders", 0, 7, NOW_MS, 345_600)
    if dated != "by the key":
        assert not await is_refused(keys, NOW_MS - 3 * HOUR_MS), "still remembered"


@pytest.mark.parametrize(("age_ms", "refused"), [(2 * DAY_MS, False), (3 * DAY_MS, True)])
async def test_an_atomic_batch_is_as_old_as_its_longest_retention_allows(age_ms: int, refused: bool) -> None:
    """Its members are remembered for the longest retention of their topics, so that time counts for each of them."""
    world = world_of_now()
    serving = world.serve(await world.slot())
    key = old_key(age_ms)
    events = [event_of(key, member_id(key, i), topic, None, b"1", []) for i, topic in enumerate(("orders", "kept"))]
    for event in events:
        await world.checks.check_content(event, time.monotonic())
    writing = world.admission.submit_atomic(events[0].key, events, (event_id(key), b"f" * 8), time.monotonic())
    if refused:
        with pytest.raises(Problem, match="key-expired"):
            await writing
    else:
        assert isinstance(await writing, Committed)
    await ended(serving)


async def test_an_old_key_that_cannot_be_looked_up_is_answered_503() -> None:
    world = world_of_now()
    world.store.generation = None
    with pytest.raises(Problem, match="not-written: Idempotency-Key: it cannot be looked up now") as raised:
        await world.checks.check(make_event(old_key(2 * DAY_MS)), time.monotonic())
    assert raised.value.kind is NOT_WRITTEN


def world_of_now() -> World:
    """Make a world whose brokers' time is NOW_MS."""
    world = World()
    world.clock.read = lambda: NOW_MS
    return world
