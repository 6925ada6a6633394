"""Tests the lists of topics: the request and its response on the wire, and how often Kafka is asked."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from service.core.problems import KafkaAway
from service.kafka import listing as module
from service.kafka.listing import ListedPartition, ListedTopic, Listing, TopicLister, listing_of
from service.kafka.metadata import UndecodedMetadata
from service.kafka.topic_admin import Topic
from tests.unit.fakes import until

EMPTY = Listing("c1", 1, {})
# A response of Metadata version 10 by https://kafka.apache.org/protocol: two topics, of which one does not exist.
RESPONSE = (
    b"\x00\x00\x00\x00"  # throttle time
    b"\x02" b"\x00\x00\x00\x01" b"\x02a" b"\x00\x00\x23\x84" b"\x00" b"\x00"  # one broker
    b"\x03c1" b"\x00\x00\x00\x01"  # cluster, controller
    b"\x03"
    b"\x00\x03" b"\x05none" + bytes(16) + b"\x00" b"\x01" b"\x80\x00\x00\x00" b"\x00"
    b"\x00\x00" b"\x07orders" + bytes(16) + b"\x01"
    b"\x03"
    b"\x00\x00" b"\x00\x00\x00\x01" b"\xff\xff\xff\xff" b"\x00\x00\x00\x00" b"\x02\x00\x00\x00\x01" b"\x01"
    b"\x01" b"\x00"
    b"\x00\x00" b"\x00\x00\x00\x00" b"\x00\x00\x00\x01" b"\x00\x00\x00\x00" b"\x03\x00\x00\x00\x01\x00\x00\x00\x02"
    b"\x02\x00\x00\x00\x01" b"\x01" b"\x00"
    b"\x80\x00\x00\x00" b"\x00"
    b"\x80\x00\x00\x00" b"\x00"
)  # fmt: skip


def test_a_response_is_decoded_to_the_topics_that_exist() -> None:
    partitions = [ListedPartition(0, 1, [1, 2], [1]), ListedPartition(1, -1, [1], [])]
    assert listing_of(RESPONSE) == Listing("c1", 1, {"orders": ListedTopic("orders", True, partitions)})


def test_a_response_is_decoded_by_its_reader_and_not_by_the_client() -> None:
    request = UndecodedMetadata(None).prepare({3: (0, 13)})
    assert request.RESPONSE_TYPE.decode(RESPONSE) == RESPONSE


@pytest.mark.parametrize(
    ("topics", "encoded"), [(None, b"\x00"), ([], b"\x01"), (["a"], b"\x02" + bytes(16) + b"\x02a\x00")]
)
def test_a_request_names_topics_or_asks_for_all(topics: list[str] | None, encoded: bytes) -> None:
    request = UndecodedMetadata(topics).prepare({3: (0, 13)})
    assert request.FLEXIBLE_VERSION
    assert request.encode() == encoded + b"\x00\x00\x00" + b"\x00"


class Asked:
    """A cluster that counts what it is asked, and answers when a test says so."""

    def __init__(self) -> None:
        self.names: list[Sequence[str] | None] = []
        self.may_answer = asyncio.Event()
        self.away = False

    async def list_topics(self, names: Sequence[str] | None) -> Listing:
        self.names.append(names)
        await self.may_answer.wait()
        if self.away:
            raise KafkaAway("away")
        return EMPTY

    async def describe(self, names: Sequence[str]) -> dict[str, Topic]:
        self.names.append(names)
        await self.may_answer.wait()
        return {name: Topic(name, 1, {"retention.ms": "1"}) for name in names if name != "gone"}


async def test_clients_share_a_list_of_all_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    lister = TopicLister(asked.list_topics, asked.describe)
    waiting = [asyncio.create_task(lister.all()) for _ in range(5)]
    await asyncio.sleep(0)
    asked.may_answer.set()
    assert await asyncio.gather(*waiting) == [EMPTY] * 5
    await lister.all()
    assert asked.names == [None]
    monkeypatch.setattr(module, "LISTED_S", 0.0)
    await lister.all()
    assert asked.names == [None] * 2


async def test_a_request_that_failed_is_made_again() -> None:
    asked = Asked()
    asked.may_answer.set()
    asked.away = True
    lister = TopicLister(asked.list_topics, asked.describe)
    with pytest.raises(KafkaAway):
        await lister.all()
    asked.away = False
    assert await lister.all() == EMPTY


async def test_few_requests_for_single_topics_are_under_way_at_a_time() -> None:
    asked = Asked()
    lister = TopicLister(asked.list_topics, asked.describe)
    waiting = [asyncio.create_task(lister.some(f"t{n}")) for n in range(10)]
    await until(lambda: len(asked.names) == module.ASKED_AT_ONCE)
    await asyncio.sleep(0.01)
    assert len(asked.names) == module.ASKED_AT_ONCE
    asked.may_answer.set()
    await asyncio.gather(*waiting)
    assert asked.names == [(f"t{n}",) for n in range(10)]


async def test_settings_are_asked_for_within_the_same_bound() -> None:
    asked = Asked()
    lister = TopicLister(asked.list_topics, asked.describe)
    waiting = [asyncio.create_task(lister.settings_of(name)) for name in ["gone", *"abcdefgh"]]
    await until(lambda: len(asked.names) == module.ASKED_AT_ONCE)
    asked.may_answer.set()
    assert await asyncio.gather(*waiting) == [{}, *[{"retention.ms": "1"}] * 8]


async def test_a_request_waits_for_others_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Kafka is away, the last of a thousand would wait for an hour."""
    monkeypatch.setattr(module, "PERMIT_S", 0.05)
    asked = Asked()
    lister = TopicLister(asked.list_topics, asked.describe)
    waiting = [asyncio.create_task(lister.some(f"t{n}")) for n in range(module.ASKED_AT_ONCE)]
    await until(lambda: len(asked.names) == module.ASKED_AT_ONCE)
    late: list[asyncio.Task[Any]] = [asyncio.create_task(late) for late in (lister.some("t"), lister.settings_of("t"))]
    await asyncio.wait(late, timeout=5.0)
    assert [each.done() and type(each.exception()) for each in late] == [TimeoutError] * 2
    asked.may_answer.set()
    await asyncio.gather(*waiting)
    assert await lister.some("t") == EMPTY


async def test_a_request_ends_with_the_service() -> None:
    asked = Asked()
    lister = TopicLister(asked.list_topics, asked.describe)
    lister.close()
    waiting = asyncio.create_task(lister.all())
    await until(lambda: bool(asked.names))
    lister.close()
    with pytest.raises(KafkaAway):
        await waiting
