"""Requests to Kafka without a JVM, by librdkafka: what a plan asks for if no log has changed (without_spark.idle).

A request that fails, or that only a changed log needs, raises NeedsSpark: the run with Spark asks again, by
kafka-clients (kafka_admin), and reports what is wrong.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import confluent_kafka
from confluent_kafka import IsolationLevel, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports them from here
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from service.contract import SharedSettings
from service.contract.wire.names import is_kafka_topic
from spark.errors import NeedsSpark
from spark.reading import connection
from spark.reading.kafka_admin import BlockingTransaction, Ends, Topic, TopicPartition

# Shorter than that of kafka_admin: after it the run with Spark waits for the brokers.
CALL_S: Final = 10.0

_LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_EARLIEST: Final[OffsetSpec] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]

# A broker that cannot be reached is reported by the run with Spark.
_SILENT: Final = logging.getLogger(f"{__name__}.librdkafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False

# librdkafka encodes a topic id with the alphabet of RFC 4648, section 4, kafka-clients with that of section 5.
_TO_URL_SAFE: Final = str.maketrans("+/", "-_")


class LibrdkafkaAdmin:
    """The requests of `planning.Admin` for logs without a change; each of the others raises NeedsSpark.

    `listed` are the last known ends of each partition. `has_failed`: a request has failed, or was not answered.
    """

    def __init__(self, shared: SharedSettings) -> None:
        self.listed: dict[TopicPartition, Ends] = {}
        self.has_failed = False
        with self._failing():
            self._client = AdminClient({**connection.for_librdkafka(shared)}, logger=_SILENT)

    def names(self) -> list[str]:
        """List the names of all topics but Kafka's internal ones."""
        with self._failing():
            listed = self._client.list_topics(timeout=CALL_S)
        return sorted(name for name in listed.topics if not is_kafka_topic(name))

    def describe(self, names: Sequence[str], *, strict: bool = True) -> dict[str, Topic]:
        """Describe these topics, by name; topics that do not exist are left out.

        None are described if not `strict`: these are topics that new records of ledger or journal may name.
        """
        existing = sorted(set(names) & set(self.names())) if strict else []
        if not existing:
            return {}
        with self._failing():
            answers = self._client.describe_topics(TopicCollection(existing), request_timeout=CALL_S)
            described = [answer.result(CALL_S) for answer in answers.values()]
        return {one.name: Topic(one.name, _text_of(one.topic_id), len(one.partitions)) for one in described}

    def compacted(self, names: Sequence[str]) -> set[str]:
        """Return the names of those topics that are compacted."""
        if not names:
            return set()
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        with self._failing():
            answers = self._client.describe_configs(resources, request_timeout=CALL_S)
            configs = {resource.name: answer.result(CALL_S) for resource, answer in answers.items()}
        return {name for name, config in configs.items() if "compact" in str(config["cleanup.policy"].value)}

    def ends(self, partitions: Sequence[TopicPartition], *, strict: bool = True) -> Mapping[TopicPartition, Ends]:
        """List the ends of these partitions, the high watermark first and then the last stable offset; none if not
        `strict` (`describe`)."""
        if not partitions or not strict:
            return {}
        high = self._offsets(partitions, _LATEST, IsolationLevel.READ_UNCOMMITTED)
        stable = self._offsets(partitions, _LATEST, IsolationLevel.READ_COMMITTED)
        start = self._offsets(partitions, _EARLIEST, IsolationLevel.READ_UNCOMMITTED)
        with self._failing():
            if any(answer.leader_epoch is None for answer in stable.values()):
                raise ValueError("the leader of a partition sent no epoch")
        found = {
            one: Ends(start[one].offset, high[one].offset, stable[one].offset, stable[one].leader_epoch)
            for one in partitions
        }
        self.listed |= found
        return found

    def timestamps_at(self, partitions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Refuse to read records."""
        return _nothing_of(partitions)

    def blocking_transactions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, BlockingTransaction]:
        """Refuse to look for open transactions."""
        return _nothing_of(partitions)

    def diverged(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]:
        """Refuse to compare logs with their new leaders'."""
        return _nothing_of(positions)

    def _offsets(
        self, partitions: Iterable[TopicPartition], spec: OffsetSpec, isolation: IsolationLevel
    ) -> dict[TopicPartition, Any]:
        """Request the offset of each partition: a ListOffsetsResultInfo."""
        wanted = {confluent_kafka.TopicPartition(*partition): spec for partition in partitions}
        with self._failing():
            answers = self._client.list_offsets(wanted, isolation_level=isolation, request_timeout=CALL_S)
            return {(one.topic, one.partition): answer.result(CALL_S) for one, answer in answers.items()}

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise NeedsSpark for a request that fails, or is not answered in time, and note that in `has_failed`."""
        try:
            yield
        except (KafkaException, TimeoutError, ValueError) as error:
            self.has_failed = True
            raise NeedsSpark(str(error)) from error


def _nothing_of(partitions: Collection[Any]) -> dict[TopicPartition, Any]:
    """Return nothing about no partitions; NeedsSpark about any."""
    if partitions:
        raise NeedsSpark("a log has changed")
    return {}


def _text_of(topic_id: object) -> str:
    """Return a topic id as kafka-clients writes it."""
    return str(topic_id).translate(_TO_URL_SAFE)
