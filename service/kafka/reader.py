"""Reads partitions from an offset through a record that is known to exist, and looks up offsets."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from aiokafka import ConsumerRecord, errors
from aiokafka.structs import TopicPartition

from service.kafka.admin import KafkaAdmin
from service.kafka.client import Consumer
from service.kafka.deadline import within

Isolation = Literal["read_committed", "read_uncommitted"]
Batches = dict[TopicPartition, list[ConsumerRecord]]
# How long a broker holds a fetch without new data: markers come within milliseconds.
FETCH_WAIT_MS: Final = 20
STOP_TIMEOUT_S: Final = 1.0
# Bytes of one partition, and of all, in one fetch: unpacking a response blocks the event loop, and the next response
# arrives meanwhile. A larger record still comes whole, from one partition at a time (KIP-74).
FETCH_BYTES_MAX: Final = 128 * 1024
FETCH_BYTES_ALL: Final = 512 * 1024


class Span(NamedTuple):
    """The first offset to read (None: the log's start), and the offset of the last record to read."""

    start: int | None
    through: int


class Item(NamedTuple):
    """One record that was read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


async def read_through(
    admin: KafkaAdmin, topic: str, spans: Mapping[int, Span], isolation: Isolation, timeout_s: float
) -> AsyncGenerator[list[Item], None]:
    """Yield the records of each partition, in order, until each has been read through its span's last record.

    An absence before that record is proven: the leader that served the record has everything before it. A start that
    retention has deleted becomes the log's start. Raises KafkaAway where no record arrives for `timeout_s`.
    """
    consumer = _consumer(admin, isolation)
    try:
        await within(timeout_s, consumer.start())
        waiting = {TopicPartition(topic, number): span for number, span in spans.items()}
        consumer.assign(list(waiting))
        for partition, span in waiting.items():
            consumer.seek(partition, max(span.start or 0, 0))
        while waiting:
            batches = await within(timeout_s, _more(consumer, waiting, timeout_s))
            for partition, records in batches.items():
                yield [Item(partition.partition, record.offset, record.key, record.value) for record in records]
                if records[-1].offset >= waiting[partition].through:
                    del waiting[partition]
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise admin.failed("read", f"{topic} cannot be read: {error!r}") from error
    finally:
        await _stop(consumer)


async def read_between(
    admin: KafkaAdmin, topic: str, spans: Mapping[int, tuple[int, int]], timeout_s: float
) -> AsyncGenerator[list[Item], None]:
    """Yield the committed records of each partition from the first offset up to, and without, the second.

    For diagnostics only: without reading through an own record, an absence is not proven. Raises KafkaAway where no
    record arrives for `timeout_s`.
    """
    consumer = _consumer(admin, "read_committed")
    waiting = {TopicPartition(topic, number): span for number, span in spans.items() if span[0] < span[1]}
    try:
        await within(timeout_s, consumer.start())
        consumer.assign(list(waiting))
        for partition, (start, _) in waiting.items():
            consumer.seek(partition, max(start, 0))
        while waiting:
            async with asyncio.timeout(timeout_s):
                batches: dict[TopicPartition, list[ConsumerRecord]] = {}
                while not batches and waiting:
                    batches = await consumer.getmany(*waiting, timeout_ms=100)
                    # A span may end with markers, which are not returned: only the position shows that it is read.
                    at = {partition: await consumer.position(partition) for partition in waiting}
                    waiting = {partition: span for partition, span in waiting.items() if at[partition] < span[1]}
            for partition, records in batches.items():
                end = spans[partition.partition][1]
                yield [Item(partition.partition, r.offset, r.key, r.value) for r in records if r.offset < end]
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise admin.failed("read", f"{topic} cannot be read: {error!r}") from error
    finally:
        await _stop(consumer)


async def high_watermarks(admin: KafkaAdmin, topic: str, partitions: Sequence[int]) -> dict[int, int]:
    """Look up the high watermark of each partition: the offset of its next record. Raises KafkaAway."""
    wanted = [TopicPartition(topic, number) for number in partitions]
    found = await _look_up(admin, lambda consumer: consumer.end_offsets(wanted))
    return {partition.partition: offset for partition, offset in found.items()}


async def offsets_since(
    admin: KafkaAdmin, topic: str, partitions: Sequence[int], since_ms: int
) -> dict[int, int | None]:
    """Look up each partition's first record of `since_ms` (epoch ms) or later; None where there is none."""
    times = {TopicPartition(topic, number): since_ms for number in partitions}
    found = await _look_up(admin, lambda consumer: consumer.offsets_for_times(times))
    return {partition.partition: None if at is None else at.offset for partition, at in found.items()}


async def _look_up(admin: KafkaAdmin, ask: Callable[[Consumer], Coroutine[Any, Any, Any]]) -> Any:
    """Ask by a consumer of its own, within the request timeout. Raises KafkaAway."""
    consumer = _consumer(admin, "read_uncommitted")
    try:
        await within(admin.timeout_s, consumer.start())
        return await within(admin.timeout_s, ask(consumer))
    except (errors.KafkaError, OSError, TimeoutError) as error:
        raise admin.failed("read", f"offsets cannot be read: {error!r}") from error
    finally:
        await _stop(consumer)


async def _more(consumer: Consumer, partitions: Iterable[TopicPartition], timeout_s: float) -> Batches:
    """Wait for the next records of any of the partitions. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not (batches := await consumer.getmany(*partitions, timeout_ms=200)):
        if time.monotonic() > deadline:
            raise TimeoutError
    return cast("Batches", batches)


async def _stop(consumer: Consumer) -> None:
    """Stop a consumer and ignore errors: its records are read, and a read error is raised by itself."""
    with contextlib.suppress(Exception):
        await within(STOP_TIMEOUT_S, consumer.stop())


def _consumer(admin: KafkaAdmin, isolation: Isolation) -> Consumer:
    return Consumer(
        admin.options("reader"),
        isolation_level=isolation,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # the default, latest, skips silently
        fetch_max_wait_ms=FETCH_WAIT_MS,
        max_partition_fetch_bytes=FETCH_BYTES_MAX,
        fetch_max_bytes=FETCH_BYTES_ALL,
    )
