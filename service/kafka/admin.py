"""The connection of a process for admin requests, and the ways on which they go: to any broker, a node, a coordinator.

What is requested is in modules by role: topics (topic_admin), transactions (transaction_admin), ACLs (acl_inspector).
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from aiokafka import errors
from aiokafka.client import CoordinationType
from aiokafka.protocol.metadata import MetadataRequest

from service.contract import SharedSettings
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaLoginFailed
from service.kafka.client import Client
from service.kafka.connection import LOGIN_ERRORS
from service.kafka.deadline import shared, within
from service.kafka.nodes import RETRIABLE, RETRY_PAUSE_S, any_node, coordinator
from service.kafka.records import COMPRESSION_CODECS
from service.kafka.security import Security

# Versions of transactions: always 1, or the newest that the brokers have finalized (KIP-890).
TRANSACTIONS_1, TRANSACTIONS_AUTO = "1", "auto"
# Errors of a request without a usable response; TimeoutError is an OSError.
UNANSWERED: Final = (errors.KafkaError, OSError)
ASK_TRIES: Final = 5
# The shortest time that one broker gets to answer before another is asked: the connection may have to log in first.
SHARE_LEAST_S: Final = 1.0
# The highest age of the metadata that this client keeps.
METADATA_AGE_MS: Final = 30_000


class KafkaAdmin:
    """A client for admin requests, which is connected by the first one, and again where no broker answers.

    `failing` makes KafkaAway of all errors of a request. The request to any broker, and that to the controller, have
    deadlines of their own; those to a node and to a coordinator have that of their caller.
    """

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
        self._errors = telemetry.kafka.errors
        self.security = security or Security(SharedSettings())
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._answering: asyncio.Task[Any] | None = None
        self.answered_last: Collection[int] = ()  # the node that answered the last request to any broker

    @property
    def timeout_s(self) -> float:
        return self.request_timeout_ms / 1000

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
        """Close the connection and the sources of its logins; a request that is under way fails."""
        if self._answering is not None:
            self._answering.cancel()
        self.security.close()
        await self._disconnect(self._client)

    async def connected(self) -> Client:
        """Return the client, connected; concurrent callers wait for one connection. Raises UNANSWERED.

        A request that fails may replace the client: ask for it again before each request.
        """
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Client:
        """Connect a client. Raises UNANSWERED."""
        client = Client(metadata_max_age_ms=METADATA_AGE_MS, **self.options("cluster"))
        try:
            await client.bootstrap()
        except BaseException:
            await client.close()
            raise
        return client

    async def _disconnect(self, client: Client | None) -> None:
        """Close a client, unless another request has done so; the next request connects another."""
        if client is not None and self._client is client:
            self._client = None
            with contextlib.suppress(Exception):
                await within(1.0, client.close())

    # --------------------------------------------------------------------------------------------------------- errors

    def failed(self, operation: str, why: str) -> KafkaAway:
        """Count a failed operation and make the error to raise for it."""
        self.count_failure(operation)
        return KafkaAway(why)

    def count_failure(self, operation: str) -> None:
        """Count a failed operation; `operation` is a label of fencepost_kafka_errors, so the set is bounded."""
        self._errors.labels(operation).inc()

    @contextlib.contextmanager
    def failing(self, operation: str, why: str) -> Iterator[None]:
        """Raise KafkaAway in place of UNANSWERED, and count it; `operation` as for `count_failure`."""
        try:
            yield
        except UNANSWERED as error:
            raise self.failed(operation, f"{why}: {error!r}") from error

    # ------------------------------------------------------------------------------------------------------- requests

    async def answers(self, timeout_s: float) -> None:
        """Check that a broker answers within `timeout_s`, else raise KafkaAway.

        Concurrent callers share one request, which goes on after a caller's timeout.
        """
        if self._answering is None or self._answering.done():
            question = MetadataRequest([], allow_auto_topic_creation=False)
            self._answering = asyncio.create_task(self.request(question, share_s=timeout_s / 3))
        try:
            async with asyncio.timeout(timeout_s):
                await shared(self._answering)
        except TimeoutError as error:
            raise KafkaAway(f"Kafka at {self.bootstrap} does not answer within {timeout_s} s") from error

    async def request(
        self, request: Any, node: int | None = None, *, but_not: Collection[int] = (), share_s: float | None = None
    ) -> Any:
        """Send a request to `node`, or to any broker outside `but_not`, and await the response. Raises KafkaAway.

        Without `node`, another broker is asked where one does not answer within `share_s`, until all were asked.
        """
        client: Client | None = None
        failed: BaseException | None = None
        tried: set[int] = set()
        share_s = share_s or max(SHARE_LEAST_S, self.timeout_s / ASK_TRIES)
        try:
            async with asyncio.timeout(self.timeout_s):
                for _ in range(ASK_TRIES):
                    client = await self.connected()
                    try:
                        to = await any_node(client, tried.union(but_not)) if node is None else node
                        tried.add(to)
                        others = node is None and {broker.nodeId for broker in client.cluster.brokers()} - tried
                        async with asyncio.timeout(share_s if others else None):
                            response = await client.send(to, request)
                            self.answered_last = (to,)
                            return response
                    except UNANSWERED as error:
                        failed = error
                        await asyncio.sleep(RETRY_PAUSE_S)
        except UNANSWERED as error:
            failed = error
        await self._disconnect(client)  # all brokers may have other addresses by the next request
        if isinstance(failed, LOGIN_ERRORS):
            self.count_failure("metadata")
            raise KafkaLoginFailed(self.security.remedy(failed)) from failed
        raise self.failed("metadata", f"Kafka at {self.bootstrap} does not answer: {failed!r}") from failed

    async def request_once(self, node: int, request: Any) -> Any:
        """Send a request once to a node, such as a partition's leader, and await the response. Raises UNANSWERED."""
        return await (await self.connected()).send(node, request)

    async def request_coordinator(
        self,
        name: str,
        request: Any,
        code_of: Callable[[Any], int],
        kind: CoordinationType = CoordinationType.TRANSACTION,
    ) -> Any:
        """Send a request to the coordinator of a transactional id, or of a group, until the answer is final.

        `code_of` reads the error code of a response. RETRIABLE errors have the request sent again; the caller sets the
        deadline. Raises UNANSWERED for other errors that came without a response.
        """
        while True:
            try:
                client = await self.connected()
                response = await client.send(await coordinator(client, name, kind), request)
                if not issubclass(errors.for_code(code_of(response)), RETRIABLE):
                    return response
            except RETRIABLE:
                pass
            await asyncio.sleep(RETRY_PAUSE_S)

    async def request_controller(self, request: Any) -> Any:
        """Send a request to the controller, and again where the controller moves; its response. Raises KafkaAway."""
        with self.failing("admin", f"Kafka at {self.bootstrap} does not answer"):
            async with asyncio.timeout(2 * self.timeout_s):
                while True:
                    client = await self.connected()
                    if (controller := client.cluster.controller) is not None:
                        response = await client.send(controller.nodeId, request)
                        if all(
                            errors.for_code(row[1]) is not errors.NotControllerError for row in response.topic_errors
                        ):
                            return response
                    await client.force_metadata_update()
                    await asyncio.sleep(RETRY_PAUSE_S)
