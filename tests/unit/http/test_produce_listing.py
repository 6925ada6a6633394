"""Tests what clients of Confluent's API ask before they write: cluster, topics, partitions; and what is not served."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from service.contract import CallerRule, Rules
from service.core.problems import KafkaAway
from service.core.settings import Settings
from service.http import produce_listing as module
from service.http.callers import Callers
from service.http.produce_listing import ListingParts, ListRequest, ProduceListing
from service.http.request import WRITE_BYTES
from service.http.request_guard import RequestGuard
from service.kafka.listing import ListedPartition, ListedTopic, Listing, TopicLister
from service.kafka.topic_admin import Topic
from service.kafka.topics import InternalTopics, TopicMetadataCache
from tests.unit.fakes import FakeTopicAdmin
from tests.unit.http.test_produce import ANSWER_V2, TOKEN_SHA256, assert_error

PARTITIONS = [ListedPartition(0, 1, [1, 2], [1]), ListedPartition(1, -1, [2], [])]
TOPICS = [
    ListedTopic("__consumer_offsets", True, PARTITIONS),
    ListedTopic("fencepost.ledger", False, PARTITIONS),
    ListedTopic("orders", False, PARTITIONS),
    ListedTopic("other", False, PARTITIONS[:1]),
]
SELF = "http://test/v3/clusters/c1"


class Cluster(FakeTopicAdmin):
    """A cluster that lists TOPICS."""

    def __init__(self) -> None:
        super().__init__()
        self.topics = {"orders": Topic("orders", 2, {"cleanup.policy": "delete"})}
        self.listed: list[Sequence[str] | None] = []
        self.topic_metadata = TopicMetadataCache(self)

    async def list_topics(self, names: Sequence[str] | None) -> Listing:
        self.listed.append(names)
        if self.away:
            raise KafkaAway("it is away")
        return Listing("c1", 2, {topic.name: topic for topic in TOPICS if names is None or topic.name in names})


def app_of(cluster: Cluster, rules: Rules) -> FastAPI:
    settings = Settings(rules="rules.toml" if rules.callers else "")
    parts = SimpleNamespace(
        topic_lister=TopicLister(cluster.list_topics, cluster.describe),
        topic_metadata=cluster.topic_metadata,
        topics=InternalTopics(cluster, settings),
    )
    guard = RequestGuard(settings, Callers(rules.callers))
    app = FastAPI()
    app.router.routes += ProduceListing(guard, cast(ListingParts, parts)).routes()
    return app


def client_of(cluster: Cluster, rules: Rules, address: str = "127.0.0.1") -> httpx.AsyncClient:
    app = app_of(cluster, rules)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(address, 1)), base_url="http://test")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(cluster, Rules()) as http:
        yield http


async def read(http: httpx.AsyncClient, path: str, **headers: str) -> Any:
    response = await http.get(path, headers=headers)
    media_type = "application/json" if "/v3" in path else ANSWER_V2
    assert (response.status_code, response.headers["content-type"]) == (200, media_type)
    return response.json()


async def test_v2_lists_of_topics_have_the_peer_s_form(http: httpx.AsyncClient) -> None:
    assert await read(http, "/topics") == ["orders", "other"]
    first = {
        "partition": 0,
        "leader": 1,
        "replicas": [
            {"broker": 1, "leader": True, "in_sync": True},
            {"broker": 2, "leader": False, "in_sync": False},
        ],
    }
    second = {"partition": 1, "leader": -1, "replicas": [{"broker": 2, "leader": False, "in_sync": False}]}
    described = {"name": "orders", "configs": {"cleanup.policy": "delete"}, "partitions": [first, second]}
    assert await read(http, "/topics/orders") == described
    assert await read(http, "/topics/orders/partitions") == [first, second]
    assert await read(http, "/topics/orders/partitions/1") == second


async def test_the_paths_of_confluent_server_have_answers_with_its_paths(http: httpx.AsyncClient) -> None:
    for path in ("", "/c1", "/c1/topics", "/c1/topics/orders", "/c1/topics/orders/partitions/0"):
        of_proxy = await read(http, f"/v3/clusters{path}")
        of_server = await read(http, f"/kafka/v3/clusters{path}")
        assert json.dumps(of_server) == json.dumps(of_proxy).replace("http://test/v3", "http://test/kafka/v3")
    assert_error(await http.get("/kafka/v3/clusters/c1/topics/nowhere"), 404, 40403)
    assert (await http.get("/kafka/topics")).status_code == 404


async def test_a_topic_that_is_read_is_none_to_write_to(http: httpx.AsyncClient, cluster: Cluster) -> None:
    """The last stable offsets of those are watched, and reported by metrics and alerts."""
    for path in ("/topics", "/topics/orders", "/topics/orders/partitions", "/v3/clusters/c1/topics/orders"):
        await read(http, path)
    assert not cluster.topic_metadata.names


async def test_v3_lists_have_the_peer_s_form(http: httpx.AsyncClient) -> None:
    cluster = {
        "kind": "KafkaCluster",
        "metadata": {"self": SELF, "resource_name": "crn:///kafka=c1"},
        "cluster_id": "c1",
        "controller": {"related": f"{SELF}/brokers/2"},
        "acls": {"related": f"{SELF}/acls"},
        "brokers": {"related": f"{SELF}/brokers"},
        "broker_configs": {"related": f"{SELF}/broker-configs"},
        "consumer_groups": {"related": f"{SELF}/consumer-groups"},
        "topics": {"related": f"{SELF}/topics"},
        "partition_reassignments": {"related": f"{SELF}/topics/-/partitions/-/reassignment"},
    }
    listed = {"kind": "KafkaClusterList", "metadata": {"self": "http://test/v3/clusters", "next": None}}
    assert await read(http, "/v3/clusters") == {**listed, "data": [cluster]}
    assert await read(http, "/v3/clusters/c1") == cluster
    topic = {
        "kind": "KafkaTopic",
        "metadata": {"self": f"{SELF}/topics/orders", "resource_name": "crn:///kafka=c1/topic=orders"},
        "cluster_id": "c1",
        "topic_name": "orders",
        "is_internal": False,
        "replication_factor": 2,
        "partitions_count": 2,
        "partitions": {"related": f"{SELF}/topics/orders/partitions"},
        "configs": {"related": f"{SELF}/topics/orders/configs"},
        "partition_reassignments": {"related": f"{SELF}/topics/orders/partitions/-/reassignment"},
        "authorized_operations": [],
    }
    topics = await read(http, "/v3/clusters/c1/topics")
    assert (topics["kind"], topics["metadata"]) == ("KafkaTopicList", {"self": f"{SELF}/topics", "next": None})
    assert [each["topic_name"] for each in topics["data"]] == ["orders", "other"]
    assert await read(http, "/v3/clusters/c1/topics/orders") == topics["data"][0] == topic
    url = f"{SELF}/topics/orders/partitions"
    partition = {
        "kind": "KafkaPartition",
        "metadata": {"self": f"{url}/0", "resource_name": "crn:///kafka=c1/topic=orders/partition=0"},
        "cluster_id": "c1",
        "topic_name": "orders",
        "partition_id": 0,
        "leader": {"related": f"{url}/0/replicas/1"},
        "replicas": {"related": f"{url}/0/replicas"},
        "reassignment": {"related": f"{url}/0/reassignment"},
    }
    partitions = await read(http, "/v3/clusters/c1/topics/orders/partitions")
    assert (partitions["kind"], partitions["metadata"]) == ("KafkaPartitionList", {"self": url, "next": None})
    assert await read(http, "/v3/clusters/c1/topics/orders/partitions/0") == partitions["data"][0] == partition
    assert "leader" not in partitions["data"][1]


@pytest.mark.parametrize(
    ("path", "error_code"),
    [
        ("/topics/nowhere", 40401),
        ("/topics/nowhere/partitions", 40401),
        ("/topics/fencepost.ledger", 40401),
        ("/topics/__consumer_offsets", 40401),
        (f"/topics/{'x' * 250}", 40401),
        ("/topics/a%20b", 40401),
        ("/topics/orders/partitions/2", 40402),
        ("/topics/orders/partitions/x", 40402),
        ("/v3/clusters/c2", 404),
        ("/v3/clusters/c2/topics", 404),
        ("/v3/clusters/c2/topics/orders", 404),
        ("/v3/clusters/c1/topics/nowhere", 40403),
        ("/v3/clusters/c1/topics/orders/partitions/7", 40403),
    ],
)
async def test_what_is_not_there_is_not_found(
    http: httpx.AsyncClient, cluster: Cluster, path: str, error_code: int
) -> None:
    assert_error(await http.get(path), 404, error_code)
    assert ("x" * 250,) not in cluster.listed


async def test_a_caller_sees_the_topics_that_it_may_write_to(cluster: Cluster) -> None:
    rules = Rules(callers=(CallerRule("shop", (TOKEN_SHA256,), ("other", "fencepost.*", "__*")),))
    async with client_of(cluster, rules, "192.0.2.1") as http:
        token = {"authorization": "Bearer token"}
        assert await read(http, "/topics", **token) == ["other"]
        topics = await read(http, "/v3/clusters/c1/topics", **token)
        assert [each["topic_name"] for each in topics["data"]] == ["other"]
        assert_error(await http.get("/topics/orders", headers=token), 404, 40401)
        for path in ("/topics", "/topics/other", "/v3/clusters", "/v3/clusters/c1/topics/other"):
            response = await http.get(path)
            assert_error(response, 401, 40101)
            assert response.headers["www-authenticate"] == "Bearer"


async def test_only_this_machine_may_ask_where_there_are_no_rules(cluster: Cluster) -> None:
    async with client_of(cluster, Rules(), "192.0.2.1") as http:
        assert_error(await http.get("/topics"), 403, 40301)
        assert_error(await http.get("/v3/clusters"), 403, 40301)


async def test_the_lists_are_bounded(
    http: httpx.AsyncClient, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LISTED_MAX", 1)
    for _ in range(3):
        assert await read(http, "/topics") == ["orders"]
    assert cluster.listed == [None]


async def test_a_list_is_rendered_once_and_sent_as_its_reader_reads(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [ListedTopic(f"{n:04}{'x' * 200}", False, PARTITIONS) for n in range(1_000)]
    monkeypatch.setitem(globals(), "TOPICS", many)
    listed: list[ListedTopic] = []
    sees = ListRequest.sees

    def counted(request: ListRequest, topic: ListedTopic) -> bool:
        listed.append(topic)
        return sees(request, topic)

    monkeypatch.setattr(ListRequest, "sees", counted)
    app = app_of(cluster, Rules())
    sent: list[bytes] = []
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            await reads.wait()

    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/v3/clusters/c1/topics"}
    scope |= {"client": ("127.0.0.1", 1), "headers": [(b"host", b"test")], "query_string": b"", "scheme": "http"}
    readers = [asyncio.create_task(app(scope, cast(Any, None), send)) for _ in range(3)]
    async with asyncio.timeout(5.0):
        while len(sent) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert max(map(len, sent)) <= WRITE_BYTES
    reads.set()
    await asyncio.gather(*readers)
    assert sum(map(len, sent)) > 3 * 1_000_000
    assert listed == many, "once for all readers"


async def test_few_rendered_lists_are_kept(cluster: Cluster) -> None:
    async with client_of(cluster, Rules()) as http:
        for n in [*range(module.SHARED_MAX + 3), 0]:
            topics = await http.get("/v3/clusters/c1/topics", headers={"host": f"h{n}"})
            assert topics.json()["metadata"]["self"] == f"http://h{n}/v3/clusters/c1/topics"
        assert_error(await http.get("/v3/clusters/c1/topics", headers={"host": "h" * 262}), 400, 400)


async def test_a_list_counts_in_the_caller_s_rate(cluster: Cluster) -> None:
    rules = Rules(callers=(CallerRule("shop", (TOKEN_SHA256,), ("other",), rate=0.001),))
    async with client_of(cluster, rules) as http:
        token = {"authorization": "Bearer token"}
        assert await read(http, "/topics", **token) == ["other"]
        assert_error(await http.get("/v3/clusters", headers=token), 429, 42901)


async def test_kafka_that_does_not_answer_is_retriable(http: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.away = True
    for path in ("/topics", "/topics/orders", "/v3/clusters", "/v3/clusters/c1/topics"):
        response = await http.get(path)
        assert "it is away" in assert_error(response, 503, 50003)
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/consumers/group"),
        ("GET", "/consumers/group/instances/i/records"),
        ("DELETE", "/consumers/group/instances/i"),
        ("POST", "/topics"),
        ("DELETE", "/topics/orders"),
        ("GET", "/topics/orders/partitions/0/offsets"),
        ("GET", "/brokers"),
        ("POST", "/v3/clusters/c1/topics"),
        ("DELETE", "/v3/clusters/c1/topics/orders"),
        ("PATCH", "/v3/clusters/c1/topics/orders"),
        ("PUT", "/v3/clusters/c1/topics/orders/configs/retention.ms"),
        ("POST", "/v3/clusters/c1/topics/orders/records:batches"),
        ("GET", "/v3/clusters/c1/acls"),
        ("GET", "/v3"),
        ("GET", "/kafka/v3/clusters/c1/consumer-groups"),
    ],
)
async def test_a_part_that_is_not_served_says_where_to_go(http: httpx.AsyncClient, method: str, path: str) -> None:
    response = await http.request(method, path)
    message = assert_error(response, 404, 404)
    assert message.startswith(f"{method} {path} is not served here. Fencepost writes records")
    assert response.headers["content-type"] == ("application/json" if "/v3" in path else ANSWER_V2)
