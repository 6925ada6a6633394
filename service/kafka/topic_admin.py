"""Requests about topics: their partitions, their settings, their creation."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiokafka import errors
from aiokafka.protocol.admin import CreatePartitionsRequest, CreateTopicsRequest, DescribeConfigsRequest

from service.core.problems import KafkaForbids
from service.kafka.admin import KafkaAdmin
from service.kafka.listing import Listing, listing_of
from service.kafka.metadata import TOPIC_RESOURCE, Metadata, Partitions, UndecodedMetadata, partitions_of

# Kafka's default of a topic's max.message.bytes.
MESSAGE_BYTES_DEFAULT: Final = 1_048_588


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic's partitions and its effective settings, by Kafka's names."""

    name: str
    partitions: int
    settings: Mapping[str, str]
    # Partitions with fewer replicas in sync than `min.insync.replicas`. No transaction may include one: Kafka cannot
    # write the markers there, and the transactional id begins no other transaction before they are written (KIP-98).
    under_min_isr: frozenset[int] = frozenset()
    topic_id: str = ""  # changes when the topic is deleted and created again (KIP-516); "" where it is not known
    message_bytes_max: int = field(init=False)  # the largest record batch that the topic accepts, in bytes

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "message_bytes_max", int(self.settings.get("max.message.bytes", MESSAGE_BYTES_DEFAULT))
        )


class TopicAdmin:
    """Asks for topics, creates and grows them. Every call has a deadline and raises KafkaAway without an answer."""

    def __init__(self, admin: KafkaAdmin) -> None:
        self._admin = admin

    @property
    def timeout_s(self) -> float:
        """The time in which a call has an answer, or fails."""
        return self._admin.timeout_s

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        """Count the partitions of the topics that exist, without creating any."""
        return {name: len(found.replicas) for name, found in (await self._partitions(topics)).items()}

    async def _partitions(self, topics: Sequence[str], *, elsewhere: bool = False) -> dict[str, Partitions]:
        """Look up the ids and partitions of the topics that exist; `elsewhere` as for `describe`."""
        response = await self._admin.request(Metadata(topics), but_not=self._admin.answered_last if elsewhere else ())
        found: dict[str, Partitions] = {}
        for topic in map(tuple, response.topics):
            code, name, *_ = topic
            kind = errors.for_code(code)
            if kind in (errors.NoError, errors.LeaderNotAvailableError):
                found[name] = partitions_of(topic)
            elif kind is errors.TopicAuthorizationFailedError:
                self._admin.count_failure("metadata")
                raise KafkaForbids(f"the service has no permission to describe topic {name}")
            elif kind not in (errors.UnknownTopicOrPartitionError, errors.InvalidTopicError):
                raise self._admin.failed("metadata", f"topic {name}: {kind.__name__}")
        return found

    async def list_topics(self, names: Sequence[str] | None) -> Listing:
        """List topics with their partitions, or all topics; those that do not exist are left out. Raises KafkaAway.

        A cluster may have many topics, so the response is decoded in a thread.
        """
        return await asyncio.to_thread(listing_of, await self._admin.request(UndecodedMetadata(names)))

    async def describe(self, names: Sequence[str], *, elsewhere: bool = False) -> dict[str, Topic]:
        """Describe topics with their settings; topics that do not exist are left out.

        `elsewhere`: ask a broker other than the one that answered last, if there is another.
        """
        found = await self._partitions(names, elsewhere=elsewhere)
        if not found:
            return {}
        response = await self._admin.request(
            DescribeConfigsRequest([(TOPIC_RESOURCE, name, None) for name in found], include_synonyms=False)
        )
        topics: dict[str, Topic] = {}
        unsure = ""
        for code, _message, _kind, name, entries in (tuple(resource) for resource in response.resources):
            if code == errors.NoError.errno:
                settings = {entry[0]: entry[1] for entry in entries}
            elif errors.for_code(code) is errors.TopicAuthorizationFailedError:
                settings = {}  # no permission to read them: the broker itself refuses records that do not fit
            else:  # Metadata has just listed the topic: it is being created or deleted, or this broker lags behind
                unsure = f"topic {name}: its settings: {errors.for_code(code).__name__}"
                continue
            topic_id, replicas = found[name]
            topics[name] = Topic(name, len(replicas), settings, _under_min_isr(replicas, settings), topic_id)
        if unsure and not topics:
            raise self._admin.failed("metadata", unsure)
        return topics

    async def create(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Create a topic with the broker's default replication; TopicAlreadyExists is no error."""
        response = await self._admin.request_controller(
            CreateTopicsRequest(
                [(name, partitions, -1, [], list(settings.items()))], self._admin.request_timeout_ms, False
            )
        )
        ((_, code, *message),) = (tuple(row) for row in response.topic_errors)
        kind = errors.for_code(code)
        if kind not in (errors.NoError, errors.TopicAlreadyExistsError):
            raise self._admin.failed("admin", f"topic {name} was not created: {kind.__name__} {message}")

    async def grow(self, name: str, partitions: int) -> None:
        """Raise a topic's number of partitions."""
        response = await self._admin.request_controller(
            CreatePartitionsRequest([(name, (partitions, None))], self._admin.request_timeout_ms, False)
        )
        ((_, code, message),) = (tuple(row) for row in response.topic_errors)
        if code != errors.NoError.errno and (await self.partitions([name])).get(name, 0) < partitions:
            raise self._admin.failed("admin", f"topic {name} cannot get {partitions} partitions: {message}")


def _under_min_isr(replicas: Mapping[int, tuple[int, int]], settings: Mapping[str, str]) -> frozenset[int]:
    """Find the partitions under min ISR; `replicas` has (replicas, in-sync replicas) by partition.

    min.insync.replicas is capped at the number of replicas (KIP-966). Before Kafka 4 the broker refuses such records
    with an error of its own.
    """
    least = int(settings.get("min.insync.replicas") or 1)
    return frozenset(number for number, (count, in_sync) in replicas.items() if in_sync < min(least, count))
