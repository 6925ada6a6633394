"""Tests logins at Kafka that end: by tokens, by a token file, by a password that changes, and what is said of refusals.

`python -m tests.managed` runs the first of them for longer, with sessions of 10 s.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.stack import Redis, Service
from service.cli.doctor import examine
from service.cli.finding import Finding, Level
from service.contract import Rules
from service.core.settings import Settings
from service.fencepost import Reader, Saved
from service.fencepost.tokens import ClientCredentials
from tests import kafka_versions
from tests.integration.client import Client
from tests.integration.conftest import SETTINGS
from tests.managed import SECRET, SUBJECT, Issuer, ManagedKafka, TokenEndpoint
from tests.managed.run import Fleet, load
from tests.secured import acls_of_service, sockets_closed

REAUTH_MS: Final = 3_000
NOTICED_S: Final = 60.0  # for a process to start, or to notice a change, on a machine that is very busy
IDLE_S: Final = 20.0  # without output or CPU use, for a process that is to end
TOKEN_LIFE_S: Final = 30.0  # with less, a machine that is very busy is too slow for a new one


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> Iterator[ManagedKafka]:
    with ManagedKafka(tmp_path_factory.mktemp("managed"), issuer, REAUTH_MS) as broker:
        yield broker


@pytest.fixture
def endpoint(issuer: Issuer) -> Iterator[TokenEndpoint]:
    with TokenEndpoint(issuer, TOKEN_LIFE_S) as endpoint:
        yield endpoint


class Kept:
    """A store in memory: the keys of the events in the order in which they were stored."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.saved: Saved | None = None

    async def load(self) -> Saved | None:
        return self.saved

    async def commit(self, results: list[bytes], saved: Saved) -> None:
        self.keys += results
        self.saved = saved


@contextlib.asynccontextmanager
async def reading(broker: ManagedKafka, endpoint: TokenEndpoint, topic: str, kept: Kept) -> AsyncIterator[None]:
    """Run the reader for applications, logged in by tokens, beside the block."""

    async def work(records: Sequence[Any]) -> list[bytes]:
        return [dict(record.headers)["idempotency-key"] for record in records]

    login: dict[str, Any] = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
    tokens = ClientCredentials(endpoint.token_url, SUBJECT, lambda: SECRET, scope="kafka")
    reader = Reader(topic, kept, bootstrap_servers=broker.logins, sasl_oauth_token_provider=tokens, **login)
    following = asyncio.create_task(reader.follow(work))
    try:
        yield
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def test_connections_log_in_again_under_load_and_no_answer_is_in_doubt(
    tmp_path: Path, broker: ManagedKafka, endpoint: TokenEndpoint, redis: Redis, client: Client
) -> None:
    """Sessions of 3 s; the endpoint is away for a while; idle connections and a reader log in too."""
    kept = Kept()
    fleet = Fleet(tmp_path, broker, redis, endpoint)
    async with fleet, reading(broker, endpoint, fleet.topic, kept):
        loading = asyncio.create_task(load(fleet, client, 10.0))
        await asyncio.sleep(6.0)
        endpoint.away = True
        await asyncio.sleep(1.0)
        endpoint.away = False
        run = await loading
        assert list(run.answers) == ["201"], run
        assert (run.ended_terms, run.fences) == (0, 0), run
        assert endpoint.issued >= 2  # of the service and of the reader

        # A password that changes while the connections are idle for longer than their sessions.
        broker.set_password("another password")
        fleet.password.write_text("another password\n")
        await asyncio.sleep(REAUTH_MS / 1000 + 0.5)
        run = await load(fleet, client, 0.5)
        assert list(run.answers) == ["201"], run
        assert (run.ended_terms, run.fences) == (0, 0), run
        written = {attempt.asked.key.encode() for attempt in client.history}
        async with asyncio.timeout(10):
            while len(kept.keys) < len(written):  # noqa: ASYNC110 - the reader tells nobody
                await asyncio.sleep(0.05)
    assert sorted(kept.keys) == sorted(written)
    assert await asyncio.to_thread(fleet.faults, client.history) == []
    for service in fleet.services:
        assert "Traceback" not in service.log.read_text(), service.tail(60)


def service_of(folder: Path, redis: Redis, namespace: str, login: dict[str, str]) -> Service:
    return Service(folder, kafka="", redis=redis.url, env={**SETTINGS, "FENCEPOST_NAMESPACE": namespace, **login})


