"""The read-only routes of the Confluent REST Proxy that clients call before they write: cluster, topics, partitions.

A caller sees the topics that it may write to. Everything else of that API is answered 404 with where to go.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.contract.wire.names import TOPIC
from service.core.problems import INCOMPLETE, NOT_FOUND, UNKNOWN_TOPIC, KafkaAway, KafkaForbids, Problem
from service.core.time_slice import TimeSlice
from service.events.event import invalid
from service.events.produce import PARTITION_NOT_FOUND, ProduceProblem
from service.http.asgi import send_whole
from service.http.caller import Caller
from service.http.certificates import NO_CERTIFICATE, SCOPE_KEY
from service.http.headers import pick
from service.http.produce_answers import V2_TYPE, V3_TYPE, error_of, lines_of_error, render_error
from service.http.produce_v3 import V3_PREFIXES
from service.http.request_guard import RequestGuard
from service.http.responses import headers_of
from service.kafka.deadline import shared
from service.kafka.listing import ListedPartition, ListedTopic, Listing, TopicLister
from service.kafka.topics import InternalTopics, TopicMetadataCache

# Topics in one list, the first by name.
LISTED_MAX: Final = 10_000
# Rendered lists in memory: of one cluster's listing, by API, caller and URL. Each has some MB for LISTED_MAX topics.
SHARED_MAX: Final = 4
# Characters of the host in a request for a list, whose items repeat it: a DNS name and a port.
HOST_CHARS_MAX: Final = 261
# The code of a GET of v2, and that of v3, which is the same for topics and partitions.
TOPIC_NOT_FOUND, UNKNOWN_TOPIC_OR_PARTITION = 40401, 40403
_WHERE_TO_GO: Final = (
    "Fencepost writes records (POST /topics/{topic}, POST /v3/clusters/{cluster_id}/topics/{topic_name}/records, "
    "records:batch) and lists topics. For consumers, use a Kafka client with isolation.level=read_committed, or "
    "Fencepost's reader; for topics, groups, ACLs and configs, use Kafka's own tools, or a REST proxy beside this "
    "service"
)

_encode: Final = msgspec.json.Encoder().encode
Json = Mapping[str, Any]
ListHandler = Callable[["ListRequest"], Awaitable[bytes]]


class ListingParts(Protocol):
    """The parts of a running service that the lists need."""

    topic_lister: TopicLister
    topic_metadata: TopicMetadataCache
    topics: InternalTopics


class SharedLists:
    """Rendered lists of topics, each made once and shared by all readers, until the cluster is listed again."""

    def __init__(self) -> None:
        self._listing: Listing | None = None
        self._lists: dict[tuple[object, ...], asyncio.Task[bytes]] = {}

    async def of(
        self, listing: Listing, key: tuple[object, ...], render: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> bytes:
        """Return what `render` makes of a listing for all requests with this key."""
        if listing is not self._listing:
            self._listing, self._lists = listing, {}
        task = self._lists.pop(key, None)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(render())
        self._lists[key] = task  # as the last one used
        if len(self._lists) > SHARED_MAX:
            del self._lists[next(iter(self._lists))]
        return await shared(task)


class ListRequest:
    """A request for a list: who asks, the parameters of its path, and the parts of the service."""

    def __init__(self, request: Request, caller: Caller, parts: ListingParts, lists: SharedLists) -> None:
        """Raises Problem (400) for a host that is too long."""
        if len(request.url.netloc) > HOST_CHARS_MAX:
            raise invalid("Host", f"at most {HOST_CHARS_MAX} characters are taken")
        self.path: Mapping[str, str] = request.path_params
        prefix = _v3_prefix_of(request.url.path)
        self._is_v3 = prefix is not None
        self.base = f"{request.url.scheme}://{request.url.netloc}{prefix or ''}"  # of the URLs in answers of v3
        self._caller = caller
        self._parts = parts
        self._lists = lists

    def sees(self, topic: ListedTopic) -> bool:
        """Whether the caller may write to a topic, and it is none of Kafka's or Fencepost's own."""
        hidden = topic.is_internal or self._parts.topics.reserved(topic.name)
        return not hidden and self._caller.may_write_to(topic.name)

    async def all(self, render: Callable[[Listing, list[ListedTopic]], Awaitable[bytes]]) -> bytes:
        """Return what `render` makes of the topics that the caller sees, once for all requests of the caller."""
        listing = self.check_cluster(await self._parts.topic_lister.all())

        async def rendered() -> bytes:
            return await render(listing, await self._seen(listing))

        return await self._lists.of(listing, (self._is_v3, self._caller, self.base), rendered)

    async def _seen(self, listing: Listing) -> list[ListedTopic]:
        """List the topics that the caller sees, of LISTED_MAX at most."""
        time_slice = TimeSlice()
        seen = []
        for topic in listing.topics.values():
            if time_slice.is_over:
                await time_slice.next()
            if self.sees(topic):
                seen.append(topic)
                if len(seen) == LISTED_MAX:
                    break
        return seen

    async def one(self) -> tuple[Listing, ListedTopic]:
        """Look up the topic of the path. Raises Problem (404) if the caller does not see one."""
        name = self.path["topic"]
        if TOPIC.fullmatch(name) is None:
            raise self._not_found(TOPIC_NOT_FOUND, "topic: use 1 to 249 of letters, digits, '.', '_' and '-'")
        listing = await self._parts.topic_lister.some(name)
        topic = listing.topics.get(name)
        if topic is None or not self.sees(topic):
            raise self._not_found(TOPIC_NOT_FOUND, f"topic: {name} does not exist, or is not yours: correct its name")
        return listing, topic

    async def partition(self) -> tuple[Listing, ListedTopic, ListedPartition]:
        """Look up the partition of the path. Raises Problem (404)."""
        listing, topic = await self.one()
        for partition in topic.partitions:
            if str(partition.number) == self.path["partition"]:
                return listing, topic, partition
        raise self._not_found(PARTITION_NOT_FOUND, f"partition: {topic.name} has no such partition")

    def _not_found(self, error_code: int, detail: str) -> Problem:
        return ProduceProblem(404, UNKNOWN_TOPIC_OR_PARTITION if self._is_v3 else error_code, detail)

    async def settings(self, topic: str) -> Mapping[str, str]:
        # A look-up by the cache would count as a request to write to the topic, whose partitions are watched then.
        known = self._parts.topic_metadata.fresh(topic)
        return await self._parts.topic_lister.settings_of(topic) if known is None else known.settings

    async def cluster(self) -> Listing:
        """Look up the cluster of the path, or the only one. Raises Problem (404) for another."""
        return self.check_cluster(await self._parts.topic_lister.some())

    def check_cluster(self, listing: Listing) -> Listing:
        """Raise Problem (404) if the path names another cluster."""
        if self.path.get("cluster", listing.cluster_id) != listing.cluster_id:
            raise Problem(NOT_FOUND, f"cluster: {self.path['cluster']} cannot be found; this is {listing.cluster_id}")
        return listing


class _Whole:
    """A response whose body many share. It is sent in slices as the client reads, so that it is not copied."""

    def __init__(self, media_type: bytes, body: bytes) -> None:
        self._media_type = media_type
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, 200, [(b"content-type", self._media_type)], self._body)


class ProduceListing:
    """The read-only routes beside the produce API's POSTs."""

    def __init__(self, guard: RequestGuard, parts: ListingParts) -> None:
        self._guard = guard
        self._parts = parts
        self._lists = SharedLists()

    def routes(self) -> list[Route]:
        """Make the routes; those of other parts of the API come last."""
        v2: dict[str, ListHandler] = {
            "/topics": _v2_topics,
            "/topics/{topic}": _v2_topic,
            "/topics/{topic}/partitions": _v2_partitions,
            "/topics/{topic}/partitions/{partition}": _v2_partition,
        }
        cluster = "/v3/clusters/{cluster}"
        v3: dict[str, ListHandler] = {
            "/v3/clusters": _v3_clusters,
            cluster: _v3_cluster,
            f"{cluster}/topics": _v3_topics,
            f"{cluster}/topics/{{topic}}": _v3_topic,
            f"{cluster}/topics/{{topic}}/partitions": _v3_partitions,
            f"{cluster}/topics/{{topic}}/partitions/{{partition}}": _v3_partition,
        }
        served = [self._route(path, answer, V2_TYPE) for path, answer in v2.items()]
        others = ["/topics", "/topics/{rest:path}", "/consumers/{rest:path}", "/brokers"]
        for prefix in V3_PREFIXES:
            served += [self._route(path, answer, V3_TYPE, prefix) for path, answer in v3.items()]
            others += [f"{prefix}/v3", f"{prefix}/v3/{{rest:path}}"]
        return served + [Route(path, _NotHere(path), include_in_schema=False) for path in others]

    def _route(self, path: str, answer: ListHandler, media_type: bytes, prefix: str = "") -> Route:
        async def get(request: Request) -> ASGIApp:
            try:
                used = pick(request.headers.raw)
                address = request.client.host if request.client else None
                needs_host = request.scope["http_version"] != "1.0"
                certificate = request.scope.get(SCOPE_KEY, NO_CERTIFICATE)
                caller = await self._guard.find_caller(address, used, host_needed=needs_host, certificate=certificate)
                await caller.wait_s()  # asks for a slice; who is over the rate does not wait
                caller.spend(1, 0)
                body = await answer(ListRequest(request, caller, self._parts, self._lists))
                return _Whole(media_type, body)
            except Problem as problem:
                return _failed(problem, media_type)
            except KafkaForbids as error:
                return _failed(Problem(UNKNOWN_TOPIC, f"topic: {error}"), media_type)
            except (KafkaAway, TimeoutError) as error:
                return _failed(Problem(INCOMPLETE, f"Kafka does not answer: {error}"), media_type)

        return Route(f"{prefix}{path}", get, methods=["GET"], include_in_schema=not prefix)


