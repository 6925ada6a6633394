"""Requests of the driver to Kafka: topics, offsets and open transactions. Only this module and `repair.copier` call
kafka-clients.

The calls go through the JVM that Spark runs in. `librdkafka_admin` makes those that a run without Spark needs.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from pyspark.sql import SparkSession

from service.contract import SharedSettings
from service.contract.wire.names import is_kafka_topic
from spark.engine.jvm import Py4JJavaError, jvm, nested, reason
from spark.errors import CannotRun
from spark.reading import connection

# Longer than an election of leaders takes, and short enough for a user who waits for the error.
CALL_MS: Final = 30_000
# How long a consumer's poll waits for records.
POLL_MS: Final = 250
# Topics in one request: keeps a request small enough for a quick answer.
TOPICS_A_CALL: Final = 500

_KAFKA_PACKAGE: Final = "org.apache.kafka."
"""The begin of the class names of kafka-clients' errors."""
_UNREACHED: Final = ("TimeoutException", "DisconnectException", "NetworkException", "AuthenticationException")
"""The ends of the class names of its errors without a connection, or without an answer in time."""

NO_LEADER_EPOCH: Final = -1
"""The leader epoch of an offset, if the leader sent none (as in Kafka's protocol)."""

TopicPartition = tuple[str, int]
"""Topic and partition."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of the cluster; `topic_id` is its unique id (KIP-516), which changes when the topic is recreated."""

    name: str
    topic_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Ends:
    """The first offset and the ends of a partition's log.

    `high_watermark` was listed before `last_stable`: if `last_stable >= high_watermark`, every record below the high
    watermark is decided. `leader_epoch` is the epoch of the leader that answered `last_stable`, or NO_LEADER_EPOCH.
    """

    log_start: int
    high_watermark: int
    last_stable: int
    leader_epoch: int = NO_LEADER_EPOCH


class _Lazy(Mapping[_Key, _Value]):
    """Values by key; a value is read from the JVM when it is looked up.

    A plan lists the partitions of all topics that the ledger may name, and needs the ends of those that it does name.
    """

    def __init__(self, keys: Collection[_Key], read: Callable[[_Key], _Value]) -> None:
        self._keys, self._read = keys, read

    def __getitem__(self, key: _Key) -> _Value:
        if key not in self._keys:
            raise KeyError(key)
        return self._read(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True, slots=True)
class BlockingTransaction:
    """An open transaction that blocks a partition. `transactional_id`, `since_ms`: None if the broker does not say."""

    producer_id: int
    epoch: int
    start_offset: int
    transactional_id: str | None = None
    since_ms: int | None = None


