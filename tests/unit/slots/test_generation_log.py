"""Tests reading of the control topic, and from which offset on."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from service.claims.keys import StoreGeneration
from service.contract.wire.control import GENERATION_KEY, Generation
from service.contract.wire.versions import NewerVersion
from service.kafka.reader import Span
from service.slots import generation_log as module
from service.slots.generation_log import Control
from tests.unit.contract.test_wire import vectors
from tests.unit.fakes import unreachable_kafka


class _Item:
    def __init__(self, offset: int, key: bytes, value: bytes) -> None:
        self.offset, self.key, self.value = offset, key, value


KEY_TTL_S = 86_400


class _Topic:
    """The control topic in memory; `clear` creates it again."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes, bytes]] = []
        self.spans: list[Span] = []

    async def send(self, topic: str, partition: int, key: bytes, value: bytes) -> int:
        self.records.append((key, value))
        return len(self.records) - 1

    async def read(self, cluster: Any, topic: str, spans: Mapping[int, Span], *_: object) -> AsyncIterator[list[_Item]]:
        span = spans[0]
        self.spans.append(span)
        assert span.start is not None
        yield [_Item(offset, *self.records[offset]) for offset in range(span.start, span.through + 1)]


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> _Topic:
    topic = _Topic()
    monkeypatch.setattr(module, "read_through", topic.read)
    return topic


@pytest.fixture
def control(topic: _Topic) -> Control:
    control = Control(unreachable_kafka(), "fp.control", "test", KEY_TTL_S)
    control._producer = topic  # type: ignore[assignment]
    return control


async def test_control_records_are_read_once(topic: _Topic, control: Control) -> None:
    assert await control.newest_generation() is None
    generation = await control.append("run/repl")
    for _ in range(2):
        assert await control.newest_generation() == StoreGeneration(generation, "run/repl")
    assert topic.spans == [Span(0, 0), Span(1, 2), Span(3, 3)]


async def test_each_recovered_slot_is_covered_by_a_barrier(topic: _Topic, control: Control) -> None:
    """Also slots that shared one, for a process that knows fewer slots."""
    await asyncio.gather(control.newest_generation(70), control.newest_generation(99), control.newest_generation(3))
    await control.newest_generation()
    assert [key for key, _ in topic.records] == [b"barrier/99", b"barrier/0"]
    assert control.slots == 100
    other = Control(unreachable_kafka(), "fp.control", "other", KEY_TTL_S)
    other._producer = topic  # type: ignore[assignment]
    topic.records += [(b"barrier/odd", b""), (b"barrier/123456", b"")]
    assert other.slots == 0
    await other.newest_generation()
    assert other.slots == 100
    topic.records.clear()
    await other.newest_generation(2)
    assert other.slots == 3


async def test_the_longest_retention_of_any_rules_is_remembered_for_each_process(
    topic: _Topic, control: Control
) -> None:
    for ttl_s in (KEY_TTL_S, 500_000, 400_000, 500_000, 600_000):  # a restart would write each again
        await control.remember_retention(ttl_s)
    assert [key for key, _ in topic.records] == [b"retention/500000", b"retention/600000"]
    other = Control(unreachable_kafka(), "fp.control", "other", KEY_TTL_S)
    other._producer = topic  # type: ignore[assignment]
    await other.remember_retention(300_000)
    assert await other.newest_generation() is None
    assert other.longest_ttl_s == 600_000
    topic.records.clear()
    await other.newest_generation()
    assert other.longest_ttl_s == 0


async def test_a_recreated_control_topic_is_read_from_its_beginning(topic: _Topic, control: Control) -> None:
    """A running process must not keep the generation of the earlier topic."""
    for _ in range(5):
        await control.append("run/old")
        await control.newest_generation()
    topic.records.clear()
    topic.records.append((GENERATION_KEY, Generation("run/new", "other", 1).encode()))
    assert await control.newest_generation() == StoreGeneration(0, "run/new")
    topic.records.clear()
    assert await control.newest_generation() is None


@pytest.mark.parametrize("text", vectors("records", "generation_newer"))
async def test_a_generation_of_a_later_version_is_refused_by_each_read(
    topic: _Topic, control: Control, text: str
) -> None:
    """The store that it names is not known: another one must not be taken for it."""
    await control.append("run/repl")
    topic.records.append((GENERATION_KEY, text.encode()))
    for _ in range(2):
        with pytest.raises(NewerVersion):
            await control.newest_generation()
