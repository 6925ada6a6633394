"""Tests the cache of topics: for how long it is used, and when Kafka is unreachable."""

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from service.contract import SettingsError
from service.core.problems import KafkaAway, KafkaForbids, Problem
from service.core.settings import GROUP_LEDGER_BYTES_MAX, Settings
from service.events.event import NONE_IS_PLAIN
from service.kafka import topics as module
from service.kafka.topic_admin import Topic
from service.kafka.topics import InternalTopics, TopicMetadataCache
from tests.unit.fakes import FakeTopicAdmin, World, make_event, until


def known(*topics: str) -> tuple[TopicMetadataCache, FakeTopicAdmin]:
    admin = FakeTopicAdmin(topics)
    return TopicMetadataCache(admin), admin


async def test_concurrent_look_ups_of_a_topic_share_one_request() -> None:
    topic_metadata, admin = known("orders")
    assert topic_metadata.cached("orders") is None
    found = await asyncio.gather(*(topic_metadata.get("orders", time.monotonic()) for _ in range(5)))
    assert set(map(id, found)) == {id(admin.topics["orders"])}
    assert topic_metadata.cached("orders") is admin.topics["orders"]
    await topic_metadata.get("orders", time.monotonic())
    assert admin.asked == [["orders"]]


async def test_the_first_look_up_finds_a_new_topic() -> None:
    topic_metadata, admin = known()
    assert await topic_metadata.get("orders", time.monotonic()) is None
    admin.topics |= FakeTopicAdmin(["orders"]).topics
    assert await topic_metadata.get("orders", time.monotonic()) is admin.topics["orders"]


