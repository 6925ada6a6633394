"""Tests that each alert of the service fires for metrics of a real fault and no other does; none for a healthy one.

The processes are real, with real Kafka and Redis; Prometheus' own engine evaluates the expressions.
"""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports it from here
    AclOperation,
    ResourcePatternType,
    ResourceType,
)

from deploy.stack import Kafka, Redis, Service, free_port
from service.contract.wire.names import ledger_topic, requests_topic, transactional_id
from service.core.metrics import Telemetry
from service.kafka.admin import KafkaAdmin
from tests.conftest import MakeTopic
from tests.contract.fake_registry import FakeRegistry
from tests.faults.clock import Clock, lacking
from tests.faults.proxy import Proxy
from tests.forked import ForkedService
from tests.integration.hanging import HangingProducer
from tests.kubernetes.alerting import NOTHING, Rules, Scrape, check_metrics, scrape, together
from tests.kubernetes.rendering import Rendered
from tests.secured import PASSWORD, Authority, SecuredKafka, acls_of_service
from tests.unit.identity.signing import Signer, key_set

SETTINGS: Final = {
    "FENCEPOST_LEASE_TTL_MS": "1000",
    "FENCEPOST_REQUEST_TIMEOUT_MS": "2000",
    "FENCEPOST_TRANSACTION_TIMEOUT_MS": "2000",
    "FENCEPOST_SLOTS": "2",
    "FENCEPOST_SLOTS_MAX": "4",
}
MINUTE_S: Final = 60


@pytest.fixture
def rules(prod: Rendered, tmp_path: Path) -> Rules:
    return Rules(prod, "fencepost", tmp_path)


class Served:
    """A process of the service, its clients' requests and its metrics."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def post(self, topic: str, key: str) -> int:
        """Write one event; returns the status of the answer."""
        body = json.dumps({"topic": topic, "value": key}).encode()
        return self._send("/events", body, {"Idempotency-Key": key})

    def post_batch(self, topic: str, keys: list[str]) -> int:
        events = [{"topic": topic, "value": 1, "idempotency_key": key} for key in keys]
        return self._send("/events/batch", json.dumps({"events": events}).encode(), {})

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.service.url + path, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def scrape(self) -> Scrape:
        return scrape(f"{self.service.url}/metrics", namespace="fencepost", pod=self.service.name)

    def when(self, holds: Callable[[Scrape], bool], timeout_s: float = 20.0) -> Scrape:
        """Scrape until a condition holds; returns that scrape."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError):  # it does not listen yet
                if holds(found := self.scrape()):
                    return found
            time.sleep(0.05)
        raise AssertionError(f"the metrics never showed it\n{self.service.tail(20)}")

    def twice(self, holds: Callable[[Scrape], bool]) -> tuple[Scrape, Scrape]:
        """Scrape twice, half a second apart, until both meet a condition."""
        first = self.when(holds)
        time.sleep(0.5)
        return first, self.when(holds)


Serve = Callable[..., Served]


@pytest.fixture
def serve(kafka: Kafka, own_redis: Redis, namespace: str, tmp_path: Path) -> Iterator[Serve]:
    """Starts processes, which end with the test."""
    started: list[Service] = []

    def start(
        *,
        redis: Redis = own_redis,
        bootstrap: str = kafka.bootstrap,
        wait: bool = True,
        prepare: Callable[[Service], object] = repr,
        **env: str,
    ) -> Served:
        name = f"pod-{len(started)}"
        settings = {**SETTINGS, "FENCEPOST_NAMESPACE": namespace, "FENCEPOST_INSTANCE": name, **env}
        started.append(ForkedService(tmp_path, kafka=bootstrap, redis=redis.url, env=settings, name=name))
        prepare(started[-1])
        started[-1].start(wait_ready=wait)
        return Served(started[-1])

    yield start
    for service in started:
        service.kill()


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Kafka]]:
    """A broker behind a proxy. A test plans its faults for the requests of its namespace only."""
    with Proxy() as proxy, Kafka(tmp_path_factory.mktemp("proxied"), listeners=[proxy.listener(0)]) as broker:
        yield proxy, broker


