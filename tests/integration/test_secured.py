"""Tests connections to Kafka and Redis over TLS: which are accepted, which are refused, and the messages."""

import dataclasses
import time
from pathlib import Path
from typing import Final

import httpx
import pytest
import uvloop
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports it from here
    AclOperation,
    ResourcePatternType,
    ResourceType,
)

from deploy.stack import Kafka, Redis, Service
from service.claims.redis_store import RedisKeys
from service.contract import SharedSettings
from service.core.metrics import Telemetry
from service.core.problems import FORBIDDEN_TOPIC, KafkaAway, StoreAway
from service.core.settings import Settings
from service.kafka.admin import KafkaAdmin
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.outcomes import RecordError, TransactionFailed
from service.kafka.producer import TransactionalProducer
from service.kafka.reader import STOP_TIMEOUT_S, Span, read_through
from service.kafka.records import Record
from service.kafka.security import Security
from service.kafka.transaction_admin import TransactionAdmin
from tests.secured import PASSWORD, USER, SecuredKafka, SecuredRedis, acls_of_service, sockets_closed

TIMEOUT_MS: Final = 5_000
IDLE_S: Final = 20.0  # without output or CPU use, for a process that is to end


def cluster_of(settings: SharedSettings) -> KafkaAdmin:
    return KafkaAdmin(
        settings.kafka,
        client_id="test",
        request_timeout_ms=TIMEOUT_MS,
        telemetry=Telemetry(),
        security=Security(settings),
    )


async def knock(settings: SharedSettings) -> None:
    """Send any request to a broker. Raises KafkaAway."""
    cluster = cluster_of(settings)
    async with sockets_closed():
        try:
            await cluster.answers(TIMEOUT_MS / 1000)
        finally:
            await cluster.close()


@pytest.fixture(scope="module")
def with_password(secured_kafka: SecuredKafka) -> Settings:
    return Settings.from_env(secured_kafka.environment())


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
async def test_a_password_opens_the_door(with_password: Settings, mechanism: str) -> None:
    await knock(dataclasses.replace(with_password, kafka_sasl_mechanism=mechanism))


async def test_a_certificate_opens_the_door(secured_kafka: SecuredKafka) -> None:
    settings = secured_kafka.with_certificate("client")
    await knock(settings)
    with pytest.raises(KafkaAway):
        await knock(dataclasses.replace(settings, kafka_ssl_certfile="", kafka_ssl_keyfile=""))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kafka_sasl_password": "guess"}, "Authentication failed"),
        ({"kafka_sasl_username": "nobody"}, "Authentication failed"),
        ({"kafka_sasl_mechanism": "SCRAM-SHA-256"}, "UnsupportedSaslMechanismError"),
        ({"kafka_ssl_cafile": ""}, "certificate verify failed"),
    ],
)
async def test_a_refused_login_is_reported_without_the_password(
    with_password: Settings, change: dict[str, str], why: str
) -> None:
    with pytest.raises(KafkaAway, match=why) as caught:
        await knock(dataclasses.replace(with_password, **change))  # type: ignore[arg-type]
    assert PASSWORD not in str(caught.value)


async def test_a_certificate_must_match_the_host_name_unless_the_check_is_off(
    with_password: Settings, secured_kafka: SecuredKafka
) -> None:
    """Brokers advertise their host names, so only a bootstrap address can differ from the certificate."""
    elsewhere = dataclasses.replace(with_password, kafka=f"127.0.0.1:{secured_kafka.sasl_port}")
    with pytest.raises(KafkaAway, match="IP address mismatch"):
        await knock(elsewhere)
    await knock(dataclasses.replace(elsewhere, kafka_ssl_check_hostname=False))


def test_a_reader_over_tls_is_closed_at_once(with_password: Settings, secured_kafka: SecuredKafka) -> None:
    """Without waiting for the brokers' end of TLS: each recovery reads two topics."""
    secured_kafka.create_topic("read-often")
    own = (AclOperation.READ, AclOperation.WRITE)
    secured_kafka.allow(USER, (ResourceType.TOPIC, "read-often", ResourcePatternType.LITERAL, own))

    async def read() -> list[float]:
        cluster = cluster_of(with_password)
        producer = IdempotentProducer(cluster, "test")
        through = await producer.send("read-often", 0, None, b"there")
        took_s: list[float] = []
        for _ in range(10):
            began = time.monotonic()
            spans = {0: Span(through, through)}
            async for _ in read_through(cluster, "read-often", spans, "read_committed", TIMEOUT_MS / 1000):
                pass
            took_s.append(time.monotonic() - began)
        await producer.close()
        await cluster.close()
        return took_s

    assert [seconds for seconds in uvloop.run(read()) if seconds > STOP_TIMEOUT_S] == []


