"""Reading partitions from a place through a record that is known to be there."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from aiokafka import ConsumerRecord, errors
from aiokafka.structs import TopicPartition

from service.kafka.admin import KafkaAdmin
from service.kafka.connection import Consumer
from service.kafka.deadline import within

Isolation = Literal["read_committed", "read_uncommitted"]
Batches = dict[TopicPartition, list[ConsumerRecord]]
# A fetch that finds nothing new waits this long at the broker: markers come within milliseconds.
FETCH_WAIT_MS: Final = 20
STOP_PATIENCE_S: Final = 1.0
# Of one partition, and of all, in one fetch: what it brings is worked on while the next one comes, and to unpack it
# stops the event loop, for some 7 ms. A larger record comes whole all the same, from one partition at a time (KIP-74).
FETCH_BYTES_MAX: Final = 128 * 1024
FETCH_BYTES_ALL: Final = 512 * 1024


class Span(NamedTuple):
    """From where to read (None: from the log's start), and the offset of the record to read through."""

    start: int | None
    through: int


class Item(NamedTuple):
    """One record that was read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


async def read_through(
    cluster: KafkaAdmin, topic: str, spans: Mapping[int, Span], isolation: Isolation, patience_s: float
) -> AsyncGenerator[list[Item], None]:
    """Yield the records of each partition, in order, until each has been read through its span's last record.

    "Not there" may be believed of what precedes that record: the leader that showed it has all before it. A start that
    retention has passed is the log's start. Raises KafkaAway where nothing comes for `patience_s`.
    """
    consumer = _consumer(cluster, isolation)
    try:
        await within(patience_s, consumer.start())
        waiting = {TopicPartition(topic, partition): span for partition, span in spans.items()}
        consumer.assign(list(waiting))
        for place, span in waiting.items():
            consumer.seek(place, max(span.start or 0, 0))
        while waiting:
            batches = await within(patience_s, _more(consumer, waiting, patience_s))
            for place, records in batches.items():
                yield [Item(place.partition, record.offset, record.key, record.value) for record in records]
                if records[-1].offset >= waiting[place].through:
                    del waiting[place]
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise cluster.failed("read", f"{topic} cannot be read: {error!r}") from error
    finally:
        await _stop(consumer)


async def read_between(
    cluster: KafkaAdmin, topic: str, spans: Mapping[int, tuple[int, int]], patience_s: float
) -> AsyncGenerator[list[Item], None]:
    """Yield the committed records of each partition from the first offset up to, and without, the second.

    For whoever looks on: without a record of one's own to read through, "not there" is no proof. Raises KafkaAway where
    nothing comes for `patience_s`.
    """
    consumer = _consumer(cluster, "read_committed")
    waiting = {TopicPartition(topic, partition): span for partition, span in spans.items() if span[0] < span[1]}
    try:
        await within(patience_s, consumer.start())
        consumer.assign(list(waiting))
        for place, (start, _) in waiting.items():
            consumer.seek(place, max(start, 0))
        while waiting:
            async with asyncio.timeout(patience_s):
                batches: dict[TopicPartition, list[ConsumerRecord]] = {}
                while not batches and waiting:
                    batches = await consumer.getmany(*waiting, timeout_ms=100)
                    # Markers are no records: only the position tells that the end is reached.
                    at = {place: await consumer.position(place) for place in waiting}
                    waiting = {place: span for place, span in waiting.items() if at[place] < span[1]}
            for place, records in batches.items():
                end = spans[place.partition][1]
                yield [Item(place.partition, r.offset, r.key, r.value) for r in records if r.offset < end]
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise cluster.failed("read", f"{topic} cannot be read: {error!r}") from error
    finally:
        await _stop(consumer)


async def ends(cluster: KafkaAdmin, topic: str, partitions: Sequence[int]) -> dict[int, int]:
    """The high watermark of each partition: the offset of its next record, committed or not. Raises KafkaAway."""
    places = [TopicPartition(topic, partition) for partition in partitions]
    found = await _look_up(cluster, lambda consumer: consumer.end_offsets(places))
    return {place.partition: offset for place, offset in found.items()}


async def offsets_since(
    cluster: KafkaAdmin, topic: str, partitions: Sequence[int], since_ms: int
) -> dict[int, int | None]:
    """The offset of each partition's first record of `since_ms` (epoch ms) or later; None where there is none."""
    times = {TopicPartition(topic, partition): since_ms for partition in partitions}
    found = await _look_up(cluster, lambda consumer: consumer.offsets_for_times(times))
    return {place.partition: None if at is None else at.offset for place, at in found.items()}


async def _look_up(cluster: KafkaAdmin, ask: Callable[[Consumer], Coroutine[Any, Any, Any]]) -> Any:
    consumer = _consumer(cluster, "read_uncommitted")
    try:
        await within(cluster.timeout_s, consumer.start())
        return await within(cluster.timeout_s, ask(consumer))
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise cluster.failed("read", f"offsets cannot be read: {error!r}") from error
    finally:
        await _stop(consumer)


async def _more(consumer: Consumer, places: Iterable[TopicPartition], patience_s: float) -> Batches:
    """The next records, of whichever partitions have some. Raises TimeoutError."""
    deadline = time.monotonic() + patience_s
    while not (batches := await consumer.getmany(*places, timeout_ms=200)):
        if time.monotonic() > deadline:
            raise TimeoutError
    return cast("Batches", batches)


async def _stop(consumer: Consumer) -> None:
    """Whatever comes of it: what was read is read, and what failed is told by its own error."""
    with contextlib.suppress(Exception):
        await within(STOP_PATIENCE_S, consumer.stop())


def _consumer(cluster: KafkaAdmin, isolation: Isolation) -> Consumer:
    return Consumer(
        cluster.options("reader"),
        isolation_level=isolation,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # the default, latest, skips silently
        fetch_max_wait_ms=FETCH_WAIT_MS,
        max_partition_fetch_bytes=FETCH_BYTES_MAX,
        fetch_max_bytes=FETCH_BYTES_ALL,
    )
