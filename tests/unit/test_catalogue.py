"""What is believed of topics, for how long, and when Kafka is away."""

import asyncio

import pytest

from service import topics as module
from service.errors import KafkaAway
from service.topics import Catalogue
from tests.unit.fakes import FakeCluster


def known(*topics: str) -> tuple[Catalogue, FakeCluster]:
    cluster = FakeCluster(topics)
    return Catalogue(cluster), cluster


async def test_a_topic_is_asked_for_once_by_all_who_want_it() -> None:
    catalogue, cluster = known("orders")
    assert catalogue.peek("orders") is None
    found = await asyncio.gather(*(catalogue.get("orders") for _ in range(5)))
    assert set(map(id, found)) == {id(cluster.topics["orders"])}
    assert catalogue.peek("orders") is cluster.topics["orders"]
    await catalogue.get("orders")
    assert cluster.asked == [["orders"]]


async def test_that_there_is_no_topic_is_believed_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNKNOWN_S", 0.01)
    catalogue, cluster = known()
    assert await catalogue.get("orders") is None
    cluster.topics |= FakeCluster(["orders"]).topics
    await asyncio.sleep(0.02)
    assert await catalogue.get("orders") is cluster.topics["orders"]


async def test_a_topic_that_vanished_is_known_to_those_who_were_let_in() -> None:
    catalogue, cluster = known("orders")
    was = await catalogue.get("orders")
    cluster.topics.clear()
    catalogue.doubt("orders")
    assert await catalogue.get("orders") is None
    assert catalogue.peek("orders") is None
    assert catalogue.last_known("orders") is was


async def test_what_was_known_will_do_while_kafka_is_away() -> None:
    catalogue, cluster = known("orders")
    was = await catalogue.get("orders")
    cluster.away = True
    catalogue.doubt("orders")
    assert await catalogue.get("orders") is was
    with pytest.raises(KafkaAway):
        await catalogue.get("other")
    cluster.away = False
    assert await catalogue.get("other") is None, "a failed look-up was taken for an answer"


async def test_a_doubt_asks_again() -> None:
    catalogue, cluster = known("orders")
    await catalogue.get("orders")
    catalogue.doubt("orders")
    catalogue.doubt("never-asked")
    assert catalogue.peek("orders") is None
    await catalogue.get("orders")
    assert len(cluster.asked) == 2


async def test_a_caller_that_goes_away_does_not_end_the_look_up_of_others() -> None:
    catalogue, cluster = known("orders")
    gone, here = asyncio.create_task(catalogue.get("orders")), asyncio.create_task(catalogue.get("orders"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await here is cluster.topics["orders"]


async def test_names_that_nobody_made_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CATALOGUE_MAX", 3)
    catalogue, cluster = known("orders")
    for n in range(10):
        assert await catalogue.get(f"nobody-{n}") is None
    assert len(catalogue._known) == 3
    assert await catalogue.get("orders") is cluster.topics["orders"]
    assert catalogue.peek("orders") is not None