async def test_an_acl_that_lacks_on_a_transactional_id_is_named(
    with_password: Settings, secured_kafka: SecuredKafka, namespace: str
) -> None:
    """By a store recovery and by a slot recovery: an id that may be described and not written."""
    name = f"{namespace}.slot.0"
    literal = ResourcePatternType.LITERAL
    secured_kafka.allow(USER, (ResourceType.TRANSACTIONAL_ID, name, literal, (AclOperation.DESCRIBE,)))
    cluster = cluster_of(with_password)
    async with sockets_closed():
        try:
            with pytest.raises(KafkaAway, match=f"Write transactional id {name}"):
                await TransactionAdmin(cluster).fence([name], TIMEOUT_MS, lambda _: None)
            with pytest.raises(KafkaAway, match=f"Write transactional id {name}"):
                await TransactionalProducer(cluster, name, TIMEOUT_MS).start()
        finally:
            await cluster.close()


async def test_a_transaction_timeout_that_the_brokers_do_not_take_is_named(secured_kafka: SecuredKafka) -> None:
    """The brokers' setting is in CARELESS. The error of either recovery must name the setting."""
    cluster = cluster_of(SharedSettings(kafka=secured_kafka.bootstrap))
    set_it = "FENCEPOST_TRANSACTION_TIMEOUT_MS=5001 is more than the brokers' transaction.max.timeout.ms"
    async with sockets_closed():
        try:
            with pytest.raises(KafkaAway, match=set_it):
                await TransactionAdmin(cluster).fence(["ns.slot.0"], 5_001, lambda _: None)
            with pytest.raises(KafkaAway, match=set_it):
                await TransactionalProducer(cluster, "ns.slot.0", 5_001).start()
        finally:
            await cluster.close()


async def test_a_topic_that_the_service_may_not_see_any_more_is_forbidden_and_not_missing(
    with_password: Settings, secured_kafka: SecuredKafka, namespace: str
) -> None:
    """In the producers' own look-up: an event may have been admitted before the ACL was removed."""
    ledger = f"{namespace}.ledger"
    for topic in (ledger, "hidden"):
        secured_kafka.create_topic(topic)
    secured_kafka.allow(USER, *acls_of_service(namespace, "nothing-else")[:2])
    cluster = cluster_of(with_password)
    record = Record("hidden", 0, None, b"1", [], 0)
    producer = TransactionalProducer(cluster, f"{namespace}.slot.0", TIMEOUT_MS)
    plain = IdempotentProducer(cluster, "test")
    async with sockets_closed():
        try:
            await producer.start()
            with pytest.raises(TransactionFailed) as raised:
                await producer.send([record], (ledger, 0))
            (result,) = await plain.write([record])
        finally:
            await producer.close()
            await plain.close()
            await cluster.close()
    errors = [raised.value.record_errors["hidden"], result]
    assert [error.kind for error in errors if isinstance(error, RecordError)] == [FORBIDDEN_TOPIC] * 2


class LockedRedis(Redis):
    """A server that demands a password."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, args=["--requirepass", "sesame"])

    @property
    def url(self) -> str:
        return super().url.replace("//", "//:sesame@")


def keys_of(settings: Settings) -> RedisKeys:
    return RedisKeys(
        settings.redis,
        "test",
        retention_ms=60_000,
        least_left_ms=1_000,
        lease_ttl_ms=1_000,
        timeout_s=5.0,
        telemetry=Telemetry(),
        tls=settings.redis_tls,
    )


async def test_redis_is_reached_by_tls(secured_redis: SecuredRedis) -> None:
    keys = keys_of(Settings.from_env(secured_redis.environment()))
    await keys.check()
    assert "/" in (await keys.who()).store
    await keys.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"FENCEPOST_REDIS_CAFILE": ""}, "certificate verify failed"),
        ({"FENCEPOST_REDIS": "rediss://127.0.0.1:{port}/0"}, "IP address mismatch"),
        ({"FENCEPOST_REDIS": "rediss://127.0.0.1:{port}/0?ssl_cert_reqs=none"}, "IP address mismatch"),
    ],
)
async def test_a_redis_without_a_trusted_certificate_is_store_away(
    secured_redis: SecuredRedis, change: dict[str, str], why: str
) -> None:
    change = {name: text.format(port=secured_redis.tls_port) for name, text in change.items()}
    keys = keys_of(Settings.from_env({**secured_redis.environment(), **change}))
    with pytest.raises(StoreAway, match=why):
        await keys.check()
    await keys.close()


def test_a_user_with_the_acls_of_the_readme_is_denied_nothing(
    tmp_path: Path, secured_kafka: SecuredKafka, redis: Redis, namespace: str
) -> None:
    """A denial in the broker's log means an intruder or a missing ACL; the service must cause none."""
    topic = f"{namespace}-events"
    secured_kafka.create_topic(topic)
    secured_kafka.add_user("careful", PASSWORD)
    secured_kafka.allow("careful", *acls_of_service(namespace, topic))
    own = {"FENCEPOST_NAMESPACE": namespace, "FENCEPOST_SLOTS": "2", "FENCEPOST_SLOTS_MAX": "2"}
    own |= {"FENCEPOST_REQUEST_TIMEOUT_MS": str(TIMEOUT_MS), "FENCEPOST_TRANSACTION_TIMEOUT_MS": str(TIMEOUT_MS)}
    environment = {**secured_kafka.environment("careful"), **own}
    with Service(tmp_path, kafka="", redis=redis.url, env=environment) as service:
        event = {"topic": topic, "value": 1}
        assert httpx.post(f"{service.url}/events", json=event, headers={"Idempotency-Key": "a"}).status_code == 201
    denials = [line for line in secured_kafka.log.read_text().splitlines() if "User:careful is Denied" in line]
    assert denials == []


