"""One client for what needs no producer: topics, their settings, and the fencing of transactional ids."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.conn import create_conn
from aiokafka.protocol.admin import CreatePartitionsRequest, CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatch

from service.contract import PREFIX
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaForbids, KafkaRefuses
from service.kafka.connection import Client
from service.kafka.deadline import shared, within
from service.kafka.hanging import ActiveProducer, Partition
from service.kafka.inspection import FINAL, active_producers, producer_id_of
from service.kafka.metadata import Metadata, Partitions, partitions_of

TOPIC_RESOURCE: Final = 2
# By Kafka's names, as record batches are marked with them.
CODECS: Final = {
    "none": DefaultRecordBatch.CODEC_NONE,
    "gzip": DefaultRecordBatch.CODEC_GZIP,
    "snappy": DefaultRecordBatch.CODEC_SNAPPY,
    "lz4": DefaultRecordBatch.CODEC_LZ4,
    "zstd": DefaultRecordBatch.CODEC_ZSTD,
}
# ListOffsets: "the last offset", and of which readers (org.apache.kafka.common.IsolationLevel).
LATEST: Final = -1
READ_UNCOMMITTED, READ_COMMITTED = 0, 1
RETRY_PAUSE_S: Final = 0.02
ASK_TRIES: Final = 5
# Of the time for an answer, what one broker gets at least before another is asked: it may have to log in first.
SHARE_LEAST_S: Final = 1.0
# Requests under way on the one connection: brokers answer a connection's requests in order, one at a time.
FENCES_AT_ONCE: Final = 16
PARTITIONS_NAMED: Final = 8

RETRIABLE: Final = (
    errors.ConcurrentTransactions,
    errors.CoordinatorLoadInProgressError,
    errors.CoordinatorNotAvailableError,
    errors.NotCoordinatorError,
    errors.GroupLoadInProgressError,
    errors.GroupCoordinatorNotAvailableError,
    errors.NotCoordinatorForGroupError,
    errors.RequestTimedOutError,
    errors.NodeNotReadyError,
    errors.KafkaConnectionError,
)


# Answers to who logs in that no other try changes.
REFUSED: Final = (errors.SaslAuthenticationFailed, errors.UnsupportedSaslMechanismError)


async def any_node(client: AIOKafkaClient, but_not: Collection[int] = ()) -> int:
    """Any broker, one of the others if there are some.

    Raises NodeNotReadyError where Kafka lists none: a lone one that its controller fences answers so.
    """
    node = client.get_random_node()
    if node is None:
        await client.force_metadata_update()
        node = client.get_random_node()
    if node is None:
        raise errors.NodeNotReadyError("Kafka lists no broker")
    if node in but_not:
        others = {broker.nodeId for broker in client.cluster.brokers()}.difference(but_not)
        node = random.choice([*others]) if others else node  # noqa: S311
    return int(node)


async def coordinator(client: AIOKafkaClient, transactional_id: str) -> int:
    """The coordinator of a transactional id. Raises KafkaError where nobody tells."""
    await any_node(client)  # aiokafka falls over an assertion where it knows none
    return int(await client.coordinator_lookup(CoordinationType.TRANSACTION, transactional_id))


def remedy(error: Exception, transactional_id: str, transaction_timeout_ms: int) -> str:
    """What is to be set where a producer with this id and timeout is refused until somebody does; else ""."""
    if isinstance(error, errors.TransactionalIdAuthorizationFailed):
        return f"the service has no leave to Describe and Write transactional id {transactional_id}"
    if isinstance(error, errors.InvalidTransactionTimeout):
        return (
            f"{PREFIX}TRANSACTION_TIMEOUT_MS={transaction_timeout_ms} is more than the brokers' "
            "transaction.max.timeout.ms: set a smaller one, or raise theirs"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Topic:
    """What is known of a topic. `settings` are its effective ones, by Kafka's names."""

    name: str
    partitions: int
    settings: Mapping[str, str]
    # Partitions with fewer replicas in sync than `min.insync.replicas`. No transaction may hold one: its markers cannot
    # be written there, and until they are, Kafka lets the transactional id begin no other (KIP-98).
    under_min_isr: frozenset[int] = frozenset()
    topic_id: str = ""  # another one after the topic was made anew (KIP-516); "" where it is not known
    message_bytes_max: int = field(init=False)  # the largest batch of records that it takes, in bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "message_bytes_max", int(self.settings.get("max.message.bytes", 1_048_588)))