class KafkaAdmin:
    """Requests of the driver to the cluster. Every method raises CannotRun with the broker's message when it fails.

    `setting` is the name of the setting that has the cluster's address, for that message.
    """

    def __init__(self, spark: SparkSession, shared: SharedSettings, setting: str = "FENCEPOST_KAFKA") -> None:
        self._spark = spark
        self._jvm = jvm(spark)
        self._address = f"{setting}={shared.kafka!r}"
        self._connection = connection.for_kafka_clients(shared)
        self._kafka: Any = self._jvm.org.apache.kafka
        # py4j asks the JVM for a class at each look-up of its name.
        self._topic_partition: Any = self._kafka.common.TopicPartition
        config = self._config({"default.api.timeout.ms": str(CALL_MS), "request.timeout.ms": str(CALL_MS // 2)})
        try:
            self._admin: Any = self._kafka.clients.admin.AdminClient.create(config)
        except Py4JJavaError as error:
            raise CannotRun(f"{self._address} is no Kafka address: {reason(error)}") from error

    def close(self) -> None:
        """Close the connections."""
        self._admin.close(self._jvm.java.time.Duration.ofMillis(1000))

    def names(self) -> list[str]:
        """List the names of all topics but Kafka's internal ones."""
        # Joined in the JVM: each step of an iteration over a Java set is a request of py4j.
        found = str(self._jvm.java.lang.String.join("\n", self._request(self._admin.listTopics, "names")))
        return sorted(name for name in found.split("\n") if name and not is_kafka_topic(name))

    def describe(self, names: Sequence[str], *, strict: bool = True) -> dict[str, Topic]:
        """Describe these topics, by name; topics that do not exist are left out.

        If not `strict`, topics whose request fails are left out too.
        """
        topics: dict[str, Topic] = {}
        for chunk in _chunks(sorted(set(names) & set(self.names())), TOPICS_A_CALL):
            answers = self._request_each(
                partial(self._admin.describeTopics, self._list(chunk)),
                "allTopicNames",
                lambda result, name: result.topicNameValues().get(name),
                dict(zip(chunk, chunk, strict=True)),
                strict=strict,
            )
            for name, described in answers.items():
                topics[name] = Topic(name, str(described.topicId()), described.partitions().size())
        return topics

    def find(self, names: Iterable[str]) -> dict[str, Topic]:
        """Describe these topics, by name; topics that do not exist are left out.

        The topics are not listed first: a list leaves out those that the user may not describe, which is an error here.
        """
        topics: dict[str, Topic] = {}
        for chunk in _chunks(sorted(set(names)), TOPICS_A_CALL):
            result = self._call(partial(self._admin.describeTopics, self._list(chunk)))
            for name in chunk:
                try:
                    described = self._call(partial(self._wait, result.topicNameValues().get(name)))
                except CannotRun as error:
                    if "UnknownTopicOrPartitionException" not in str(error):
                        raise
                else:
                    topics[name] = Topic(name, str(described.topicId()), described.partitions().size())
        return topics

    def compacted(self, names: Sequence[str]) -> set[str]:
        """Return the names of those topics that are compacted."""
        return {name for name, policy in self.setting_of(names, "cleanup.policy").items() if "compact" in policy}

    def setting_of(self, names: Sequence[str], setting: str) -> dict[str, str]:
        """Return the value of a setting of each of these topics, by name."""
        found: dict[str, str] = {}
        resource = self._kafka.common.config.ConfigResource
        of_topic = nested(self._spark, "org.apache.kafka.common.config.ConfigResource", "Type").TOPIC
        for chunk in _chunks(names, TOPICS_A_CALL):
            resources = {name: resource(of_topic, name) for name in chunk}
            configs = self._request(partial(self._admin.describeConfigs, self._list(resources.values())), "all")
            found |= {name: str(configs.get(key).get(setting).value()) for name, key in resources.items()}
        return found

    def ensure_compacted(self, name: str, otherwise: str) -> Topic:
        """Create a compacted topic of one partition with the broker's default replication, unless the topic exists.

        CannotRun if the topic exists and is not compacted; `otherwise` is the alternative that the error text names.
        """
        topic = self.describe([name]).get(name)
        if topic is None:
            util = self._jvm.java.util
            fresh = self._kafka.clients.admin.NewTopic(name, util.Optional.of(1), util.Optional.empty())
            config = util.HashMap()
            config.put("cleanup.policy", "compact")
            try:
                self._request(partial(self._admin.createTopics, self._list([fresh.configs(config)])), "all")
                return self._await_topic(name)
            except CannotRun as error:
                if "AuthorizationException" in str(error):
                    raise CannotRun(
                        f"not allowed to create topic {name!r}: allow Create and Write on it, or {otherwise}"
                    ) from error
                if "TopicExistsException" not in str(error):
                    raise
                topic = self._await_topic(name)
        if not self.compacted([name]):
            raise CannotRun(f"topic {name!r} is not compacted: set its cleanup.policy to compact, or {otherwise}")
        return topic

    def _await_topic(self, name: str) -> Topic:
        """Wait until the brokers' metadata has a topic that was just created; CannotRun if not within CALL_MS."""
        deadline = time.monotonic() + CALL_MS / 1000
        while (found := self.describe([name]).get(name)) is None:
            if time.monotonic() >= deadline:
                raise self._no_answer(f"topic {name!r} was created, and is unknown after {CALL_MS // 1000} s")
            time.sleep(0.1)
        return found

    def ends(self, partitions: Sequence[TopicPartition], *, strict: bool = True) -> Mapping[TopicPartition, Ends]:
        """List the ends of these partitions, the high watermark first and then the last stable offset.

        If not `strict`, a partition whose request fails (without a leader, or just deleted) is left out.
        """
        spec = self._kafka.clients.admin.OffsetSpec
        handles = {partition: self._java_partition(partition) for partition in partitions}
        high = self._offsets(handles, spec.latest(), "READ_UNCOMMITTED", strict=strict)
        # A partition that failed once is not requested again.
        handles = {partition: handles[partition] for partition in high}
        stable = self._offsets(handles, spec.latest(), "READ_COMMITTED", strict=strict)
        handles = {partition: handles[partition] for partition in stable}
        start = self._offsets(handles, spec.earliest(), "READ_UNCOMMITTED", strict=strict)

        def ends_of(partition: TopicPartition) -> Ends:
            first, last = start[partition], stable[partition]
            epoch = last.leaderEpoch().orElse(NO_LEADER_EPOCH)
            return Ends(int(first.offset()), int(high[partition].offset()), int(last.offset()), int(epoch))

        return _Lazy(start.keys(), ends_of)

    def first_since(self, partitions: Sequence[TopicPartition], since_ms: int) -> dict[TopicPartition, int]:
        """Find the offset of the first record of each partition with this timestamp (ms) or a later one.

        A partition without such a record is left out.
        """
        handles = {partition: self._java_partition(partition) for partition in partitions}
        spec = self._kafka.clients.admin.OffsetSpec.forTimestamp(max(0, since_ms))
        answers = self._offsets(handles, spec, "READ_UNCOMMITTED", strict=True)
        found = {partition: int(answers[partition].offset()) for partition in partitions}
        return {partition: offset for partition, offset in found.items() if offset >= 0}

    def diverged(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]:
        """Return, for each partition that was truncated, the offset at which its log diverged from what was read.

        A position is the offset up to which a log was read, and the leader epoch of that read. A leader of a later
        epoch answers where the records of that epoch end in its log (OffsetsForLeaderEpoch, KIP-320); a consumer sends
        that request before it continues from such a position.
        """
        if not positions:
            return {}
        optional = self._jvm.java.util.Optional
        metadata = self._kafka.clients.consumer.OffsetAndMetadata
        timeout = self._jvm.java.time.Duration.ofMillis(CALL_MS)
        found: dict[TopicPartition, int] = {}
        with self._consumer() as consumer:
            handles = {partition: self._java_partition(partition) for partition in positions}
            assigned = self._list(handles.values())
            consumer.assign(assigned)
            # The consumer validates a position only once its metadata has the partition's leader.
            self._call(lambda: consumer.endOffsets(assigned, timeout))
            for partition, (offset, epoch) in positions.items():
                consumer.seek(handles[partition], metadata(offset, optional.of(epoch), ""))
            for handle in handles.values():
                while (truncated := self._truncated(consumer, handle, timeout)) is not None:
                    found |= {other: offset for other, offset in truncated.items() if offset is not None}
                    for other in truncated:
                        consumer.seek(handles[other], positions[other][0])
        return {partition: found[partition] for partition in positions if partition in found}

    def _truncated(self, consumer: Any, handle: Any, timeout: Any) -> dict[TopicPartition, int | None] | None:
        """Validate a consumer's position: None if valid, else the partitions that were truncated.

        The value of a truncated partition is the offset at which its log diverged, None if unknown.
        """
        try:
            consumer.position(handle, timeout)
        except Py4JJavaError as error:
            cause = error.java_exception
            if cause.getClass().getSimpleName() != "LogTruncationException":
                raise self._cannot_run(error) from error
            unknown = {(key.topic(), key.partition()): None for key in cause.offsetOutOfRangePartitions()}
            diverged = cause.divergentOffsets()
            known = {(key.topic(), key.partition()): int(diverged[key].offset()) for key in diverged}
            return {**unknown, **known}
        return None

    def timestamps_at(self, partitions: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Read the timestamp (ms) of the first record at or after each of these offsets, committed or not.

        A partition is left out if its log has no such record: it ends before, or has only transaction markers there.
        CannotRun if no partition is answered for CALL_MS.
        """
        if not partitions:
            return {}
        timeout = self._jvm.java.time.Duration.ofMillis(CALL_MS)
        # Only the first record of each partition is needed.
        with self._consumer({"max.poll.records": "1"}) as consumer:
            handles = {partition: self._java_partition(partition) for partition in partitions}
            assigned = self._list(handles.values())
            consumer.assign(assigned)
            high_watermarks = self._call(lambda: consumer.endOffsets(assigned, timeout))
            for partition, handle in handles.items():
                consumer.seek(handle, partitions[partition])
            ends = {partition: int(high_watermarks[handle]) for partition, handle in handles.items()}
            return self._first_timestamps(consumer, handles, ends)

    def _first_timestamps(
        self, consumer: Any, handles: Mapping[TopicPartition, Any], ends: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Poll a consumer until each partition has returned a record, or its position has reached its end."""
        found: dict[TopicPartition, int] = {}
        waiting = dict(handles)
        timeout = self._jvm.java.time.Duration.ofMillis(CALL_MS)
        poll = partial(consumer.poll, self._jvm.java.time.Duration.ofMillis(POLL_MS))
        deadline = time.monotonic() + CALL_MS / 1000
        while waiting:
            batch = self._call(poll)
            polled = {(handle.topic(), handle.partition()): batch.records(handle) for handle in batch.partitions()}
            found |= {partition: int(records.get(0).timestamp()) for partition, records in polled.items()}
            # The consumer skips transaction markers. Positions are compared only when nothing was returned.
            done = set(polled) or {
                partition
                for partition, handle in waiting.items()
                if self._call(partial(consumer.position, handle, timeout)) >= ends[partition]
            }
            if done:
                consumer.pause(self._list(waiting.pop(partition) for partition in done))
                deadline = time.monotonic() + CALL_MS / 1000
            elif time.monotonic() >= deadline:
                names = ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(waiting))
                raise self._no_answer(f"no record of {names} within {CALL_MS // 1000} s")
        return found

    def blocking_transactions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, BlockingTransaction]:
        """Find the oldest open transaction of each of these partitions (DescribeProducers, KIP-664).

        A partition is left out if the broker refuses the request: the answer explains a verdict, and no verdict
        depends on it.
        """
        try:
            return self._blocking_transactions(partitions)
        except CannotRun:
            return {}

    def _blocking_transactions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, BlockingTransaction]:
        """Find the oldest open transaction of each partition; CannotRun if the broker refuses DescribeProducers."""
        handles = {partition: self._java_partition(partition) for partition in partitions}
        answers = self._request(partial(self._admin.describeProducers, self._list(handles.values())), "all")
        found: dict[TopicPartition, BlockingTransaction] = {}
        for partition, handle in handles.items():
            states = answers.get(handle).activeProducers()
            open_states = [state for state in states if state.currentTransactionStartOffset().isPresent()]
            transactions = [
                BlockingTransaction(
                    int(state.producerId()),
                    int(state.producerEpoch()),
                    int(state.currentTransactionStartOffset().getAsLong()),
                )
                for state in open_states
            ]
            if transactions:
                found[partition] = min(transactions, key=lambda transaction: transaction.start_offset)
        try:
            known = self._transactions({transaction.producer_id for transaction in found.values()})
        except CannotRun:
            known = {}
        return {
            partition: replace(transaction, **known.get(transaction.producer_id, {}))  # type: ignore[arg-type]
            for partition, transaction in found.items()
        }

    def _transactions(self, producer_ids: Collection[int]) -> dict[int, dict[str, str | int]]:
        """Find transactional id and start (ms) of these producers' open transactions, by producer id."""
        if not producer_ids:
            return {}
        listed = self._request(self._admin.listTransactions, "all")
        names = {
            str(listing.transactionalId()): int(listing.producerId())
            for listing in listed
            if listing.producerId() in producer_ids
        }
        if not names:
            return {}
        answers = self._request(partial(self._admin.describeTransactions, self._list(names)), "all")
        starts = {name: answers.get(name).transactionStartTimeMs() for name in names}
        return {
            names[name]: {"transactional_id": name, **({"since_ms": int(at.getAsLong())} if at.isPresent() else {})}
            for name, at in starts.items()
        }

    @contextmanager
    def _consumer(self, more: Mapping[str, str] | None = None) -> Iterator[Any]:
        """Open a consumer, with `more` settings, until the context ends."""
        config = self._config(
            {
                "isolation.level": "read_uncommitted",
                "enable.auto.commit": "false",
                "auto.offset.reset": "none",
                "max.partition.fetch.bytes": "65536",
                **(more or {}),
            }
        )
        bytes_of = self._kafka.common.serialization.ByteArrayDeserializer
        consumer = self._call(lambda: self._kafka.clients.consumer.KafkaConsumer(config, bytes_of(), bytes_of()))
        try:
            yield consumer
        finally:
            consumer.close(self._jvm.java.time.Duration.ofMillis(1000))

    def _offsets(
        self, handles: Mapping[TopicPartition, Any], spec: Any, isolation: str, *, strict: bool
    ) -> Mapping[TopicPartition, Any]:
        """Request the offset of each partition (ListOffsets): ListOffsetsResultInfo, by partition."""
        level = getattr(self._kafka.common.IsolationLevel, isolation)
        wanted = self._jvm.java.util.HashMap()
        for handle in handles.values():
            wanted.put(handle, spec)
        options = self._kafka.clients.admin.ListOffsetsOptions(level)
        return self._request_each(
            partial(self._admin.listOffsets, wanted, options),
            "all",
            lambda result, handle: result.partitionResult(handle),
            handles,
            strict=strict,
        )

    def _config(self, more: Mapping[str, str]) -> Any:
        config = self._jvm.java.util.HashMap()
        for name, value in {**self._connection, **more}.items():
            config.put(name, value)
        return config

    def _java_partition(self, partition: TopicPartition) -> Any:
        return self._topic_partition(*partition)

    def _list(self, items: Iterable[Any]) -> Any:
        array = self._jvm.java.util.ArrayList()
        for item in items:
            array.add(item)
        return array

    def _request(self, request: Callable[[], Any], answer: str) -> Any:
        """Send an Admin request and wait for one future of its result; `answer` is the name of the future's getter."""
        return self._call(lambda: self._wait(getattr(request(), answer)()))

    def _request_each(
        self,
        request: Callable[[], Any],
        answer: str,
        future_of: Callable[[Any, Any], Any],
        handles: Mapping[_Key, Any],
        *,
        strict: bool,
    ) -> Mapping[_Key, Any]:
        """Send an Admin request about several keys, and return the answer of each.

        `answer` is the getter of the future of all keys (a map by handle); `future_of(result, handle)` returns the
        future of a single handle.
        If not `strict`, keys whose future fails are left out.
        """
        result = self._call(request)
        try:
            answers = self._request(lambda: result, answer)
        except CannotRun:
            if strict:
                raise
        else:
            return _Lazy(handles.keys(), lambda key: answers.get(handles[key]))
        found: dict[_Key, Any] = {}
        for key, handle in handles.items():
            with suppress(CannotRun):
                found[key] = self._call(partial(self._wait, future_of(result, handle)))
        return found

    def _wait(self, future: Any) -> Any:
        """Wait for a Java future, at most CALL_MS; Py4JJavaError if the future fails or the time is over."""
        return future.get(CALL_MS, self._jvm.java.util.concurrent.TimeUnit.MILLISECONDS)

    def _call(self, request: Callable[[], Any]) -> Any:
        """Call into kafka-clients; CannotRun, with the message of the innermost cause, if the call fails."""
        try:
            return request()
        except Py4JJavaError as error:
            raise self._cannot_run(error) from error

    def _cannot_run(self, error: Py4JJavaError) -> CannotRun:
        """Return the error for a failed call: Kafka has refused a request, or was not reached."""
        why = reason(error)
        name = why.partition(":")[0]
        if not name.startswith(_KAFKA_PACKAGE) or name.endswith(_UNREACHED):
            return self._no_answer(why)
        return CannotRun(
            f"Kafka at {self._address} refused a request: {why}; check the rights of its user, or start the run again "
            "if a log has changed meanwhile"
        )

    def _no_answer(self, why: str) -> CannotRun:
        return CannotRun(
            f"Kafka at {self._address} did not answer: {why}; "
            "check that the brokers are up, and that the address, the protocol and the credentials are right"
        )


def _chunks(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