def ended(folder: Path, kafka: str, redis: str, environment: dict[str, str]) -> list[str]:
    """Return the last lines of a service that ends at its start, because of a setting."""
    service = Service(folder, kafka=kafka, redis=redis, env=environment)
    service.start(wait_ready=False)
    try:
        assert service.wait_while_working(IDLE_S) == 2
    finally:
        service.stop()
    text = service.log.read_text()
    assert "hush-hush" not in text
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("FENCEPOST_")]


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [
        ("PASSWORD", "hush-hush", "Authentication failed"),
        ("USERNAME", "nobody", "Authentication failed"),
        ("MECHANISM", "SCRAM-SHA-256", "UnsupportedSaslMechanismError"),
    ],
)
def test_a_service_whose_kafka_login_fails_ends_and_says_why_without_the_password(
    tmp_path: Path, secured_kafka: SecuredKafka, secured_redis: SecuredRedis, name: str, wrong: str, why: str
) -> None:
    environment = {**secured_kafka.environment(), **secured_redis.environment()}
    (line,) = ended(tmp_path, "", "", environment | {f"FENCEPOST_KAFKA_SASL_{name}": wrong})
    assert f"FENCEPOST_KAFKA_SASL_{name}" in line
    assert why in line


@pytest.mark.parametrize("may_read", [True, False])
def test_a_service_whose_transaction_timeout_the_brokers_do_not_take_ends_and_names_it(
    tmp_path: Path, secured_kafka: SecuredKafka, redis: Redis, namespace: str, may_read: bool
) -> None:
    """The brokers' setting is in CARELESS; the user with the ACLs of the README may not read it."""
    own = {"FENCEPOST_NAMESPACE": namespace, "FENCEPOST_SLOTS": "1", "FENCEPOST_SLOTS_MAX": "1"}
    own["FENCEPOST_TRANSACTION_TIMEOUT_MS"] = "5001"
    environment = own | ({"FENCEPOST_KAFKA": secured_kafka.bootstrap} if may_read else secured_kafka.environment())
    secured_kafka.allow(USER, *acls_of_service(namespace, "no-topic"))
    (line,) = ended(tmp_path, "", redis.url, environment)
    too_long = "FENCEPOST_TRANSACTION_TIMEOUT_MS=5001 is more than the brokers' transaction.max.timeout.ms"
    assert line == f"{too_long}{', 5000: set 5000 or less' if may_read else ': set a smaller one'}, or raise theirs"


def test_a_service_whose_redis_login_fails_ends_and_says_why_without_the_password(
    tmp_path: Path, kafka: Kafka, namespace: str
) -> None:
    own = {"FENCEPOST_NAMESPACE": namespace, "FENCEPOST_SLOTS": "1", "FENCEPOST_SLOTS_MAX": "1"}
    why = "FENCEPOST_REDIS has not the user and password that the server asks for: set redis://"
    with LockedRedis(tmp_path / "redis") as redis:
        for n, login in enumerate((":hush-hush@", "nobody:hush-hush@", "")):
            folder = tmp_path / f"refused-{n}"
            folder.mkdir()
            (line,) = ended(folder, kafka.bootstrap, f"redis://{login}127.0.0.1:{redis.port}/0", own)
            assert line.startswith(why), login
        with Service(tmp_path, kafka=kafka.bootstrap, redis=redis.url, env=own) as service:
            assert service.ready()
