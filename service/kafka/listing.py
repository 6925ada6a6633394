"""Lists the topics of a cluster with their partitions, leaders and replicas, for clients that ask for them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from aiokafka import errors

from service.kafka.deadline import shared
from service.kafka.metadata import decode_metadata

# How long a list of all topics is used: to ask for one costs a broker, and this process, time by the number of topics.
LISTED_S: Final = 10.0
# Requests about single topics at a time, so that clients that ask do not delay the service's own requests.
ASKED_AT_ONCE: Final = 4
# The longest wait for one of these requests to begin: while Kafka is away, each takes its whole timeout.
PERMIT_S: Final = 10.0
# Error codes of topics and partitions that exist.
_EXISTS: Final = (errors.NoError.errno, errors.LeaderNotAvailableError.errno)


class ListedPartition(NamedTuple):
    """A partition: its number, and the ids of brokers. `leader` is -1 where it has none."""

    number: int
    leader: int
    replicas: Sequence[int]
    in_sync: Sequence[int]


class ListedTopic(NamedTuple):
    """A topic and its partitions by number. `is_internal`: it is Kafka's own."""

    name: str
    is_internal: bool
    partitions: Sequence[ListedPartition]


class Listing(NamedTuple):
    """The cluster's id and the id of its controller's broker (-1: unknown), and topics by name, in its order."""

    cluster_id: str
    controller: int
    topics: Mapping[str, ListedTopic]


def listing_of(response: bytes) -> Listing:
    """Decode the response to an UndecodedMetadata; runs in a thread."""
    answer = decode_metadata(response)
    topics: dict[str, ListedTopic] = {}
    for code, name, _id, is_internal, rows, *_ in sorted(map(tuple, answer.topics), key=lambda topic: str(topic[1])):
        if code in _EXISTS:
            partitions = (ListedPartition(*row[1:3], *row[4:6]) for row in map(tuple, rows))
            topics[name] = ListedTopic(name, is_internal, sorted(partitions))
    return Listing(answer.cluster_id or "", answer.controller_id, topics)


class Described(Protocol):
    """A topic with its effective settings, by Kafka's names."""

    @property
    def settings(self) -> Mapping[str, str]: ...


class TopicLister:
    """Asks for topics within bounds, whatever the number of clients that ask."""

    def __init__(
        self,
        list_topics: Callable[[Sequence[str] | None], Coroutine[Any, Any, Listing]],
        describe: Callable[[Sequence[str]], Coroutine[Any, Any, Mapping[str, Described]]],
    ) -> None:
        self._list_topics = list_topics
        self._describe = describe
        self._all: asyncio.Task[Listing] | None = None  # the last request for all topics
        self._asked_at = 0.0  # when that began, by time.monotonic
        self._permits = asyncio.Semaphore(ASKED_AT_ONCE)

    async def all(self) -> Listing:
        """List all topics, as they were at most LISTED_S ago. Raises KafkaAway."""
        if self._all is None or self._is_over(self._all):
            self._asked_at = time.monotonic()
            self._all = asyncio.create_task(self._list_topics(None))
        return await shared(self._all)

    def _is_over(self, asked: "asyncio.Task[Listing]") -> bool:
        failed = asked.done() and (asked.cancelled() or asked.exception() is not None)
        return failed or (asked.done() and time.monotonic() >= self._asked_at + LISTED_S)

    async def some(self, *names: str) -> Listing:
        """List topics, as they are now; without names, the cluster only. Raises KafkaAway, TimeoutError."""
        async with self._permit():
            return await self._list_topics(names)

    async def settings_of(self, name: str) -> Mapping[str, str]:
        """Look up the settings of a topic, as they are now; none if it does not exist. Raises as `some`."""
        async with self._permit():
            found = await self._describe([name])
        return found[name].settings if name in found else {}

    @contextlib.asynccontextmanager
    async def _permit(self) -> AsyncIterator[None]:
        """Let one request be under way. Raises TimeoutError if others are for PERMIT_S."""
        async with asyncio.timeout(PERMIT_S):
            await self._permits.acquire()
        try:
            yield
        finally:
            self._permits.release()

    def close(self) -> None:
        """Cancel a request that is under way."""
        if self._all is not None:
            self._all.cancel()