def is_ready(found: Scrape) -> bool:
    """Check that the process can write with all its slots, and has measured Redis."""
    slots = found.value("fencepost_slots", state="ready")
    return found.value("fencepost_ready") == 1 and slots == 2 and bool(found.value("fencepost_redis_memory_bytes"))


def is_unready(found: Scrape) -> bool:
    return found.value("fencepost_ready") == 0


def in_use(served: Served, topic: str) -> Scrape:
    """Start a process, and let it write, replay and refuse."""
    assert served.post(topic, "a") == 201
    assert served.post(topic, "a") == 201
    assert served.post("no-such-topic", "b") == 404
    return served.when(is_ready)


def test_the_rules_are_prometheus_own_idea_of_rules(prod: Rendered, tmp_path: Path) -> None:
    for group in ("fencepost", "fencepost-audit"):
        assert "SUCCESS" in Rules(prod, group, tmp_path).check()


def test_a_healthy_service_fires_nothing_and_its_metrics_pass_the_linter_and_its_death_raises_the_alert(
    serve: Serve, rules: Rules, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    served = serve()
    first = in_use(served, topic)
    served.post(topic, "c")
    rules.assert_firing([], first, (first, served.when(is_ready)), 60 * MINUTE_S)
    with urllib.request.urlopen(f"{served.service.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    assert check_metrics(text) == ""
    assert first.value("fencepost_requests_total", status="404", code="unknown-topic") == 1
    assert first.value("fencepost_replays_total") == 1
    served.service.kill()
    rules.assert_firing(["FencepostNoReadySlot"], first, (NOTHING, NOTHING), 10 * MINUTE_S)


def test_a_stopped_redis_raises_the_alert(serve: Serve, rules: Rules, own_redis: Redis, make_topic: MakeTopic) -> None:
    served = serve()
    healthy = in_use(served, make_topic())
    own_redis.stop()
    fault = served.twice(is_unready)
    assert (fault[1].value("fencepost_redis_errors_total", error="away") or 0) > 0
    rules.assert_firing(["FencepostNoReadySlot"], healthy, fault, 5 * MINUTE_S)
    rules.assert_firing([], healthy, fault, 1 * MINUTE_S)
    # The log has one line for each kind of failure, however often it occurs.
    lines = [json.loads(line) for line in served.service.log.read_text().splitlines()]
    why = [line["why"] for line in lines if line["event"] == "no heartbeat"]
    assert 1 <= len(why) == len(set(why)) <= 2


def test_a_flushed_store_that_cannot_be_filled_again(
    serve: Serve, rules: Rules, own_redis: Redis, make_topic: MakeTopic
) -> None:
    served = serve()
    healthy = in_use(served, make_topic())
    with own_redis.client() as store:
        store.config_set("maxmemory", 1)
    own_redis.flush()
    fault = served.twice(
        lambda found: (
            is_unready(found)
            and found.value("fencepost_store_state", state="store-away") == 1
            and found.value("fencepost_redis_memory_limit_bytes") == 1
        )
    )
    assert fault[0].value("fencepost_store_losses_total") == 1
    assert fault[0].value("fencepost_generation") == 0
    every = ["FencepostNoReadySlot", "FencepostStoreNotSettled", "FencepostKeyMemoryNearLimit"]
    rules.assert_firing(every, healthy, fault, 15 * MINUTE_S)
    rules.assert_firing(["FencepostNoReadySlot"], healthy, fault, 3 * MINUTE_S)


def test_a_process_with_another_store_than_the_others(
    serve: Serve, rules: Rules, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic()
    served = serve()
    healthy = in_use(served, topic)
    with Redis(tmp_path / "other", name="other") as other:
        stray = serve(redis=other, wait=False)

        def is_stale(found: Scrape) -> bool:
            served.post(topic, f"{time.monotonic()}")  # the other slots go on
            return found.value("fencepost_store_state", state="stale-store") == 1

        stale = stray.twice(is_stale)
    fault = tuple(together(served.when(is_ready), each) for each in stale)
    rules.assert_firing(["FencepostStoreNotSettled"], healthy, fault, 15 * MINUTE_S)  # the other processes serve


def test_memory_near_its_limit_raises_the_alert(
    serve: Serve, rules: Rules, own_redis: Redis, make_topic: MakeTopic
) -> None:
    served = serve()
    healthy = in_use(served, make_topic())
    with own_redis.client() as store:
        used = int(healthy.value("fencepost_redis_memory_bytes") or 0)
        store.config_set("maxmemory", int(used / 0.95))
        fault = served.twice(lambda found: (found.value("fencepost_redis_memory_limit_bytes") or 0) < 2 * used)
        rules.assert_firing(["FencepostKeyMemoryNearLimit"], healthy, fault, 10 * MINUTE_S)
        store.config_set("maxmemory", 2 * used)
        roomy = served.twice(lambda found: (found.value("fencepost_redis_memory_limit_bytes") or 0) >= 2 * used)
        rules.assert_firing([], healthy, roomy, 10 * MINUTE_S)


def test_a_commit_without_an_answer_and_a_fence_that_does_not_come(
    serve: Serve, rules: Rules, proxied: tuple[Proxy, Kafka], namespace: str
) -> None:
    proxy, broker = proxied
    topic, mine = f"{namespace}-orders", namespace.encode()
    broker.create_topic(topic)
    served = serve(bootstrap=proxy.bootstrap)
    healthy = in_use(served, topic)
    for n in range(1, 21):  # the slot in doubt fences again and again
        proxy.plan("InitProducerId", "hold", nth=n, containing=mine)
    proxy.plan("EndTxn", "drop-reply", containing=mine)
    assert served.post(topic, "doubtful") == 504
    fault = served.twice(lambda found: found.value("fencepost_in_doubt_events") == 1)
    ages = [found.value("fencepost_in_doubt_oldest_seconds") or 0 for found in fault]
    assert ages[1] - ages[0] == pytest.approx(fault[1].at - fault[0].at, abs=0.2)
    assert fault[1].value("fencepost_slots", state="ready") == 1
    rules.assert_firing(["FencepostInDoubtTooLong"], healthy, fault, 4 * MINUTE_S)
    rules.assert_firing([], healthy, fault, 1 * MINUTE_S)


def test_a_slot_whose_transaction_kafka_does_not_end(
    serve: Serve, rules: Rules, proxied: tuple[Proxy, Kafka], namespace: str
) -> None:
    proxy, broker = proxied
    topic, mine = f"{namespace}-orders", namespace.encode()
    broker.create_topic(topic)
    served = serve(bootstrap=proxy.bootstrap)
    healthy = in_use(served, topic)
    for n in range(1, 21):  # the slot fences again and again
        proxy.plan("InitProducerId", "hold", nth=n, containing=mine)
    proxy.plan("Produce", "drop-reply", containing=topic.encode(), client=".slot.")
    assert served.post(topic, "elsewhere") == 201  # another slot writes it
    fault = served.twice(lambda found: (found.value("fencepost_slot_down_oldest_seconds") or 0) > 0)
    assert [found.value("fencepost_in_doubt_events") for found in fault] == [0, 0]
    rules.assert_firing(["FencepostSlotDownTooLong"], healthy, fault, 4 * MINUTE_S)
    rules.assert_firing([], healthy, fault, 1 * MINUTE_S)


def test_a_transaction_that_hangs_where_the_service_may_not_read(
    serve: Serve, rules: Rules, secured_kafka: SecuredKafka, namespace: str
) -> None:
    """The leader does not report the owner, which may be another program within the brokers' longest timeout."""
    topic = f"{namespace}-events"
    secured_kafka.create_topic(topic)
    secured_kafka.add_user("blind", PASSWORD)
    may = (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.WRITE)
    own = acls_of_service(namespace, topic)[:2]
    secured_kafka.allow("blind", *own, (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, may))
    served = serve(bootstrap=secured_kafka.secured, **secured_kafka.environment("blind"))
    assert served.post(topic, "a") == 201
    healthy = served.when(is_ready)
    asyncio.run(_hang(secured_kafka, namespace, topic))

    def is_stalled(found: Scrape) -> bool:
        return found.value("fencepost_stalled_partitions", of="unknown") == 1

    first = served.when(is_stalled, timeout_s=40)
    age = first.value("fencepost_stalled_oldest_seconds", of="unknown") or 0
    fault = first, served.when(lambda found: (found.value("fencepost_stalled_oldest_seconds", of="unknown") or 0) > age)
    rules.assert_firing(["FencepostTransactionHangs"], healthy, fault, 25 * MINUTE_S)
    rules.assert_firing([], healthy, fault, 10 * MINUTE_S)


async def _hang(kafka: SecuredKafka, namespace: str, topic: str) -> None:
    """Leave a transaction of slot 0 open in a partition that its coordinator does not know of."""
    cluster = KafkaAdmin(kafka.bootstrap, client_id="hanging_producer", request_timeout_ms=5_000, telemetry=Telemetry())
    hanging_producer = HangingProducer(cluster, transactional_id(namespace, 0), (ledger_topic(namespace), 0))
    await hanging_producer.write([((topic, 0), b"i" * 16)], marked=[], commit=None, with_record=False)
    await cluster.close()


def test_a_schema_registry_that_is_away(
    serve: Serve, rules: Rules, make_topic: MakeTopic, namespace: str, tmp_path: Path
) -> None:
    known, unknown = make_topic(), make_topic()
    file = tmp_path / "rules.toml"
    of_topics = (f'[[topics]]\npattern = "{topic}"\n[topics.registry]\nvalue = {{}}\n' for topic in (known, unknown))
    file.write_text("\n".join(of_topics))
    with FakeRegistry() as registry:
        registry.answer("POST", f"/subjects/{known}-value/versions", {"schema": '"string"'}, "")
        served = serve(FENCEPOST_RULES=str(file), FENCEPOST_REGISTRY=registry.url)
        healthy = in_use(served, known)
        registry.status = 503

        def is_away(found: Scrape) -> bool:
            return found.value("fencepost_registry_away") == 1

        assert served.post(unknown, "a") == 503
        first = served.when(is_away)
        time.sleep(1.1)  # the pause after a failure: it is asked again
        assert served.post(unknown, "b") == 503
        assert served.post(known, "c") == 201, "its schema is in memory"
        fault = first, served.when(is_away)
    rules.assert_firing(["FencepostRegistryAway", "FencepostRegistryUnserved"], healthy, fault, 12 * MINUTE_S)
    rules.assert_firing([], healthy, fault, 3 * MINUTE_S)
    unasked = fault[1], fault[1]
    rules.assert_firing([], healthy, unasked, 30 * MINUTE_S)


def test_rules_certificates_and_keys_of_issuers_that_cannot_be_used(
    serve: Serve, rules: Rules, authority: Authority, tmp_path: Path
) -> None:
    file, jwks = tmp_path / "rules.toml", tmp_path / "jwks.json"
    jwks.write_bytes(key_set(Signer.new()))
    issuer = '[[issuers]]\nname = "{}"\nissuer = "https://{}.example"\naudience = "fencepost"\njwks_{} = "{}"\n'
    usable = issuer.format("corp", "corp", "file", "jwks.json")
    file.write_text(usable)
    certificate = tmp_path / "tls.pem"
    certificate.write_text(authority.issue("long", "DNS:localhost", days=90).both.read_text())

    def prepare(service: Service) -> None:
        pem = dict.fromkeys(("FENCEPOST_HTTP_TLS_CERTFILE", "FENCEPOST_HTTP_TLS_KEYFILE"), str(certificate))
        ports = {"FENCEPOST_MANAGEMENT_PORT": str(service.port), "FENCEPOST_PORT": str(free_port())}
        service.env |= {**pem, **ports, "FENCEPOST_RULES": str(file)}

    def fetches(found: Scrape, name: str, outcome: str) -> float:
        return found.value("fencepost_issuer_fetches_total", issuer=name, outcome=outcome) or 0

    served = serve(prepare=prepare)
    healthy = served.when(lambda found: is_ready(found) and fetches(found, "corp", "ok") > 0)
    until_s = healthy.value("fencepost_http_tls_certificate_expiry_timestamp_seconds") or 0
    # An issuer that is away, and a certificate for six days.
    file.write_text(usable + issuer.format("away", "away", "url", f"http://127.0.0.1:{free_port()}/keys"))
    certificate.write_text(authority.issue("short", "DNS:localhost", days=6).both.read_text())

    def is_short(found: Scrape) -> bool:
        return (found.value("fencepost_http_tls_certificate_expiry_timestamp_seconds") or until_s) < until_s

    first = served.when(lambda found: is_short(found) and fetches(found, "away", "failed") > 0)
    second = served.when(lambda found: fetches(found, "away", "failed") > fetches(first, "away", "failed"))
    assert fetches(second, "corp", "failed") == fetches(second, "away", "ok") == 0
    fault = first, second
    expiring = ["FencepostCertificateExpires"]
    rules.assert_firing([*expiring, "FencepostIssuerKeysUnread"], healthy, fault, 40 * MINUTE_S)
    rules.assert_firing([], healthy, fault, 10 * MINUTE_S)
    # Files that cannot be used: what was before stays.
    certificate.write_text("no certificate")
    file.write_text("no rules")
    refused = served.twice(
        lambda found: (
            found.value("fencepost_http_tls_last_reload_successful") == 0
            and found.value("fencepost_rules_last_reload_successful") == 0
        )
    )
    assert is_short(refused[1])
    held = refused[0], refused[0]  # without the counters of the issuer that is away
    both = ["FencepostCertificateRefused", "FencepostRulesRefused"]
    rules.assert_firing(both, healthy, held, 7 * MINUTE_S)
    rules.assert_firing([*both, *expiring], healthy, held, 20 * MINUTE_S)
    rules.assert_firing([], healthy, held, 4 * MINUTE_S)


@pytest.mark.skipif(bool(lacking()), reason=lacking())
@pytest.mark.parametrize("shift_s", [3_600, -3_600])
def test_a_clock_that_is_wrong(serve: Serve, rules: Rules, make_topic: MakeTopic, shift_s: int) -> None:
    clocks: list[Clock] = []
    served = serve(prepare=lambda service: clocks.append(Clock(service)))
    healthy = in_use(served, make_topic())
    clocks[0].shift(shift_s)
    fault = served.twice(lambda found: is_ready(found) and all(abs(ahead - shift_s) < 60 for ahead in _ahead(found)))
    rules.assert_firing(["FencepostClockApart"], healthy, fault, 6 * MINUTE_S)
    rules.assert_firing([], healthy, fault, 4 * MINUTE_S)


def _ahead(found: Scrape) -> list[float]:
    """Read by how much a process is ahead of Kafka and of Redis, in seconds."""
    return [found.value("fencepost_clock_ahead_seconds", of=of) or 0.0 for of in ("kafka", "redis")]


def test_a_journal_whose_topic_is_gone(
    serve: Serve, rules: Rules, kafka: Kafka, namespace: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    served = serve(FENCEPOST_QUEUE_BYTES_MAX="1002000")  # the smallest: a batch of this many events does not fit
    healthy = in_use(served, topic)
    name = requests_topic(namespace)
    admin = kafka.admin()
    admin.delete_topics([name])[name].result(30)
    full = [f"k-{n}" for n in range(10_000)]  # each is refused, which is an answer for the journal

    def is_dropping(found: Scrape) -> bool:
        assert served.post_batch(topic, full) == 207
        is_seen = found.value("fencepost_own_topic_faults") == 1
        return is_seen and (found.value("fencepost_journal_dropped_total") or 0) > 0

    first = served.when(is_dropping, timeout_s=40)
    served.post_batch(topic, full)
    both = ["FencepostJournalDropping", "FencepostOwnTopicsChanged"]
    rules.assert_firing(both, healthy, (first, served.scrape()), 5 * MINUTE_S)