class Ends(NamedTuple):
    """Where a partition ends: for readers of committed records (the last stable offset, LSO), and for all."""

    last_stable: int
    high_watermark: int


class KafkaAdmin:
    """Kafka as seen by one client. Every call has a deadline and raises KafkaAway where Kafka does not answer."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str,
        request_timeout_ms: int,
        telemetry: Telemetry,
        security: Mapping[str, Any] | None = None,
        compression: str = "none",
    ) -> None:
        self.bootstrap = bootstrap
        self.client_id = client_id
        self.request_timeout_ms = request_timeout_ms
        self.codec = CODECS[compression]
        self._errors = telemetry.kafka_errors
        self._security = dict(security or {})
        self._client: AIOKafkaClient | None = None
        self._opening = asyncio.Lock()
        self._answering: asyncio.Task[Any] | None = None
        self._heard: Collection[int] = ()  # who answered last

    @property
    def timeout_s(self) -> float:
        return self.request_timeout_ms / 1000

    def failed(self, operation: str, why: str) -> KafkaAway:
        """The error to raise for an operation that failed, which is counted."""
        self.count_failure(operation)
        return KafkaAway(why)

    def count_failure(self, operation: str) -> None:
        """Count an operation that failed; `operation` is one of a few words."""
        self._errors.labels(operation).inc()

    def options(self, name: str) -> dict[str, Any]:
        """The arguments that every producer and consumer of this process shares."""
        return {
            "bootstrap_servers": self.bootstrap,
            "client_id": f"{self.client_id}/{name}",
            "request_timeout_ms": self.request_timeout_ms,
            "retry_backoff_ms": 20,
            **self._security,
        }

    async def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        await self._leave()

    async def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await within(1.0, client.close())

    async def answers(self, patience_s: float) -> None:
        """Does any broker answer at all, in time? KafkaAway where not. The question goes on, and is shared."""
        if self._answering is None or self._answering.done():
            question = MetadataRequest([], allow_auto_topic_creation=False)
            self._answering = asyncio.create_task(self._ask(question, share_s=patience_s / 3))
        try:
            async with asyncio.timeout(patience_s):
                await shared(self._answering)
        except TimeoutError as error:
            raise KafkaAway(f"Kafka at {self.bootstrap} does not answer within {patience_s} s") from error

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        """Number of partitions of those of the topics that exist; makes none."""
        return {name: len(found.replicas) for name, found in (await self._partitions(topics)).items()}

    async def _partitions(self, topics: Sequence[str], *, elsewhere: bool = False) -> dict[str, Partitions]:
        """The ids and partitions of those of the topics that exist."""
        answer = await self._ask(Metadata(topics), but_not=self._heard if elsewhere else ())
        found: dict[str, Partitions] = {}
        for topic in map(tuple, answer.topics):
            code, name, *_ = topic
            kind = errors.for_code(code)
            if kind in (errors.NoError, errors.LeaderNotAvailableError):
                found[name] = partitions_of(topic)
            elif kind is errors.TopicAuthorizationFailedError:
                self.count_failure("metadata")
                raise KafkaForbids(f"the service has no leave to describe topic {name}")
            elif kind not in (errors.UnknownTopicOrPartitionError, errors.InvalidTopicError):
                raise self.failed("metadata", f"topic {name}: {kind.__name__}")
        return found

    async def last_offsets(self, topics: Sequence[str]) -> dict[Partition, Ends]:
        """The ends of the topics' partitions, by (topic, partition), as their leaders tell them. Raises KafkaAway.

        Costs one Metadata request, and two ListOffsets to each leader: the high watermark is asked for first, so that a
        partition at rest shows an LSO no lower. A partition whose leader does not tell is left out.
        """
        answer = await self._ask(Metadata(topics))
        led: dict[int, dict[str, list[tuple[int, int]]]] = {}
        for _code, name, _id, _internal, partitions, *_ in (tuple(topic) for topic in answer.topics):
            for code, number, leader, *_ in (tuple(row) for row in partitions):
                if code == errors.NoError.errno and leader >= 0:
                    led.setdefault(leader, {}).setdefault(name, []).append((number, LATEST))
        ends = await asyncio.gather(*(self._ends_at(node, list(by_topic.items())) for node, by_topic in led.items()))
        return {partition: end for found in ends for partition, end in found.items()}

    async def _ends_at(
        self, node: int, asked: Sequence[tuple[str, Sequence[tuple[int, int]]]]
    ) -> dict[Partition, Ends]:
        """The ends of partitions that this node leads; of none where it does not answer."""
        try:
            async with asyncio.timeout(self.timeout_s):
                client = await self._opened()
                high, stable = [
                    _offsets(await client.send(node, OffsetRequest(-1, isolation, asked)))
                    for isolation in (READ_UNCOMMITTED, READ_COMMITTED)
                ]
        except (errors.KafkaError, OSError, TimeoutError):
            return {}
        return {partition: Ends(stable[partition], high[partition]) for partition in high.keys() & stable}

    async def open_transactions(self, partitions: Collection[Partition]) -> dict[Partition, list[ActiveProducer]]:
        """The producers that each partition's leader knows, without those of partitions whose leaders do not tell."""
        try:
            found = await active_producers(await self._opened(), partitions, self.timeout_s / ASK_TRIES)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("metadata", f"leaders do not tell of their producers: {error!r}") from error
        return found.active

    async def producer_ids(self, transactional_ids: Iterable[str]) -> dict[str, int]:
        """The producer ids of these transactional ids, as their coordinators tell; of some none may be known."""
        places = asyncio.Semaphore(FENCES_AT_ONCE)

        async def ask(name: str) -> int | None:
            async with places:
                client = await self._opened()
                return await producer_id_of(client, await coordinator(client, name), name)

        names = list(transactional_ids)
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await asyncio.gather(*map(ask, names))
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("metadata", f"coordinators do not tell of producer ids: {error!r}") from error
        return {name: producer for name, producer in zip(names, found, strict=True) if producer is not None}

    async def describe(self, names: Sequence[str], *, elsewhere: bool = False) -> dict[str, Topic]:
        """Topics with their settings; those that do not exist are left out.

        `elsewhere`: as another broker knows them than the one that answered last, if there is another.
        """
        found = await self._partitions(names, elsewhere=elsewhere)
        if not found:
            return {}
        answer = await self._ask(
            DescribeConfigsRequest([(TOPIC_RESOURCE, name, None) for name in found], include_synonyms=False)
        )
        topics: dict[str, Topic] = {}
        unsure = ""
        for code, _message, _kind, name, entries in (tuple(resource) for resource in answer.resources):
            if code == errors.NoError.errno:
                settings = {entry[0]: entry[1] for entry in entries}
            elif errors.for_code(code) is errors.TopicAuthorizationFailedError:
                settings = {}  # no leave to read them: the broker itself will refuse what does not fit
            else:  # that it is there has just been said: it is being made or deleted, or this broker lags behind
                unsure = f"topic {name}: its settings: {errors.for_code(code).__name__}"
                continue
            topic_id, replicas = found[name]
            topics[name] = Topic(name, len(replicas), settings, _short(replicas, settings), topic_id)
        if unsure and not topics:
            raise self.failed("metadata", unsure)
        return topics

    async def create(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Make a topic with the broker's default replication; one that another process has just made is fine."""
        answer = await self._ask_controller(
            CreateTopicsRequest([(name, partitions, -1, [], list(settings.items()))], self.request_timeout_ms, False)
        )
        for topic, code, *message in (tuple(row) for row in answer.topic_errors):
            if errors.for_code(code) not in (errors.NoError, errors.TopicAlreadyExistsError):
                raise self.failed("admin", f"topic {topic} cannot be made: {errors.for_code(code).__name__} {message}")

    async def grow(self, name: str, partitions: int) -> None:
        """Raise a topic's number of partitions."""
        answer = await self._ask_controller(
            CreatePartitionsRequest([(name, (partitions, None))], self.request_timeout_ms, False)
        )
        for topic, code, message in (tuple(row) for row in answer.topic_errors):
            if errors.for_code(code) is not errors.NoError and (await self.partitions([name]))[name] < partitions:
                raise self.failed("admin", f"topic {topic} cannot get {partitions} partitions: {message}")

    async def fence(
        self, transactional_ids: Sequence[str], transaction_timeout_ms: int, tell: Callable[[Collection[str]], None]
    ) -> None:
        """Fence every producer that has one of these ids, and wait until the fate of its transaction is final.

        `InitProducerId` raises the epoch, aborts what was open and answers only when the markers are written; until
        then it says CONCURRENT_TRANSACTIONS, which means: again (KIP-98, KIP-360). KafkaAway at the deadline.

        `tell` hears which ids are left, in their order: all of them at first, and fewer after each that is fenced.
        """
        places = asyncio.Semaphore(FENCES_AT_ONCE)
        left = dict.fromkeys(transactional_ids)
        tell(left)

        async def fence_one(transactional_id: str) -> None:
            async with places:
                while True:
                    try:
                        client = await self._opened()
                        node = await coordinator(client, transactional_id)
                        answer = await client.send(
                            node, InitProducerIdRequest(transactional_id, transaction_timeout_ms)
                        )
                        kind = errors.for_code(answer.error_code)
                        if kind is errors.NoError:
                            break
                        raise kind
                    except RETRIABLE:
                        await asyncio.sleep(RETRY_PAUSE_S)
                    except errors.KafkaError as error:
                        if why := remedy(error, transactional_id, transaction_timeout_ms):
                            raise self.failed("fence", why) from error
                        raise
            del left[transactional_id]
            tell(left)

        tasks = [asyncio.create_task(fence_one(transactional_id)) for transactional_id in transactional_ids]
        try:
            # A transaction may just have begun to commit: its markers can take as long as a transaction may.
            async with asyncio.timeout(self.timeout_s + transaction_timeout_ms / 1000):
                await asyncio.gather(*tasks)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("fence", f"not every transactional id could be fenced: {error!r}") from error
        finally:
            for task in tasks:
                task.cancel()

    async def open_in(self, partitions: Collection[Partition]) -> set[Partition]:
        """Those of the partitions that have a transaction open, of whichever producer.

        None of those whose leaders do not let themselves be asked. Raises KafkaAway where a leader does not answer.
        """
        try:
            found = await active_producers(await self._opened(), partitions, self.timeout_s)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("settle", f"leaders do not answer: {error!r}") from error
        forbidden = {partition for partition, code in found.failed.items() if code in FINAL}
        if missing := set(partitions) - found.active.keys() - forbidden:
            raise self.failed("settle", f"no leader answers of {sorted(missing)[:PARTITIONS_NAMED]}")
        return {
            partition for partition, producers in found.active.items() if any(each.start >= 0 for each in producers)
        }

    # --------------------------------------------------------------------------------------------------- asking

    async def _opened(self) -> AIOKafkaClient:
        async with self._opening:
            if self._client is None:
                client = Client(metadata_max_age_ms=30_000, **self.options("cluster"))
                try:
                    await client.bootstrap()
                except errors.KafkaConnectionError as error:
                    await client.close()
                    host, _, port = self.bootstrap.split(",")[0].strip().rpartition(":")
                    refusal = await self._refusal(host.strip("[]"), int(port))
                    if isinstance(refusal, REFUSED):
                        raise refusal from error
                    raise errors.KafkaConnectionError(_text(refusal) or "it came and went") from error
                except BaseException:
                    await client.close()
                    raise
                self._client = client
            return self._client

    async def why_not(self, host: str, port: int) -> str:
        """Why no connection to an address comes about, or ""."""
        return _text(await self._refusal(host, port))

    async def _refusal(self, host: str, port: int) -> Exception | None:
        """What keeps a connection to an address from coming about. aiokafka's `bootstrap` does not tell.

        A refused password, or a certificate for another name, must be named.
        """
        try:
            connection = await create_conn(host, port, request_timeout_ms=self.request_timeout_ms, **self._security)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return error
        connection.close()
        return None

    async def _ask(
        self, request: Any, node: int | None = None, *, but_not: Collection[int] = (), share_s: float | None = None
    ) -> Any:
        """Ask any broker (if possible none of `but_not`), another one where that is silent, or this very node.

        As long as there is another one to ask, a silent one gets its share of the time only.
        """
        failed: BaseException | None = None
        tried: set[int] = set()
        share_s = share_s or max(SHARE_LEAST_S, self.timeout_s / ASK_TRIES)
        try:
            async with asyncio.timeout(self.timeout_s):
                for _ in range(ASK_TRIES):
                    client = await self._opened()
                    try:
                        to = await any_node(client, tried.union(but_not)) if node is None else node
                        tried.add(to)
                        others = node is None and {broker.nodeId for broker in client.cluster.brokers()} - tried
                        async with asyncio.timeout(share_s if others else None):
                            answer = await client.send(to, request)
                            self._heard = (to,)
                            return answer
                    except (errors.KafkaError, OSError) as error:
                        failed = error
                        await asyncio.sleep(RETRY_PAUSE_S)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            failed = error
        await self._leave()  # and bootstrap again next time: the brokers may all have moved
        if isinstance(failed, REFUSED):
            self.count_failure("metadata")
            raise KafkaRefuses(
                f"{PREFIX}KAFKA_SASL_USERNAME, {PREFIX}KAFKA_SASL_PASSWORD or {PREFIX}KAFKA_SASL_MECHANISM is wrong "
                f"(Kafka at {self.bootstrap}: {failed!r}): set what its brokers let in"
            ) from failed
        raise self.failed("metadata", f"Kafka at {self.bootstrap} does not answer: {failed!r}") from failed

    async def _ask_controller(self, request: Any) -> Any:
        try:
            async with asyncio.timeout(2 * self.timeout_s):
                client = await self._opened()
                while True:
                    if (controller := client.cluster.controller) is not None:
                        answer = await client.send(controller.nodeId, request)
                        if all(errors.for_code(row[1]) is not errors.NotControllerError for row in answer.topic_errors):
                            return answer
                    await client.force_metadata_update()
                    await asyncio.sleep(RETRY_PAUSE_S)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("admin", f"Kafka at {self.bootstrap} does not answer: {error!r}") from error


def _offsets(answer: Any) -> dict[tuple[str, int], int]:
    """The offsets in an answer to ListOffsets, without the partitions of which it tells an error."""
    return {
        (topic, number): offset
        for topic, rows in (tuple(each) for each in answer.topics)
        for number, code, _, offset in (tuple(row) for row in rows)
        if code == errors.NoError.errno
    }


def _text(error: Exception | None) -> str:
    """What an error says, its name where it says nothing, "" where there is none."""
    return "" if error is None else str(error) or type(error).__name__


def _short(replicas: Mapping[int, tuple[int, int]], settings: Mapping[str, str]) -> frozenset[int]:
    """The partitions with too few replicas in sync, of (replicas, in sync) by partition.

    More than there are need not be in sync (KIP-966); before Kafka 4 such a topic takes no record, as it says itself.
    """
    least = int(settings.get("min.insync.replicas") or 1)
    return frozenset(number for number, (count, in_sync) in replicas.items() if in_sync < min(least, count))