async def test_a_later_look_up_does_not_take_the_answer_of_one_from_before_the_topic_was_made() -> None:
    topic_metadata, admin = known()
    early = asyncio.create_task(topic_metadata.get("orders", time.monotonic()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert admin.asked
    admin.topics |= FakeTopicAdmin(["orders"]).topics
    late = [asyncio.create_task(topic_metadata.get("orders", time.monotonic())) for _ in range(5)]
    assert [await one for one in late] == [admin.topics["orders"]] * 5
    assert await early is None
    assert len(admin.asked) == 3, "each of the late asked for itself"


async def test_a_topic_that_vanished_stays_in_last_known() -> None:
    topic_metadata, admin = known("orders")
    was = await topic_metadata.get("orders", time.monotonic())
    admin.topics.clear()
    topic_metadata.invalidate("orders")
    assert await topic_metadata.get("orders", time.monotonic()) is None
    assert topic_metadata.cached("orders") is None
    assert topic_metadata.last_known("orders") is was


async def test_an_invalidated_topic_is_served_from_the_cache_while_kafka_is_away() -> None:
    topic_metadata, admin = known("orders")
    was = await topic_metadata.get("orders", time.monotonic())
    admin.away = True
    topic_metadata.invalidate("orders")
    assert await topic_metadata.get("orders", time.monotonic()) is was
    with pytest.raises(KafkaAway):
        await topic_metadata.get("other", time.monotonic())
    admin.away = False
    assert await topic_metadata.get("other", time.monotonic()) is None, "a failed look-up was taken for an answer"


async def test_a_topic_that_kafka_forbids_to_describe_is_not_served_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ACL was removed: cached metadata would admit events, each of which ends a term."""
    topic_metadata, admin = known("orders")
    await topic_metadata.get("orders", time.monotonic())
    admin.forbids = True
    topic_metadata.invalidate("orders")
    with pytest.raises(KafkaForbids):
        await topic_metadata.get("orders", time.monotonic())
    assert topic_metadata.cached("orders") is None
    admin.forbids = False
    monkeypatch.setattr(module, "KNOWN_S", 0.0)
    was = await topic_metadata.get("orders", time.monotonic())
    admin.forbids = True
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    assert topic_metadata.cached("orders") is was
    await asyncio.wait([*topic_metadata._looking_up.values()])  # no caller waits for it
    await asyncio.sleep(0)
    gc.collect()
    assert topic_metadata.cached("orders") is None
    assert not failed


async def test_an_invalidated_topic_is_asked_for_again() -> None:
    topic_metadata, admin = known("orders")
    await topic_metadata.get("orders", time.monotonic())
    topic_metadata.invalidate("orders")
    topic_metadata.invalidate("never-asked")
    assert topic_metadata.cached("orders") is None
    await topic_metadata.get("orders", time.monotonic())
    assert len(admin.asked) == 2


async def test_a_caller_that_goes_away_does_not_end_the_look_up_of_others() -> None:
    topic_metadata, admin = known("orders")
    gone, here = (asyncio.create_task(topic_metadata.get("orders", time.monotonic())) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await here is admin.topics["orders"]


async def test_look_ups_of_new_topics_wait_for_each_other_and_never_delay_those_of_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any client can name topics that do not exist, each of which costs two requests."""
    monkeypatch.setattr(module, "NEW_WAITING_MAX", 100)
    topic_metadata, admin = known("orders")
    await topic_metadata.get("orders", time.monotonic())
    topic_metadata.invalidate("orders")
    held = asyncio.Event()
    describe = admin.describe
    asked: set[str] = set()

    async def silent(names: Sequence[str], *, elsewhere: bool = False) -> dict[str, Topic]:
        if names[0] != "orders":
            asked.add(names[0])
            await held.wait()
        return await describe(names, elsewhere=elsewhere)

    monkeypatch.setattr(admin, "describe", silent)
    count = module.NEW_AT_ONCE + 100
    looking_up = [asyncio.create_task(topic_metadata.get(f"new-{n}", time.monotonic())) for n in range(count)]
    await until(lambda: len(asked) == module.NEW_AT_ONCE)
    assert await topic_metadata.get("orders", time.monotonic()) is admin.topics["orders"]
    with pytest.raises(KafkaAway, match="100 look-ups of new topics wait already"):
        await topic_metadata.get("one-more", time.monotonic())
    assert len(asked) == module.NEW_AT_ONCE
    held.set()
    assert await asyncio.gather(*looking_up) == [None] * count
    assert await topic_metadata.get("one-more", time.monotonic()) is None


async def test_a_look_up_of_a_new_topic_waits_no_longer_than_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEW_AT_ONCE", 1)
    topic_metadata, admin = known()
    monkeypatch.setattr(admin, "describe", lambda *_, **__: asyncio.sleep(60))
    first = asyncio.create_task(topic_metadata.get("a", time.monotonic()))
    await asyncio.sleep(0.01)
    with pytest.raises(KafkaAway, match="1 look-ups of new topics have no answer"):
        await topic_metadata.get("b", time.monotonic())
    first.cancel()
    topic_metadata.close()
    await asyncio.wait([first])


async def test_absent_topics_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABSENT_MAX", 3)
    topic_metadata, _ = known("orders")
    for n in range(10):
        assert await topic_metadata.get(f"nobody-{n}", time.monotonic()) is None
    assert await topic_metadata.get("orders", time.monotonic()) is not None
    assert list(topic_metadata._known) == ["orders"]
    assert list(topic_metadata._absent) == ["nobody-7", "nobody-8", "nobody-9"]
    assert not topic_metadata._looking_up


async def test_a_bounded_cache_keeps_the_topics_that_were_asked_for_last() -> None:
    admin = FakeTopicAdmin(["a", "b", "c"])
    bounded = TopicMetadataCache(admin, 2)
    for name in ("a", "b", "a", "c"):
        bounded.invalidate(name)
        assert await bounded.get(name, time.monotonic()) is not None
    assert list(bounded.names) == ["a", "c"]


async def test_a_topic_that_stays_absent_is_forgotten_when_no_request_can_need_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic_metadata, admin = known("orders", "other", "third")
    for name in ("orders", "other", "third"):
        await topic_metadata.get(name, time.monotonic())
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(module, "time", clock)
    topic_metadata.forget_absent(["orders", "other", "unknown"])
    assert set(topic_metadata.names) == {"orders", "other", "third"}
    passed_s = module.ABSENT_KEPT_S - 1
    topic_metadata.forget_absent(["orders"])  # the other was made again meanwhile
    passed_s = module.ABSENT_KEPT_S + module.KNOWN_S + 1
    topic_metadata.forget_absent(["orders", "other"])
    assert set(topic_metadata.names) == {"other", "third"}
    with pytest.raises(KeyError):
        topic_metadata.last_known("orders")
    admin.away = True
    with pytest.raises(KafkaAway):
        await topic_metadata.get("orders", clock.monotonic())


async def test_an_absent_topic_is_kept_while_events_are_admitted_by_its_last_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic_metadata, admin = known("orders")
    await topic_metadata.get("orders", time.monotonic())
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(module, "time", clock)
    topic_metadata.forget_absent(["orders"])
    passed_s = module.ABSENT_KEPT_S + module.KNOWN_S + 1
    admin.away = True
    admitted_by = await topic_metadata.get("orders", clock.monotonic())
    topic_metadata.forget_absent(["orders"])
    assert topic_metadata.last_known("orders") is admitted_by


async def test_an_event_that_arrived_before_a_failed_look_up_takes_its_answer() -> None:
    """The events of a batch came together: one look-up serves all of them."""
    topic_metadata, admin = known()
    arrived = time.monotonic()
    for _ in range(10):
        assert await topic_metadata.get("orders", arrived) is None
    assert len(admin.asked) == 2, "more than two brokers were asked"
    admin.topics |= FakeTopicAdmin(["orders"]).topics
    assert await topic_metadata.get("orders", time.monotonic()) is admin.topics["orders"]


async def test_a_topic_with_too_few_replicas_is_cached_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    topic_metadata, admin = known("orders", "other")
    admin.topics["orders"] = Topic("orders", 3, {}, frozenset({1}))
    for name in ("orders", "other"):
        await topic_metadata.get(name, now_s)
    now_s += 0.9 * module.UNDER_MIN_ISR_S
    assert topic_metadata.cached("orders") is not None
    now_s += 0.2 * module.UNDER_MIN_ISR_S
    assert topic_metadata.cached("orders") is None
    assert topic_metadata.cached("other") is not None


async def test_refresh_looks_up_invalidated_topics_and_keeps_the_known_ones_while_kafka_is_away() -> None:
    topic_metadata, admin = known("orders", "other")
    for name in ("orders", "other"):
        await topic_metadata.get(name, time.monotonic())
    short = admin.topics["orders"] = Topic("orders", 3, {}, frozenset({1}))
    await topic_metadata.refresh(["orders", "other"])
    assert topic_metadata.last_known("orders") is not short
    topic_metadata.invalidate("orders")
    await topic_metadata.refresh(["orders", "other"])
    assert topic_metadata.last_known("orders") is short
    admin.away = True
    topic_metadata.invalidate("orders")
    await topic_metadata.refresh(["orders", "never-asked"])
    assert topic_metadata.last_known("orders") is short


async def test_an_expired_topic_is_served_from_the_cache_while_it_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single silent broker must not delay every request for a topic."""
    monkeypatch.setattr(module, "KNOWN_S", 0.0)
    topic_metadata, admin = known("orders")
    was = await topic_metadata.get("orders", time.monotonic())
    admin.topics["orders"] = Topic("orders", 6, {})
    for _ in range(3):
        assert topic_metadata.cached("orders") is was
    await asyncio.sleep(0.01)
    assert admin.asked == [["orders"], ["orders"]]
    monkeypatch.setattr(module, "KNOWN_S", 60.0)
    topic_metadata.cached("orders")
    await asyncio.sleep(0.01)
    assert topic_metadata.cached("orders") is admin.topics["orders"]


async def test_an_event_is_not_refused_for_an_outdated_number_of_partitions() -> None:
    """Partitions were added just after the look-up: a 400 would be final."""
    world = World()
    world.topic_admin.topics["orders"] = Topic("orders", 3, {})
    event = make_event("a", partition=5)
    arrived = time.monotonic()
    for _ in range(3):
        with pytest.raises(Problem, match="use 0 to 2"):
            await world.checks.check(event, arrived)
    assert world.topic_admin.asked == [["orders"]], "what Kafka has said since will do"
    world.topic_admin.topics["orders"] = Topic("orders", 6, {})
    assert not world.checks.check_now(event)
    assert world.checks.plain_bytes_max("payments") == NONE_IS_PLAIN, "it was not looked up"
    await world.checks.check(event, time.monotonic())
    assert world.checks.check_now(event)
    assert world.checks.plain_bytes_max("orders") > 1_000_000


async def test_an_event_is_checked_against_the_cached_topic_while_kafka_is_away() -> None:
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())
    world.topic_admin.away = True
    with pytest.raises(Problem, match="use 0 to 2"):
        await world.checks.check(make_event("a", partition=5), time.monotonic())


async def test_a_stale_topic_is_looked_up_before_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_S", 0.0)
    monkeypatch.setattr(module, "STALE_S", 0.0)
    topic_metadata, admin = known("orders")
    await topic_metadata.get("orders", time.monotonic())
    assert topic_metadata.cached("orders") is None
    admin.topics["orders"] = Topic("orders", 6, {})
    assert await topic_metadata.get("orders", time.monotonic()) is admin.topics["orders"]


async def test_while_kafka_is_away_a_known_topic_is_looked_up_in_the_background_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KNOWN_S", 0.0)
    topic_metadata, admin = known("orders")
    was = await topic_metadata.get("orders", time.monotonic())
    admin.away = True
    topic_metadata.cached("orders")
    await asyncio.sleep(0.01)
    for _ in range(5):
        assert topic_metadata.cached("orders") is was
    assert len(admin.asked) == 2, "each request asked again"


async def test_refresh_looks_up_an_expired_topic_that_the_cache_would_still_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KNOWN_S", 0.0)
    topic_metadata, admin = known("orders")
    await topic_metadata.get("orders", time.monotonic())
    admin.topics["orders"] = Topic("orders", 3, {}, frozenset({1}))
    await topic_metadata.refresh(["orders"])
    assert topic_metadata.last_known("orders").under_min_isr == {1}


@pytest.mark.parametrize("known_before", [True, False])
async def test_a_topic_that_one_broker_does_not_know_is_asked_of_another(known_before: bool) -> None:
    """404 is final for a client, which may just have created the topic, and a broker may lag."""
    topic_metadata, admin = known("orders")
    if known_before:
        await topic_metadata.get("orders", time.monotonic())
        topic_metadata.invalidate("orders")
    admin.lagging = True
    assert await topic_metadata.get("orders", time.monotonic()) is admin.topics["orders"]


@pytest.mark.parametrize(("name", "partitions"), [("fp.requests", 3), ("fp.control", 2)])
async def test_internal_topics_with_another_number_of_partitions_stop_the_start(name: str, partitions: int) -> None:
    """Created by hand: the journal would miss partitions, and a barrier would not be read."""
    settings = Settings(instance="test", namespace="fp")
    admin = FakeTopicAdmin(["fp.ledger", "fp.requests", "fp.control"])
    shapes = {"fp.ledger": settings.slots_max, "fp.requests": 8, "fp.control": 1}
    admin.topics = {each: Topic(each, count, {}) for each, count in shapes.items()}
    await InternalTopics(admin, settings).ensure()
    admin.topics[name] = Topic(name, partitions, {})
    with pytest.raises(SettingsError, match=f"topic {name} has {partitions} partitions"):
        await InternalTopics(admin, settings).ensure()


@pytest.mark.parametrize(("reported", "slots"), [({"fencepost.ledger": 2}, 4), ({}, 4), ({"fencepost.ledger": 8}, 8)])
async def test_a_broker_that_lags_behind_does_not_reduce_the_number_of_slots(
    reported: dict[str, int], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store recovery that fenced fewer slots would leave a writer alive."""
    admin = FakeTopicAdmin()

    async def partitions(topics: Sequence[str]) -> dict[str, int]:
        return reported

    monkeypatch.setattr(admin, "partitions", partitions)
    assert await InternalTopics(admin, Settings(slots_max=4)).slots() == slots


async def test_groups_are_as_large_as_the_ledger_takes() -> None:
    admin = Made()
    internal = InternalTopics(admin, Settings(namespace="fp"))
    await internal.ensure()
    assert internal.ledger_bytes_max == GROUP_LEDGER_BYTES_MAX
    settings = {**admin.topics["fp.ledger"].settings, "max.message.bytes": "20000"}
    admin.topics["fp.ledger"] = Topic("fp.ledger", 64, settings)
    assert await internal.check_again() == []
    assert 0 < internal.ledger_bytes_max < 20_000
    assert internal.limits == {"fp.ledger": 20_000, "fp.requests": 1_048_588, "fp.control": 1_048_588}
    # Without permission to read settings nothing is known.
    unseen = InternalTopics(admin, Settings(namespace="fp"))
    admin.topics = {name: Topic(name, it.partitions, {}) for name, it in admin.topics.items()}
    assert await unseen.check_again() == []
    assert (unseen.limits, unseen.ledger_bytes_max) == ({}, GROUP_LEDGER_BYTES_MAX)


async def test_what_was_changed_of_an_internal_topic_since_the_start_is_found() -> None:
    """Kafka would delete the ledger's records before their keys expire; a start refuses this."""
    admin = Made()
    internal = InternalTopics(admin, Settings(namespace="fp", slots_max=64))
    await internal.ensure()
    settings = {**admin.topics["fp.ledger"].settings, "retention.ms": "60000"}
    admin.topics["fp.ledger"] = Topic("fp.ledger", 128, settings)  # a process with more slots has grown it
    del admin.topics["fp.requests"]
    gone, changed = await internal.check_again()
    assert gone.startswith("topic fp.requests was deleted: restart a process")
    assert changed == f"topic fp.ledger has retention.ms=60000: set retention.ms={WEEK_AND_TWO_DAYS_MS} on it"


async def test_an_internal_topic_that_takes_no_record_stops_the_start() -> None:
    admin = Made()
    await InternalTopics(admin, Settings(namespace="fp")).ensure()
    settings = {**admin.topics["fp.ledger"].settings, "max.message.bytes": "500"}
    admin.topics["fp.ledger"] = Topic("fp.ledger", 64, settings)
    with pytest.raises(SettingsError, match=r"^topic fp.ledger has max.message.bytes=500: set "):
        await InternalTopics(admin, Settings(namespace="fp")).ensure()


KEPT = {"cleanup.policy": "delete", "retention.bytes": "-1", "message.timestamp.type": "LogAppendTime"}
WEEK_AND_TWO_DAYS_MS = (168 + 48) * 3_600_000


class Made(FakeTopicAdmin):
    """Notes the topics that were created and grown."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int, Mapping[str, str]]] = []
        self.grown: list[tuple[str, int]] = []

    async def create(self, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
        self.made.append((topic, partitions, settings))
        self.topics[topic] = Topic(topic, partitions, dict(settings))

    async def grow(self, topic: str, partitions: int) -> None:
        self.grown.append((topic, partitions))


@pytest.mark.parametrize(
    ("key_ttl_s", "retention_ms"),
    [(60, WEEK_AND_TWO_DAYS_MS), (30 * 86_400, 32 * 86_400_000)],
)
@pytest.mark.parametrize("by_rule", [False, True])
async def test_internal_topics_are_made_once_with_the_settings_that_the_audit_needs(
    key_ttl_s: int, retention_ms: int, by_rule: bool
) -> None:
    """Also where a rule has the longest retention of keys."""
    admin = Made()
    longest_ttl_s, key_ttl_s = (key_ttl_s, 60) if by_rule else (0, key_ttl_s)
    await InternalTopics(admin, Settings(namespace="fp", slots_max=3, key_ttl_s=key_ttl_s), longest_ttl_s).ensure()
    ours = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": "1048588"}
    kept = KEPT | ours | {"retention.ms": str(retention_ms)}
    control = ours | {"cleanup.policy": "compact"}
    wanted = [("fp.ledger", 3, kept), ("fp.requests", 8, kept), ("fp.control", 1, control)]
    assert (admin.made, admin.grown) == (wanted, [])
    await InternalTopics(admin, Settings(namespace="fp", slots_max=5, key_ttl_s=key_ttl_s), longest_ttl_s).ensure()
    assert (admin.made, admin.grown) == (wanted, [("fp.ledger", 5)])


async def test_a_longer_retention_of_keys_counts_once_the_topics_keep_their_records_for_it() -> None:
    """Else the recovery of a lost store would not find the oldest keys. A shorter one counts after a restart."""
    admin = Made()
    topics = InternalTopics(admin, Settings(namespace="fp", slots_max=3))
    await topics.keep_for(7 * 86_400)  # before the topics are there
    await topics.ensure()
    assert topics.longest_ttl_s == 7 * 86_400
    with pytest.raises(
        SettingsError, match=r"fp\.ledger has retention\.ms=777600000: set retention\.ms=864000000 on it"
    ):
        await topics.keep_for(8 * 86_400)
    await topics.keep_for(3_600)
    assert topics.longest_ttl_s == 7 * 86_400
    longer = Made()
    await InternalTopics(longer, Settings(namespace="fp", slots_max=3), 8 * 86_400).ensure()
    other = InternalTopics(longer, Settings(namespace="fp", slots_max=3))
    await other.keep_for(8 * 86_400)
    assert other.longest_ttl_s == 8 * 86_400
    await other.ensure()


@pytest.mark.parametrize(
    ("topic", "name", "value", "wrong"),
    [
        ("fp.ledger", "retention.ms", str(WEEK_AND_TWO_DAYS_MS - 1), True),
        ("fp.ledger", "retention.ms", str(WEEK_AND_TWO_DAYS_MS), False),
        ("fp.ledger", "retention.ms", str(WEEK_AND_TWO_DAYS_MS + 1), False),
        ("fp.ledger", "retention.ms", "-1", False),
        ("fp.ledger", "retention.bytes", "1", True),
        ("fp.requests", "cleanup.policy", "compact", True),
        ("fp.requests", "message.timestamp.type", "CreateTime", True),
        ("fp.control", "cleanup.policy", "delete", True),
        ("fp.control", "retention.ms", "1", False),
    ],
)
async def test_internal_topics_with_unsafe_settings_stop_the_start(
    topic: str, name: str, value: str, wrong: bool
) -> None:
    """A ledger that is deleted before its keys expire would lead to duplicates."""
    admin = Made()
    topics = InternalTopics(admin, Settings(namespace="fp"))
    await topics.ensure()
    present = admin.topics[topic]
    admin.topics[topic] = Topic(topic, present.partitions, {**present.settings, name: value})
    assert [line.split(":")[0] for line in topics.faults(admin.topics[topic])] == (
        [f"topic {topic} has {name}={value}"] if wrong else []
    )
    if wrong:
        with pytest.raises(SettingsError):
            await topics.ensure()


async def test_a_ledger_with_more_partitions_than_slots_stops_the_start() -> None:
    """Its other slots would not be fenced."""
    admin = Made()
    await InternalTopics(admin, Settings(namespace="fp", slots_max=5)).ensure()
    with pytest.raises(SettingsError, match="set FENCEPOST_SLOTS_MAX to 5 or more"):
        await InternalTopics(admin, Settings(namespace="fp", slots_max=4)).ensure()
    assert not admin.grown
