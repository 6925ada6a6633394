"""TLS and SASL: an event from its POST to the clean report of the audit."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports it from here
    AclOperation,
    ResourcePatternType,
    ResourceType,
)
from pyspark.sql import SparkSession

from deploy.stack import Service
from service.cli.doctor import examine
from service.cli.finding import Level
from service.contract import Rules, SharedSettings
from service.core.settings import Settings as ServiceSettings
from spark import job
from spark.errors import CannotRun
from spark.reading.connection import MSK_HANDLER, for_kafka_clients
from spark.reading.kafka_admin import KafkaAdmin
from spark.reading.librdkafka_admin import LibrdkafkaAdmin
from spark.settings import Options, Settings
from spark.without_spark import before_spark, idle
from tests.integration.client import Client, events
from tests.managed import SUBJECT, Issuer, ManagedKafka, TokenEndpoint
from tests.secured import PASSWORD, USER, SecuredKafka, SecuredRedis, acls_of_job, acls_of_service

EVENTS: Final = 40


@pytest.fixture(scope="module")
def environment(secured_kafka: SecuredKafka, secured_redis: SecuredRedis) -> dict[str, str]:
    """The same settings for both; service and job have the ACLs that the README lists."""
    namespace = f"tls-{uuid.uuid4().hex[:8]}"
    secured_kafka.add_user("audit", PASSWORD)
    secured_kafka.allow(USER, *acls_of_service(namespace, namespace + "-events"))
    secured_kafka.allow("audit", *acls_of_job(namespace, namespace + "-events"))
    secured_kafka.create_topic(namespace + "-events", partitions=2)
    return {
        **secured_kafka.environment(),
        **secured_redis.environment(),
        "FENCEPOST_NAMESPACE": namespace,
        "FENCEPOST_SLOTS": "2",
        "FENCEPOST_SLOTS_MAX": "2",
        "FENCEPOST_REQUEST_TIMEOUT_MS": "5000",
        "FENCEPOST_TRANSACTION_TIMEOUT_MS": "5000",
    }


@pytest.fixture
def service(tmp_path: Path, environment: dict[str, str]) -> Iterator[Service]:
    with Service(tmp_path, kafka="", redis="", env=environment) as service:
        yield service
    assert "Traceback" not in service.log.read_text(), service.tail(60)


async def test_a_posted_event_has_a_clean_report_in_a_secured_cluster(
    service: Service,
    environment: dict[str, str],
    spark: SparkSession,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    topic = environment["FENCEPOST_NAMESPACE"] + "-events"
    async with Client() as client:
        asked = events(topic, EVENTS)
        await client.load([service.url], asked)
        assert all(attempt.replayed for attempt in await client.load([service.url], asked))
    looked_at = {finding.check: finding for finding in await examine(ServiceSettings.from_env(environment), Rules())}
    assert looked_at["clocks.kafka"].level is Level.OK  # by a journal record without answers
    service.stop()

    shared = SharedSettings.from_env({**environment, "FENCEPOST_KAFKA_SASL_USERNAME": "audit"})
    options = Options(lake=str(tmp_path / "lake"), report=str(tmp_path / "report"))
    lines: list[str] = []
    made = job.run(spark, Settings(shared=shared, options=options), lines.append)
    assert made.status == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["run"]["verdict"], report["findings"], report["evidence"]["rejects"]) == ("clean", [], 0)
    assert (report["balance"]["accepted"], report["balance"]["delivered_once"]) == (EVENTS, EVENTS)

    # By the settings of the other client, which publishes nothing anew.
    known = before_spark.known(Settings(shared=shared, options=options), {})
    assert known is not None
    repeated = idle.run(known, lines.append)
    assert repeated is not None
    assert (repeated.document["run"]["number"], repeated.document["balance"]) == (2, report["balance"])

    # The password is in no file, in no output, and on no command line of a process.
    written = contents(tmp_path)
    assert len(written) > 10
    output = "".join(lines) + "".join(capfd.readouterr())
    assert not [content for content in (*written, output.encode(), *command_lines()) if leaks(content)]


def leaks(content: bytes) -> bool:
    return any(form.encode() in content for form in (PASSWORD, json.dumps(PASSWORD)[1:-1], "wo,r=d"))


def contents(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.rglob("*") if file.is_file()]


def command_lines() -> list[bytes]:
    """The command lines of all processes, with Spark's JVM."""
    found = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert any(b"org.apache.spark" in line for line in found)
    return found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kafka_sasl_password": "guess"}, "Authentication failed"),
        ({"kafka_ssl_cafile": ""}, "unable to find valid certification path"),
    ],
)
def test_a_job_without_access_to_kafka_says_why_without_the_password(
    spark: SparkSession, environment: dict[str, str], change: dict[str, str], why: str
) -> None:
    shared: Any = replace(SharedSettings.from_env(environment), **change)  # type: ignore[arg-type]
    broker = KafkaAdmin(spark, shared)
    with pytest.raises(CannotRun, match=why) as caught:
        broker.names()
    broker.close()
    assert PASSWORD not in str(caught.value)