class _NotHere:
    """Answers requests for the parts of the API that are not served, with any method."""

    def __init__(self, path: str) -> None:
        self._media_type = V2_TYPE if _v3_prefix_of(path) is None else V3_TYPE

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        problem = Problem(NOT_FOUND, f"{scope['method']} {scope['path'][:100]} is not served here. {_WHERE_TO_GO}")
        await _failed(problem, self._media_type)(scope, receive, send)


def _v3_prefix_of(path: str) -> str | None:
    """Return what is before /v3 in a path; None for a path of v2."""
    return next((prefix for prefix in V3_PREFIXES if path.startswith(f"{prefix}/v3")), None)


def _failed(problem: Problem, media_type: bytes) -> Response:
    error = error_of(problem)
    headers = {name.decode(): text.decode() for name, text in headers_of(lines_of_error(problem, media_type))}
    return Response(render_error(error), error.status, headers)


async def _joined(items: Iterable[Json]) -> bytes:
    """Encode a list in time slices."""
    time_slice = TimeSlice()
    pieces = []
    for item in items:
        if time_slice.is_over:
            await time_slice.next()
        pieces.append(_encode(item))
    return b",".join(pieces)


# ------------------------------------------------------------------------------------------------------------------ v2


async def _v2_topics(request: ListRequest) -> bytes:
    async def render(_: Listing, topics: list[ListedTopic]) -> bytes:
        return _encode([topic.name for topic in topics])

    return await request.all(render)


