"""What is believed of topics, for how long, and when Kafka is away."""

import asyncio
import time

import pytest

from service import topics as module
from service.errors import KafkaAway
from service.kafka.cluster import Topic
from service.topics import Catalogue
from tests.unit.fakes import FakeCluster


def known(*topics: str) -> tuple[Catalogue, FakeCluster]:
    cluster = FakeCluster(topics)
    return Catalogue(cluster), cluster


async def test_a_topic_is_asked_for_once_by_all_who_want_it() -> None:
    catalogue, cluster = known("orders")
    assert catalogue.peek("orders") is None
    found = await asyncio.gather(*(catalogue.get("orders", time.monotonic()) for _ in range(5)))
    assert set(map(id, found)) == {id(cluster.topics["orders"])}
    assert catalogue.peek("orders") is cluster.topics["orders"]
    await catalogue.get("orders", time.monotonic())
    assert cluster.asked == [["orders"]]


async def test_a_new_topic_is_found_by_the_first_who_asks() -> None:
    catalogue, cluster = known()
    assert await catalogue.get("orders", time.monotonic()) is None
    cluster.topics |= FakeCluster(["orders"]).topics
    assert await catalogue.get("orders", time.monotonic()) is cluster.topics["orders"]


async def test_a_look_up_that_began_before_the_topic_was_made_is_not_believed() -> None:
    catalogue, cluster = known()
    early = asyncio.create_task(catalogue.get("orders", time.monotonic()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert cluster.asked
    cluster.topics |= FakeCluster(["orders"]).topics
    late = [asyncio.create_task(catalogue.get("orders", time.monotonic())) for _ in range(5)]
    assert [await one for one in late] == [cluster.topics["orders"]] * 5
    assert await early is None
    assert len(cluster.asked) == 2


async def test_a_topic_that_vanished_is_known_to_those_who_were_let_in() -> None:
    catalogue, cluster = known("orders")
    was = await catalogue.get("orders", time.monotonic())
    cluster.topics.clear()
    catalogue.doubt("orders")
    assert await catalogue.get("orders", time.monotonic()) is None
    assert catalogue.peek("orders") is None
    assert catalogue.last_known("orders") is was


async def test_what_was_known_will_do_while_kafka_is_away() -> None:
    catalogue, cluster = known("orders")
    was = await catalogue.get("orders", time.monotonic())
    cluster.away = True
    catalogue.doubt("orders")
    assert await catalogue.get("orders", time.monotonic()) is was
    with pytest.raises(KafkaAway):
        await catalogue.get("other", time.monotonic())
    cluster.away = False
    assert await catalogue.get("other", time.monotonic()) is None, "a failed look-up was taken for an answer"


async def test_a_doubt_asks_again() -> None:
    catalogue, cluster = known("orders")
    await catalogue.get("orders", time.monotonic())
    catalogue.doubt("orders")
    catalogue.doubt("never-asked")
    assert catalogue.peek("orders") is None
    await catalogue.get("orders", time.monotonic())
    assert len(cluster.asked) == 2


async def test_a_caller_that_goes_away_does_not_end_the_look_up_of_others() -> None:
    catalogue, cluster = known("orders")
    gone, here = (asyncio.create_task(catalogue.get("orders", time.monotonic())) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await here is cluster.topics["orders"]


async def test_names_that_nobody_made_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABSENT_MAX", 3)
    catalogue, _ = known("orders")
    for n in range(10):
        assert await catalogue.get(f"nobody-{n}", time.monotonic()) is None
    assert await catalogue.get("orders", time.monotonic()) is not None
    assert list(catalogue._known) == ["orders"]
    assert list(catalogue._absent) == ["nobody-7", "nobody-8", "nobody-9"]
    assert not catalogue._asking


async def test_who_came_before_a_topic_was_asked_for_in_vain_believes_that() -> None:
    """The events of a batch came together: they do not ask one after the other."""
    catalogue, cluster = known()
    arrived = time.monotonic()
    for _ in range(10):
        assert await catalogue.get("orders", arrived) is None
    assert len(cluster.asked) == 1
    cluster.topics |= FakeCluster(["orders"]).topics
    assert await catalogue.get("orders", time.monotonic()) is cluster.topics["orders"]


async def test_that_replicas_lack_is_believed_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_S", 0.01)
    catalogue, cluster = known("orders", "other")
    cluster.topics["orders"] = Topic("orders", 3, {}, frozenset({1}))
    for name in ("orders", "other"):
        await catalogue.get(name, time.monotonic())
    assert catalogue.peek("orders") is not None
    await asyncio.sleep(0.02)
    assert catalogue.peek("orders") is None
    assert catalogue.peek("other") is not None


async def test_what_failed_is_looked_at_again_and_what_was_known_will_do() -> None:
    catalogue, cluster = known("orders", "other")
    for name in ("orders", "other"):
        await catalogue.get(name, time.monotonic())
    short = cluster.topics["orders"] = Topic("orders", 3, {}, frozenset({1}))
    await catalogue.look_again(["orders", "other"])
    assert catalogue.last_known("orders") is not short
    catalogue.doubt("orders")
    await catalogue.look_again(["orders", "other"])
    assert catalogue.last_known("orders") is short
    cluster.away = True
    catalogue.doubt("orders")
    await catalogue.look_again(["orders", "never-asked"])
    assert catalogue.last_known("orders") is short