def test_the_job_connects_with_a_certificate_or_with_plain(
    spark: SparkSession, environment: dict[str, str], secured_kafka: SecuredKafka
) -> None:
    topic = environment["FENCEPOST_NAMESPACE"] + "-events"
    secured_kafka.allow("CN=job", *acls_of_job(environment["FENCEPOST_NAMESPACE"], topic))
    plain = replace(SharedSettings.from_env(environment), kafka_sasl_mechanism="PLAIN")
    for shared in (plain, secured_kafka.with_certificate("job")):
        broker = KafkaAdmin(spark, shared)
        assert topic in broker.names()
        assert LibrdkafkaAdmin(shared).names() == broker.names()
        broker.close()


def test_the_job_logs_in_by_tokens_of_an_endpoint_and_of_a_file(spark: SparkSession, tmp_path: Path) -> None:
    """kafka-clients has settings of its own for both, and encodes the client's secret as the service does."""
    issuer = Issuer(tmp_path / "issuer")
    file = tmp_path / "token"
    file.write_text(issuer.token(60.0))
    with (
        ManagedKafka(tmp_path / "kafka", issuer, reauth_ms=60_000) as broker,
        TokenEndpoint(issuer, life_s=60.0) as endpoint,
    ):
        broker.create_topic("seen")
        describe = (ResourceType.TOPIC, "seen", ResourcePatternType.LITERAL, (AclOperation.DESCRIBE,))
        broker.allow(SUBJECT, describe)
        for login in (broker.by_token(endpoint), broker.by_file(file)):
            admin = KafkaAdmin(spark, SharedSettings.from_env(login))
            assert admin.names() == ["seen"]
            admin.close()


def test_the_settings_of_tokens_are_those_of_kafkas_java_client(tmp_path: Path) -> None:
    login = {"kafka_security_protocol": "SASL_SSL", "kafka_sasl_mechanism": "OAUTHBEARER"}
    authority = tmp_path / "ca.crt"
    authority.write_text("line\nline\n")
    client = for_kafka_clients(
        SharedSettings(
            **login,  # type: ignore[arg-type]
            kafka_oauth_token_url="https://login/token",
            kafka_oauth_client_id="me",
            kafka_oauth_client_secret='a"b\\c',
            kafka_oauth_scope="kafka",
            kafka_oauth_extensions="logicalCluster=lkc-1",
            kafka_oauth_cafile=str(authority),
        )
    )
    assert client["sasl.oauthbearer.token.endpoint.url"] == "https://login/token"
    assert client["sasl.jaas.config"] == (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        'extension_logicalCluster="lkc-1" clientId="me" clientSecret="a\\"b\\\\c" scope="kafka" '
        'ssl.truststore.type="PEM" ssl.truststore.certificates="line\\nline\\n";'
    )
    msk = for_kafka_clients(SharedSettings(**login, kafka_oauth_aws_region="eu-central-1"))  # type: ignore[arg-type]
    assert msk["sasl.login.callback.handler.class"] == MSK_HANDLER
    assert msk["sasl.jaas.config"].endswith("OAuthBearerLoginModule required;")


def test_the_service_reads_the_same_environment(environment: dict[str, str]) -> None:
    assert ServiceSettings.from_env(environment).kafka_sasl_password == PASSWORD