async def _v2_topic(request: ListRequest) -> bytes:
    _, topic = await request.one()
    partitions = await _joined(map(_v2_of, topic.partitions))
    name, configs = _encode(topic.name), _encode(await request.settings(topic.name))
    return b'{"name":%b,"configs":%b,"partitions":[%b]}' % (name, configs, partitions)


async def _v2_partitions(request: ListRequest) -> bytes:
    _, topic = await request.one()
    return b"[%b]" % await _joined(map(_v2_of, topic.partitions))


async def _v2_partition(request: ListRequest) -> bytes:
    _, _, partition = await request.partition()
    return _encode(_v2_of(partition))


def _v2_of(partition: ListedPartition) -> Json:
    leader, in_sync = partition.leader, set(partition.in_sync)
    replicas = [
        {"broker": broker, "leader": broker == leader, "in_sync": broker in in_sync} for broker in partition.replicas
    ]
    return {"partition": partition.number, "leader": leader, "replicas": replicas}


# ------------------------------------------------------------------------------------------------------------------ v3


async def _v3_clusters(request: ListRequest) -> bytes:
    cluster = _cluster_of(await request.cluster(), request.base)
    return await _collection("KafkaClusterList", f"{request.base}/v3/clusters", [cluster])


async def _v3_cluster(request: ListRequest) -> bytes:
    return _encode(_cluster_of(await request.cluster(), request.base))