def test_a_service_waits_for_a_token_endpoint_that_is_away_and_reads_a_token_file_anew(
    tmp_path: Path, broker: ManagedKafka, issuer: Issuer, endpoint: TokenEndpoint, redis: Redis, namespace: str
) -> None:
    broker.allow(SUBJECT, *acls_of_service(namespace, namespace))
    endpoint.away = True
    with contextlib.closing(_Started(service_of(tmp_path, redis, namespace, broker.by_token(endpoint)))) as started:
        started.service.wait_until(lambda: "answers 503" in started.service.log.read_text(), NOTICED_S)
        assert not started.service.ready()
        endpoint.away = False
        started.service.wait_ready(NOTICED_S)
    file = tmp_path / "token"
    file.write_text(issuer.token(60.0))
    with service_of(tmp_path, redis, namespace, broker.by_file(file)) as service:
        file.write_text(issuer.token(60.0, audience="another"))
        service.wait_until(lambda: not service.ready(), NOTICED_S)
        file.write_text(issuer.token(60.0))
        service.wait_ready(NOTICED_S)


class _Started:
    """A process that is not waited for."""

    def __init__(self, service: Service) -> None:
        self.service = service
        service.start(wait_ready=False)

    def close(self) -> None:
        self.service.stop()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET": "hush-hush"},
            "FENCEPOST_KAFKA_OAUTH_CLIENT_ID, FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET or FENCEPOST_KAFKA_OAUTH_SCOPE is "
            "wrong (TokenRefused: the token endpoint {url} answers 401 invalid_client): ",
        ),
        (
            {"FENCEPOST_KAFKA_OAUTH_TOKEN_URL": "", "FENCEPOST_KAFKA_OAUTH_TOKEN_FILE": "{file}"},
            "FENCEPOST_KAFKA_SASL_MECHANISM=OAUTHBEARER: Kafka at {kafka} refuses the token of the token file {file} ",
        ),
    ],
    ids=["by the endpoint", "by the brokers"],
)
def test_a_service_whose_token_is_refused_ends_and_says_by_whom(
    tmp_path: Path,
    broker: ManagedKafka,
    issuer: Issuer,
    endpoint: TokenEndpoint,
    redis: Redis,
    namespace: str,
    change: dict[str, str],
    line: str,
) -> None:
    file = tmp_path / "token"
    file.write_text(issuer.token(60.0, audience="another"))
    places = {"url": endpoint.token_url, "file": str(file), "kafka": broker.logins}
    change = {name: text.format(**places) for name, text in change.items()}
    login = broker.by_file(file) if "FENCEPOST_KAFKA_OAUTH_TOKEN_FILE" in change else broker.by_token(endpoint)
    service = service_of(tmp_path, redis, namespace, {**login, **change})
    service.start(wait_ready=False)
    assert service.wait_while_working(IDLE_S) == 2
    text = service.log.read_text()
    assert line.format(**places) in text
    assert not [secret for secret in ("hush-hush", SECRET, "Traceback") if secret in text]


async def examined(settings: Settings) -> dict[str, Finding]:
    async with sockets_closed():
        return {finding.check: finding for finding in await examine(settings, Rules())}


async def test_the_doctor_names_the_principal_the_endpoint_and_a_missing_acl(
    broker: ManagedKafka, endpoint: TokenEndpoint, redis: Redis, namespace: str
) -> None:
    environment = {"FENCEPOST_REDIS": redis.url, "FENCEPOST_NAMESPACE": namespace, **broker.by_token(endpoint)}
    settings = Settings.from_env(environment)
    found = await examined(settings)
    assert found["login.token"].level is Level.OK
    assert (
        f"the token endpoint {endpoint.token_url} gives one: iss test, aud kafka, scope kafka"
        in found["login.token"].found
    )
    assert found["login.principal"].found.startswith(f"User:{SUBJECT}, ")
    version = kafka_versions.running()
    assert found["kafka.release"].found == f"Kafka {version}"
    assert found["access.own-topics"].level is Level.ERROR
    assert "allow the service's user" in found["access.own-topics"].change
    endpoint.refusing = True
    found = await examined(settings)
    assert (found["login.token"].level, "kafka.reachable" in found) == (Level.ERROR, False)
    assert "401 invalid_client" in found["login.token"].found
    assert "_CLIENT_SECRET" in found["login.token"].change
    endpoint.refusing, endpoint.away = False, True
    found = await examined(settings)
    assert "answers 503" in found["login.token"].found
