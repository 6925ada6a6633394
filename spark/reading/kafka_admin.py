"""The driver's own talk with Kafka: names, offsets and open transactions. The one module that calls kafka-clients.

It goes through the JVM that Spark runs in, so that the job needs no Kafka client for Python.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pyspark.sql import SparkSession

from service.contract import SharedSettings
from spark.errors import CannotRun
from spark.reading.jvm import Py4JJavaError, jvm, nested, reason

# Long enough for a broker that is just electing leaders, short enough to tell a person that nobody answers.
CALL_MS: Final = 30_000
# Asked for at once: keeps one request within what a broker answers quickly.
TOPICS_A_CALL: Final = 500

TopicPartition = tuple[str, int]
"""Topic and partition."""

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker knows it: `topic_id` is its unique id, another one after it was made anew."""

    name: str
    topic_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a partition's log begins and ends.

    `high_watermark` was read before `last_stable`: at `last_stable >= high_watermark` everything that stood there
    is decided. `leader_epoch` is that of the leader that answered `last_stable`, -1 where it named none.
    """

    log_start: int
    high_watermark: int
    last_stable: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class BlockingTransaction:
    """An open transaction that holds a partition up. Since when (ms) and of whom, where the broker tells."""

    producer_id: int
    epoch: int
    start_offset: int
    transactional_id: str | None = None
    since_ms: int | None = None


def connection(shared: SharedSettings) -> dict[str, str]:
    """How kafka-clients reaches the brokers, by its own names.

    Certificates and keys are given as text, not as files: executors on other machines have none. The values of these
    names are secrets to Kafka, which logs `[hidden]`.
    """
    given = {"bootstrap.servers": shared.kafka, "security.protocol": shared.kafka_security_protocol}
    if shared.kafka_tls:
        given["ssl.endpoint.identification.algorithm"] = "https" if shared.kafka_ssl_check_hostname else ""
        if shared.kafka_ssl_cafile:
            given["ssl.truststore.type"] = "PEM"
            given["ssl.truststore.certificates"] = Path(shared.kafka_ssl_cafile).read_text(encoding="utf-8")
        if shared.kafka_ssl_certfile:
            given["ssl.keystore.type"] = "PEM"
            given["ssl.keystore.certificate.chain"] = Path(shared.kafka_ssl_certfile).read_text(encoding="utf-8")
            given["ssl.keystore.key"] = Path(shared.kafka_ssl_keyfile).read_text(encoding="utf-8")
    if shared.kafka_sasl:
        module = "plain.PlainLoginModule" if shared.kafka_sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
        given["sasl.mechanism"] = shared.kafka_sasl_mechanism
        given["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required "
            f"username={_quoted(shared.kafka_sasl_username)} password={_quoted(shared.kafka_sasl_password)};"
        )
    return given


def _quoted(text: str) -> str:
    """A word of a JAAS configuration."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Broker:
    """Kafka as the driver sees it. Every call raises CannotRun with the broker's words when it fails."""

    def __init__(self, spark: SparkSession, shared: SharedSettings) -> None:
        self._spark = spark
        self._jvm = jvm(spark)
        self._bootstrap = shared.kafka
        self._connection = connection(shared)
        self._kafka: Any = self._jvm.org.apache.kafka
        config = self._config({"default.api.timeout.ms": str(CALL_MS), "request.timeout.ms": str(CALL_MS // 2)})
        try:
            self._admin: Any = self._kafka.clients.admin.AdminClient.create(config)
        except Py4JJavaError as error:
            raise CannotRun(f"FENCEPOST_KAFKA={shared.kafka!r} is no Kafka address: {reason(error)}") from error

    def close(self) -> None:
        """Leave the broker; never raises."""
        self._admin.close(self._jvm.java.time.Duration.ofMillis(1000))

    def names(self) -> list[str]:
        """All topics but Kafka's own."""
        found = self._ask(self._admin.listTopics, "names")
        return sorted(name for name in found if not name.startswith("__"))

    def describe(self, names: Sequence[str], *, strict: bool = True) -> dict[str, Topic]:
        """What is known of these topics; one that is not there is left out, and, if not `strict`, one that fails."""
        topics: dict[str, Topic] = {}
        for part in _slices(sorted(set(names) & set(self.names())), TOPICS_A_CALL):
            answers = self._ask_each(
                partial(self._admin.describeTopics, self._list(part)),
                "allTopicNames",
                lambda result, name: result.topicNameValues().get(name),
                dict(zip(part, part, strict=True)),
                strict=strict,
            )
            for name, described in answers.items():
                topics[name] = Topic(name, str(described.topicId()), described.partitions().size())
        return topics

    def compacted(self, names: Sequence[str]) -> set[str]:
        """Those of these topics that are compacted."""
        found: set[str] = set()
        resource = self._kafka.common.config.ConfigResource
        kind = nested(self._spark, "org.apache.kafka.common.config.ConfigResource", "Type").TOPIC
        for part in _slices(names, TOPICS_A_CALL):
            resources = {name: resource(kind, name) for name in part}
            configs = self._ask(partial(self._admin.describeConfigs, self._list(resources.values())), "all")
            policies = {name: str(configs.get(one).get("cleanup.policy").value()) for name, one in resources.items()}
            found |= {name for name, policy in policies.items() if "compact" in policy}
        return found

    def ensure_compacted(self, name: str, otherwise: str) -> None:
        """Make a compacted topic of one partition with the broker's default replication, where it is missing.

        CannotRun where it is there and not compacted; `otherwise` is what else the reader may do about it.
        """
        there = self.describe([name]).get(name)
        if there is None:
            util = self._jvm.java.util
            topic = self._kafka.clients.admin.NewTopic(name, util.Optional.of(1), util.Optional.empty())
            config = util.HashMap()
            config.put("cleanup.policy", "compact")
            try:
                self._ask(partial(self._admin.createTopics, self._list([topic.configs(config)])), "all")
            except CannotRun as error:
                if "AuthorizationException" in str(error):
                    raise CannotRun(
                        f"not allowed to make topic {name!r}: allow Create and Write on it, or {otherwise}"
                    ) from error
                if "TopicExistsException" not in str(error):
                    raise
                there = self._heard_of(name)
        if there is not None and not self.compacted([name]):
            raise CannotRun(f"topic {name!r} is not compacted: set its cleanup.policy to compact, or {otherwise}")

    def _heard_of(self, name: str) -> Topic | None:
        """A topic that was made a moment ago, when the broker that is asked knows it too; None where it does not."""
        deadline = time.monotonic() + CALL_MS / 1000
        while (found := self.describe([name]).get(name)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def ends(self, partitions: Sequence[TopicPartition], *, strict: bool = True) -> dict[TopicPartition, Ends]:
        """The ends of these partitions, the high watermark first and the last stable offset after it.

        If not `strict`, one that fails (it has no leader, its topic was just deleted) is left out.
        """
        spec = self._kafka.clients.admin.OffsetSpec
        high = self._offsets(partitions, spec.latest(), "READ_UNCOMMITTED", strict=strict)
        # What failed once is not waited for again.
        stable = self._offsets(list(high), spec.latest(), "READ_COMMITTED", strict=strict)
        start = self._offsets(list(stable), spec.earliest(), "READ_UNCOMMITTED", strict=strict)
        return {partition: Ends(start[partition][0], high[partition][0], *stable[partition]) for partition in start}

    def diverged(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]:
        """Where the logs of these partitions stopped being what was read of them, without those that are the same.

        A position is the offset up to which a log was read, and the leader epoch of that time. A leader of a later
        epoch tells where the records of that epoch end in its log (OffsetsForLeaderEpoch, KIP-320): a consumer asks
        it before it reads on from such a position.
        """
        if not positions:
            return {}
        optional = self._jvm.java.util.Optional
        metadata = self._kafka.clients.consumer.OffsetAndMetadata
        patience = self._jvm.java.time.Duration.ofMillis(CALL_MS)
        found: dict[TopicPartition, int] = {}
        with self._consumer() as consumer:
            handles = {partition: self._java_partition(partition) for partition in positions}
            assigned = self._list(handles.values())
            consumer.assign(assigned)
            # A position is checked only where the consumer has heard of a leader.
            self._call(lambda: consumer.endOffsets(assigned, patience))
            for partition, (offset, epoch) in positions.items():
                consumer.seek(handles[partition], metadata(offset, optional.of(epoch), ""))
            for handle in handles.values():
                while (cut := self._cut_off(consumer, handle, patience)) is not None:
                    found |= {other: agreed for other, agreed in cut.items() if agreed is not None}
                    for other in cut:
                        consumer.seek(handles[other], positions[other][0])
        return {partition: found[partition] for partition in positions if partition in found}

    def _cut_off(self, consumer: Any, handle: Any, patience: Any) -> dict[TopicPartition, int | None] | None:
        """None where a consumer may read on from its position; else which positions it must not read on from, and
        from where it may, if that is known."""
        try:
            consumer.position(handle, patience)
        except Py4JJavaError as error:
            cause = error.java_exception
            if cause.getClass().getSimpleName() != "LogTruncationException":
                raise self._no_answer(error) from error
            answers = {(one.topic(), one.partition()): None for one in cause.offsetOutOfRangePartitions()}
            diverged = cause.divergentOffsets()
            known = {(one.topic(), one.partition()): int(diverged[one].offset()) for one in diverged}
            return {**answers, **known}
        return None

    def timestamps_at(self, partitions: dict[TopicPartition, int], wait_ms: int = 5_000) -> dict[TopicPartition, int]:
        """Timestamp (ms) of the first record at or after each of these offsets, committed or not.

        A partition that gives none in time is left out.
        """
        if not partitions:
            return {}
        found: dict[TopicPartition, int] = {}
        with self._consumer() as consumer:
            handles = {partition: self._java_partition(partition) for partition in partitions}
            consumer.assign(self._list(handles.values()))
            for partition, handle in handles.items():
                consumer.seek(handle, partitions[partition])
            waited = 0
            while waited < wait_ms and len(found) < len(partitions):
                batch = self._call(lambda: consumer.poll(self._jvm.java.time.Duration.ofMillis(250)))
                waited += 250
                for partition, handle in handles.items():
                    if partition not in found:
                        records = batch.records(handle)
                        if not records.isEmpty():
                            found[partition] = int(records.get(0).timestamp())
                            consumer.pause(self._list([handle]))
        return found

    def blocking_transactions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, BlockingTransaction]:
        """The oldest open transaction of each of these partitions (DescribeProducers, KIP-664).

        What the broker does not tell, or not to us, is left out: it explains a verdict, none depends on it.
        """
        try:
            return self._blocking_transactions(partitions)
        except CannotRun:
            return {}

    def _blocking_transactions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, BlockingTransaction]:
        handles = {partition: self._java_partition(partition) for partition in partitions}
        answers = self._ask(partial(self._admin.describeProducers, self._list(handles.values())), "all")
        found: dict[TopicPartition, BlockingTransaction] = {}
        for partition, handle in handles.items():
            states = answers.get(handle).activeProducers()
            opened = [state for state in states if state.currentTransactionStartOffset().isPresent()]
            transactions = [
                BlockingTransaction(
                    int(state.producerId()),
                    int(state.producerEpoch()),
                    int(state.currentTransactionStartOffset().getAsLong()),
                )
                for state in opened
            ]
            if transactions:
                found[partition] = min(transactions, key=lambda one: one.start_offset)
        try:
            known = self._transactions({one.producer_id for one in found.values()})
        except CannotRun:
            known = {}
        return {
            partition: replace(one, **known.get(one.producer_id, {}))  # type: ignore[arg-type]
            for partition, one in found.items()
        }

    def _transactions(self, producer_ids: Collection[int]) -> dict[int, dict[str, str | int]]:
        """Transactional id and start (ms) of these producers' open transactions."""
        if not producer_ids:
            return {}
        listed = self._ask(self._admin.listTransactions, "all")
        names = {
            str(one.transactionalId()): int(one.producerId()) for one in listed if one.producerId() in producer_ids
        }
        if not names:
            return {}
        answers = self._ask(partial(self._admin.describeTransactions, self._list(names)), "all")
        starts = {name: answers.get(name).transactionStartTimeMs() for name in names}
        return {
            names[name]: {"transactional_id": name, **({"since_ms": int(at.getAsLong())} if at.isPresent() else {})}
            for name, at in starts.items()
        }

    @contextmanager
    def _consumer(self) -> Iterator[Any]:
        config = self._config(
            {
                "isolation.level": "read_uncommitted",
                "enable.auto.commit": "false",
                "auto.offset.reset": "none",
                "max.partition.fetch.bytes": "65536",
            }
        )
        bytes_of = self._kafka.common.serialization.ByteArrayDeserializer
        consumer = self._call(lambda: self._kafka.clients.consumer.KafkaConsumer(config, bytes_of(), bytes_of()))
        try:
            yield consumer
        finally:
            consumer.close(self._jvm.java.time.Duration.ofMillis(1000))

    def _offsets(
        self, partitions: Sequence[TopicPartition], spec: Any, isolation: str, *, strict: bool
    ) -> dict[TopicPartition, tuple[int, int]]:
        """The offset that a ListOffsets request answers for each partition, and the leader epoch, -1 for none."""
        level = getattr(self._kafka.common.IsolationLevel, isolation)
        handles = {partition: self._java_partition(partition) for partition in partitions}
        wanted = self._jvm.java.util.HashMap()
        for handle in handles.values():
            wanted.put(handle, spec)
        options = self._kafka.clients.admin.ListOffsetsOptions(level)
        answers = self._ask_each(
            partial(self._admin.listOffsets, wanted, options),
            "all",
            lambda result, handle: result.partitionResult(handle),
            handles,
            strict=strict,
        )
        return {
            partition: (int(answer.offset()), int(answer.leaderEpoch().orElse(-1)))
            for partition, answer in answers.items()
        }

    def _config(self, more: Mapping[str, str]) -> Any:
        made = self._jvm.java.util.HashMap()
        for name, value in {**self._connection, **more}.items():
            made.put(name, value)
        return made

    def _java_partition(self, partition: TopicPartition) -> Any:
        return self._kafka.common.TopicPartition(*partition)

    def _list(self, items: Iterable[Any]) -> Any:
        made = self._jvm.java.util.ArrayList()
        for item in items:
            made.add(item)
        return made

    def _ask(self, request: Callable[[], Any], answer: str) -> Any:
        """Send an Admin request and wait for the future that its result names so."""
        return self._call(lambda: self._got(getattr(request(), answer)()))

    def _ask_each(
        self,
        request: Callable[[], Any],
        answer: str,
        one: Callable[[Any, Any], Any],
        handles: Mapping[_Key, Any],
        *,
        strict: bool,
    ) -> dict[_Key, Any]:
        """Send an Admin request about several things: what it answers to each, if not `strict` without what fails.

        `answer` names the future of all of them, a map by handle; `one` is the future of one handle.
        """
        result = self._call(request)
        try:
            answers = self._ask(lambda: result, answer)
        except CannotRun:
            if strict:
                raise
        else:
            return {key: answers.get(handle) for key, handle in handles.items()}
        found: dict[_Key, Any] = {}
        for key, handle in handles.items():
            with suppress(CannotRun):
                found[key] = self._call(partial(self._got, one(result, handle)))
        return found

    def _got(self, future: Any) -> Any:
        return future.get(CALL_MS, self._jvm.java.util.concurrent.TimeUnit.MILLISECONDS)

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Py4JJavaError as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: Py4JJavaError) -> CannotRun:
        return CannotRun(
            f"Kafka at FENCEPOST_KAFKA={self._bootstrap!r} did not answer: {reason(error)}; "
            "check that the brokers are up, and that the address, the protocol and the credentials are right"
        )


def _slices(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