async def _v3_topics(request: ListRequest) -> bytes:
    async def render(listing: Listing, topics: list[ListedTopic]) -> bytes:
        at = _url(listing, request.base)
        return await _collection("KafkaTopicList", f"{at}/topics", (_topic_of(listing, topic, at) for topic in topics))

    return await request.all(render)


async def _v3_topic(request: ListRequest) -> bytes:
    listing, topic = await request.one()
    return _encode(_topic_of(listing, topic, _url(request.check_cluster(listing), request.base)))


async def _v3_partitions(request: ListRequest) -> bytes:
    listing, topic = await request.one()
    at = f"{_url(request.check_cluster(listing), request.base)}/topics/{topic.name}/partitions"
    partitions = (_partition_of(listing, topic, partition, at) for partition in topic.partitions)
    return await _collection("KafkaPartitionList", at, partitions)


async def _v3_partition(request: ListRequest) -> bytes:
    listing, topic, partition = await request.partition()
    at = f"{_url(request.check_cluster(listing), request.base)}/topics/{topic.name}/partitions"
    return _encode(_partition_of(listing, topic, partition, at))


async def _collection(kind: str, url: str, items: Iterable[Json]) -> bytes:
    metadata = _encode({"self": url, "next": None})
    return b'{"kind":"%b","metadata":%b,"data":[%b]}' % (kind.encode(), metadata, await _joined(items))


def _url(listing: Listing, base: str) -> str:
    return f"{base}/v3/clusters/{listing.cluster_id}"


def _cluster_of(listing: Listing, base: str) -> Json:
    at = _url(listing, base)
    controller = {"controller": _related(f"{at}/brokers/{listing.controller}")} if listing.controller >= 0 else {}
    return {
        "kind": "KafkaCluster",
        "metadata": {"self": at, "resource_name": f"crn:///kafka={listing.cluster_id}"},
        "cluster_id": listing.cluster_id,
        **controller,
        "acls": _related(f"{at}/acls"),
        "brokers": _related(f"{at}/brokers"),
        "broker_configs": _related(f"{at}/broker-configs"),
        "consumer_groups": _related(f"{at}/consumer-groups"),
        "topics": _related(f"{at}/topics"),
        "partition_reassignments": _related(f"{at}/topics/-/partitions/-/reassignment"),
    }


def _topic_of(listing: Listing, topic: ListedTopic, at: str) -> Json:
    url = f"{at}/topics/{topic.name}"
    replicas = len(topic.partitions[0].replicas) if topic.partitions else 0
    return {
        "kind": "KafkaTopic",
        "metadata": {"self": url, "resource_name": f"crn:///kafka={listing.cluster_id}/topic={topic.name}"},
        "cluster_id": listing.cluster_id,
        "topic_name": topic.name,
        "is_internal": topic.is_internal,
        "replication_factor": replicas,
        "partitions_count": len(topic.partitions),
        "partitions": _related(f"{url}/partitions"),
        "configs": _related(f"{url}/configs"),
        "partition_reassignments": _related(f"{url}/partitions/-/reassignment"),
        "authorized_operations": [],
    }


def _partition_of(listing: Listing, topic: ListedTopic, partition: ListedPartition, at: str) -> Json:
    url = f"{at}/{partition.number}"
    leader = {"leader": _related(f"{url}/replicas/{partition.leader}")} if partition.leader >= 0 else {}
    name = f"crn:///kafka={listing.cluster_id}/topic={topic.name}/partition={partition.number}"
    return {
        "kind": "KafkaPartition",
        "metadata": {"self": url, "resource_name": name},
        "cluster_id": listing.cluster_id,
        "topic_name": topic.name,
        "partition_id": partition.number,
        **leader,
        "replicas": _related(f"{url}/replicas"),
        "reassignment": _related(f"{url}/reassignment"),
    }


def _related(url: str) -> Json:
    return {"related": url}
