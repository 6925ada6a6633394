"""The admin client: topics, their settings, offsets, open transactions, and the fencing of transactional ids."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.client import CoordinationType
from aiokafka.protocol.admin import CreatePartitionsRequest, CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from service.contract import PREFIX, SharedSettings
from service.contract.wire import WireError
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaForbids, KafkaLoginFailed, KafkaRefusesSetting
from service.kafka.client import Client
from service.kafka.connection import LOGIN_ERRORS, UNREACHABLE, Connection
from service.kafka.deadline import shared, within
from service.kafka.hanging import ActiveProducer, RecordCoordinates
from service.kafka.inspection import FINAL, active_producers, fetch, last_transaction
from service.kafka.listing import Listing, listing_of
from service.kafka.metadata import Metadata, Partition, Partitions, UndecodedMetadata, partitions_of
from service.kafka.records import COMPRESSION_CODECS
from service.kafka.security import Security

TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
TRANSACTION_TIMEOUT_MAX: Final = "transaction.max.timeout.ms"
# Kafka's default of a topic's max.message.bytes.
MESSAGE_BYTES_DEFAULT: Final = 1_048_588
# Versions of transactions: always 1, or the newest that the brokers have finalized (KIP-890).
TRANSACTIONS_1, TRANSACTIONS_AUTO = "1", "auto"
# ListOffsets: the timestamp that means "the last offset", and the isolation levels (IsolationLevel in Kafka).
LATEST: Final = -1
READ_UNCOMMITTED, READ_COMMITTED = 0, 1
RETRY_PAUSE_S: Final = 0.02
# For reading the brokers' setting that refuses one of ours. The refusal is reported also without it.
MAXIMUM_TIMEOUT_S: Final = 1.0
ASK_TRIES: Final = 5
# The shortest time that one broker gets to answer before another is asked: the connection may have to log in first.
SHARE_LEAST_S: Final = 1.0
# Concurrent requests on one connection: a broker answers the requests of a connection in order, one at a time.
FENCES_AT_ONCE: Final = 16
# Topics in one Metadata request, and partitions in one ListOffsets request, where there may be thousands: a response is
# decoded in one step of the event loop, whose time grows with its partitions. A topic with hundreds of partitions makes
# the step of its Metadata response longer.
TOPICS_AT_ONCE: Final = 25
PARTITIONS_AT_ONCE: Final = 250
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


async def any_node(client: Client, but_not: Collection[int] = ()) -> int:
    """Choose a random broker, outside `but_not` if there is another.

    Raises NodeNotReadyError where Kafka lists no broker: a single broker lists none while its controller fences it.
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


async def coordinator(client: Client, transactional_id: str) -> int:
    """Look up the node id of a transactional id's coordinator. Raises KafkaError where no broker answers."""
    await any_node(client)  # without a known broker, coordinator_lookup fails an assertion
    return int(await client.coordinator_lookup(CoordinationType.TRANSACTION, transactional_id))


def remedy(error: Exception, transactional_id: str) -> str:
    """Say what an operator has to change for a producer id that Kafka refuses for good; "" for any other error."""
    if isinstance(error, errors.TransactionalIdAuthorizationFailed):
        return f"the service has no permission to Describe and Write transactional id {transactional_id}"
    return ""


async def timeout_refused(client: Client, node: int, transaction_timeout_ms: int) -> KafkaRefusesSetting:
    """Make the error for a transaction timeout that a broker refuses; the text has its maximum if that may be read."""
    most = ""
    request = DescribeConfigsRequest([(BROKER_RESOURCE, str(node), [TRANSACTION_TIMEOUT_MAX])])
    with contextlib.suppress(errors.KafkaError, OSError):  # TimeoutError is an OSError
        async with asyncio.timeout(MAXIMUM_TIMEOUT_S):
            response = await client.send(node, request)
            settings = {entry[0]: entry[1] for resource in response.resources for entry in resource[4]}
            most = settings.get(TRANSACTION_TIMEOUT_MAX) or ""
    return KafkaRefusesSetting(
        f"{PREFIX}TRANSACTION_TIMEOUT_MS={transaction_timeout_ms} is more than the brokers' {TRANSACTION_TIMEOUT_MAX}"
        + (f", {most}: set {most} or less, or raise theirs" if most else ": set a smaller one, or raise theirs")
    )


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


class Ends(NamedTuple):
    """End offsets of a partition: the last stable offset (for read_committed) and the high watermark."""

    last_stable: int
    high_watermark: int


class LastOffsets(NamedTuple):
    """The ends of partitions whose leaders answered, the topics that do not exist, and how many partitions topics have.

    `partitions` has no number for a topic that does not exist or that the service may not see.
    """

    ends: Mapping[Partition, Ends]
    absent: Collection[str] = ()
    partitions: Mapping[str, int] = MappingProxyType({})


class KafkaAdmin:
    """An admin client. Every call has a deadline and raises KafkaAway where Kafka does not answer."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str,
        request_timeout_ms: int,
        telemetry: Telemetry,
        security: Security | None = None,
        compression: str = "none",
        transactions: str = TRANSACTIONS_1,
    ) -> None:
        self.transactions = transactions
        self.bootstrap = bootstrap
        self.client_id = client_id
        self.request_timeout_ms = request_timeout_ms
        self.codec = COMPRESSION_CODECS[compression]
        self._errors = telemetry.kafka_errors
        self.security = security or Security(SharedSettings())
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._answering: asyncio.Task[Any] | None = None
        self._answered_last: Collection[int] = ()  # the node that answered the last request

    @property
    def timeout_s(self) -> float:
        return self.request_timeout_ms / 1000

    def failed(self, operation: str, why: str) -> KafkaAway:
        """Count a failed operation and make the error to raise for it."""
        self.count_failure(operation)
        return KafkaAway(why)

    def count_failure(self, operation: str) -> None:
        """Count a failed operation; `operation` is a label of fencepost_kafka_errors, so the set is bounded."""
        self._errors.labels(operation).inc()

    def options(self, name: str) -> dict[str, Any]:
        """Make the client options that all producers and consumers of this process share."""
        return {
            "bootstrap_servers": self.bootstrap,
            "client_id": f"{self.client_id}/{name}",
            "request_timeout_ms": self.request_timeout_ms,
            "retry_backoff_ms": 20,
            "security": self.security,
        }

    async def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        self.security.close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        """Close the client; the next request connects another."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await within(1.0, client.close())

    async def answers(self, timeout_s: float) -> None:
        """Check that a broker answers within `timeout_s`, else raise KafkaAway.

        Concurrent callers share one request, which goes on after a caller's timeout.
        """
        if self._answering is None or self._answering.done():
            question = MetadataRequest([], allow_auto_topic_creation=False)
            self._answering = asyncio.create_task(self._request(question, share_s=timeout_s / 3))
        try:
            async with asyncio.timeout(timeout_s):
                await shared(self._answering)
        except TimeoutError as error:
            raise KafkaAway(f"Kafka at {self.bootstrap} does not answer within {timeout_s} s") from error

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        """Count the partitions of the topics that exist, without creating any."""
        return {name: len(found.replicas) for name, found in (await self._partitions(topics)).items()}

    async def _partitions(self, topics: Sequence[str], *, elsewhere: bool = False) -> dict[str, Partitions]:
        """Look up the ids and partitions of the topics that exist; `elsewhere` as for `describe`."""
        response = await self._request(Metadata(topics), but_not=self._answered_last if elsewhere else ())
        found: dict[str, Partitions] = {}
        for topic in map(tuple, response.topics):
            code, name, *_ = topic
            kind = errors.for_code(code)
            if kind in (errors.NoError, errors.LeaderNotAvailableError):
                found[name] = partitions_of(topic)
            elif kind is errors.TopicAuthorizationFailedError:
                self.count_failure("metadata")
                raise KafkaForbids(f"the service has no permission to describe topic {name}")
            elif kind not in (errors.UnknownTopicOrPartitionError, errors.InvalidTopicError):
                raise self.failed("metadata", f"topic {name}: {kind.__name__}")
        return found

    async def list_topics(self, names: Sequence[str] | None) -> Listing:
        """List topics with their partitions, or all topics; those that do not exist are left out. Raises KafkaAway.

        A cluster may have many topics, so the response is decoded in a thread.
        """
        return await asyncio.to_thread(listing_of, await self._request(UndecodedMetadata(names)))

    async def last_offsets(self, topics: Sequence[str], only: Collection[Partition] = ()) -> LastOffsets:
        """Ask the leaders for the end offsets of the topics' partitions, or of those in `only`. Raises KafkaAway.

        Costs a Metadata request for TOPICS_AT_ONCE topics, and two ListOffsets for PARTITIONS_AT_ONCE partitions of a
        leader. The high watermark is requested before the LSO, so that an idle partition never shows an LSO below it.
        Partitions whose leader does not answer are left out.
        """
        led: dict[int, list[Partition]] = {}
        absent: list[str] = []
        counts: dict[str, int] = {}
        for start in range(0, len(topics), TOPICS_AT_ONCE):
            response = await self._request(Metadata(topics[start : start + TOPICS_AT_ONCE]))
            for topic_code, name, _id, _internal, partitions, *_ in (tuple(topic) for topic in response.topics):
                if topic_code == errors.UnknownTopicOrPartitionError.errno:
                    absent.append(name)
                elif partitions:
                    counts[name] = len(partitions)
                for code, number, leader, *_ in (tuple(row) for row in partitions):
                    if code == errors.NoError.errno and leader >= 0 and (not only or (name, number) in only):
                        led.setdefault(leader, []).append((name, number))
        ends = await asyncio.gather(*(self._ends_at(node, partitions) for node, partitions in led.items()))
        return LastOffsets({partition: end for found in ends for partition, end in found.items()}, absent, counts)

    async def _ends_at(self, node: int, partitions: Sequence[Partition]) -> dict[Partition, Ends]:
        """Ask a node for the end offsets of partitions that it leads; partitions without an answer are left out.

        All requests to the node share one timeout, because the caller reads its clock before them.
        """
        found: dict[Partition, Ends] = {}
        with contextlib.suppress(errors.KafkaError, OSError, TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                for start in range(0, len(partitions), PARTITIONS_AT_ONCE):
                    asked: dict[str, list[tuple[int, int]]] = {}
                    for topic, number in partitions[start : start + PARTITIONS_AT_ONCE]:
                        asked.setdefault(topic, []).append((number, LATEST))
                    offsets: list[dict[Partition, int]] = []
                    for isolation in (READ_UNCOMMITTED, READ_COMMITTED):
                        client = await self._connected()  # another request may have replaced it
                        response = await client.send(node, OffsetRequest(-1, isolation, list(asked.items())))
                        offsets.append(_offsets(response))
                    high, stable = offsets
                    found |= {partition: Ends(stable[partition], high[partition]) for partition in high.keys() & stable}
        return found

    async def open_transactions(self, partitions: Collection[Partition]) -> dict[Partition, list[ActiveProducer]]:
        """Ask the leaders for the active producers of partitions; partitions without an answer are left out."""
        try:
            found = await active_producers(await self._connected(), partitions, self.timeout_s / ASK_TRIES)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("metadata", f"partition leaders did not describe their producers: {error!r}") from error
        return found.active

    async def slots_of(self, records: Iterable[RecordCoordinates]) -> dict[RecordCoordinates, int]:
        """Read which slots have written records, by their headers; records of no slot are left out."""
        found: dict[RecordCoordinates, int] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                for record in records:
                    with contextlib.suppress(errors.KafkaError, OSError, WireError):
                        entries, _, _ = await fetch(await self._connected(), *record)
                        for first in entries[:1]:
                            if (slot := first.slot()) is not None:
                                found[record] = slot
        return found

    async def producer_ids(self, transactional_ids: Iterable[str]) -> dict[str, int]:
        """Ask the coordinators for the producer ids of transactional ids; unknown ones are left out."""
        permits = asyncio.Semaphore(FENCES_AT_ONCE)

        async def ask(name: str) -> int:
            async with permits:
                client = await self._connected()
                return (await last_transaction(client, await coordinator(client, name), name)).producer_id

        names = list(transactional_ids)
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await asyncio.gather(*map(ask, names))
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("metadata", f"coordinators did not describe producer ids: {error!r}") from error
        return {name: producer for name, producer in zip(names, found, strict=True) if producer >= 0}

    async def describe(self, names: Sequence[str], *, elsewhere: bool = False) -> dict[str, Topic]:
        """Describe topics with their settings; topics that do not exist are left out.

        `elsewhere`: ask a broker other than the one that answered last, if there is another.
        """
        found = await self._partitions(names, elsewhere=elsewhere)
        if not found:
            return {}
        response = await self._request(
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
            raise self.failed("metadata", unsure)
        return topics

    async def create(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Create a topic with the broker's default replication; TopicAlreadyExists is no error."""
        response = await self._request_controller(
            CreateTopicsRequest([(name, partitions, -1, [], list(settings.items()))], self.request_timeout_ms, False)
        )
        for topic, code, *message in (tuple(row) for row in response.topic_errors):
            if errors.for_code(code) not in (errors.NoError, errors.TopicAlreadyExistsError):
                raise self.failed("admin", f"topic {topic} was not created: {errors.for_code(code).__name__} {message}")

    async def grow(self, name: str, partitions: int) -> None:
        """Raise a topic's number of partitions."""
        response = await self._request_controller(
            CreatePartitionsRequest([(name, (partitions, None))], self.request_timeout_ms, False)
        )
        for topic, code, message in (tuple(row) for row in response.topic_errors):
            if errors.for_code(code) is not errors.NoError and (await self.partitions([name]))[name] < partitions:
                raise self.failed("admin", f"topic {topic} cannot get {partitions} partitions: {message}")

    async def fence(
        self,
        transactional_ids: Sequence[str],
        transaction_timeout_ms: int,
        on_progress: Callable[[Collection[str]], None],
    ) -> None:
        """Fence every producer with one of these ids and wait until its open transaction has ended.

        `InitProducerId` raises the epoch and aborts an open transaction. Until that has ended, the coordinator answers
        CONCURRENT_TRANSACTIONS, and the request is repeated (KIP-98, KIP-360). Raises KafkaAway at the deadline, which
        is the request timeout and the transaction timeout together, and at once if Kafka refuses an id for good;
        KafkaRefusesSetting if Kafka refuses the transaction timeout.

        `on_progress` is called with the ids that are left, in order: at the start and after each fenced id.
        """
        permits = asyncio.Semaphore(FENCES_AT_ONCE)
        left = dict.fromkeys(transactional_ids)
        on_progress(left)

        async def fence_one(transactional_id: str) -> None:
            async with permits:
                await self._init_producer_id(transactional_id, transaction_timeout_ms)
            del left[transactional_id]
            on_progress(left)

        tasks = [asyncio.create_task(fence_one(transactional_id)) for transactional_id in transactional_ids]
        try:
            # A transaction may just have begun to commit: writing its markers may take up to the transaction timeout.
            async with asyncio.timeout(self.timeout_s + transaction_timeout_ms / 1000):
                await asyncio.gather(*tasks)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("fence", f"not every transactional id could be fenced: {error!r}") from error
        finally:
            for task in tasks:
                task.cancel()

    async def _init_producer_id(self, transactional_id: str, transaction_timeout_ms: int) -> None:
        """Send InitProducerId until it succeeds.

        Raises KafkaError; KafkaAway where Kafka refuses the id for good, KafkaRefusesSetting for the timeout.
        """
        request = InitProducerIdRequest(transactional_id, transaction_timeout_ms)
        while True:
            try:
                client = await self._connected()
                node = await coordinator(client, transactional_id)
                response = await client.send(node, request)
                kind = errors.for_code(response.error_code)
                if kind is errors.NoError:
                    return
                if kind is errors.InvalidTransactionTimeout:
                    self.count_failure("fence")
                    raise await timeout_refused(client, node, transaction_timeout_ms)
                raise kind
            except RETRIABLE:
                await asyncio.sleep(RETRY_PAUSE_S)
            except errors.KafkaError as error:
                if why := remedy(error, transactional_id):
                    raise self.failed("fence", why) from error
                raise

    async def partitions_with_open_transactions(self, partitions: Collection[Partition]) -> set[Partition]:
        """Find the partitions that hold an open transaction of any producer.

        Partitions that the service may not inspect count as not open. Raises KafkaAway where a leader does not answer.
        """
        try:
            found = await active_producers(await self._connected(), partitions, self.timeout_s)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("end-hanging", f"partition leaders do not answer: {error!r}") from error
        forbidden = {partition for partition, code in found.failed.items() if code in FINAL}
        if missing := set(partitions) - found.active.keys() - forbidden:
            raise self.failed("end-hanging", f"no leader answers for {sorted(missing)[:PARTITIONS_NAMED]}")
        return {
            partition for partition, producers in found.active.items() if any(each.start >= 0 for each in producers)
        }

    # --------------------------------------------------------------------------------------------------- asking

    async def _connected(self) -> Client:
        """Return the client, connected; concurrent callers wait for one connection. Raises KafkaError."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Client:
        """Connect a client. Raises KafkaError."""
        client = Client(metadata_max_age_ms=30_000, **self.options("cluster"))
        try:
            await client.bootstrap()
        except BaseException:
            await client.close()
            raise
        return client

    async def why_not(self, host: str, port: int) -> str:
        """Say why a connection to an address fails; "" where it succeeds."""
        connection = Connection(host, port, self.security, request_timeout_ms=self.request_timeout_ms)
        try:
            await connection.connect()
        except UNREACHABLE as error:
            return str(error) or type(error).__name__
        finally:
            connection.close()
        return ""

    async def _request(
        self, request: Any, node: int | None = None, *, but_not: Collection[int] = (), share_s: float | None = None
    ) -> Any:
        """Send a request to `node`, or to any broker outside `but_not`, and await the response. Raises KafkaAway.

        Without `node`, another broker is asked where one does not answer within `share_s`, until all were asked.
        """
        failed: BaseException | None = None
        tried: set[int] = set()
        share_s = share_s or max(SHARE_LEAST_S, self.timeout_s / ASK_TRIES)
        try:
            async with asyncio.timeout(self.timeout_s):
                for _ in range(ASK_TRIES):
                    client = await self._connected()
                    try:
                        to = await any_node(client, tried.union(but_not)) if node is None else node
                        tried.add(to)
                        others = node is None and {broker.nodeId for broker in client.cluster.brokers()} - tried
                        async with asyncio.timeout(share_s if others else None):
                            response = await client.send(to, request)
                            self._answered_last = (to,)
                            return response
                    except (errors.KafkaError, OSError) as error:
                        failed = error
                        await asyncio.sleep(RETRY_PAUSE_S)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            failed = error
        await self._disconnect()  # the next request bootstraps again: all brokers may have other addresses by then
        if isinstance(failed, LOGIN_ERRORS):
            self.count_failure("metadata")
            raise KafkaLoginFailed(self.security.remedy(failed)) from failed
        raise self.failed("metadata", f"Kafka at {self.bootstrap} does not answer: {failed!r}") from failed

    async def _request_controller(self, request: Any) -> Any:
        """Send a request to the controller, and again where the controller moves; its response. Raises KafkaAway."""
        try:
            async with asyncio.timeout(2 * self.timeout_s):
                while True:
                    client = await self._connected()
                    if (controller := client.cluster.controller) is not None:
                        response = await client.send(controller.nodeId, request)
                        if all(
                            errors.for_code(row[1]) is not errors.NotControllerError for row in response.topic_errors
                        ):
                            return response
                    await client.force_metadata_update()
                    await asyncio.sleep(RETRY_PAUSE_S)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self.failed("admin", f"Kafka at {self.bootstrap} does not answer: {error!r}") from error


def _offsets(response: Any) -> dict[tuple[str, int], int]:
    """Extract the offsets of a ListOffsets response, without partitions that have an error."""
    return {
        (topic, number): offset
        for topic, rows in (tuple(each) for each in response.topics)
        for number, code, _, offset in (tuple(row) for row in rows)
        if code == errors.NoError.errno
    }


def _under_min_isr(replicas: Mapping[int, tuple[int, int]], settings: Mapping[str, str]) -> frozenset[int]:
    """Find the partitions under min ISR; `replicas` has (replicas, in-sync replicas) by partition.

    min.insync.replicas is capped at the number of replicas (KIP-966). Before Kafka 4 the broker refuses such records
    with an error of its own.
    """
    least = int(settings.get("min.insync.replicas") or 1)
    return frozenset(number for number, (count, in_sync) in replicas.items() if in_sync < min(least, count))
