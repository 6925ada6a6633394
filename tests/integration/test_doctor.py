"""Tests the doctor on real brokers and Redis servers with each kind of finding, and on a healthy setup."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports it from here
    AclOperation,
    ResourcePatternType,
    ResourceType,
)

from deploy import places
from deploy.stack import Kafka, Redis, Service
from service.cli.doctor import examine, now_ms
from service.cli.finding import Finding, Level
from service.contract import Rules
from service.core.settings import Settings
from tests.conftest import MakeTopic
from tests.faults.cluster import Cluster
from tests.integration.client import Client, events
from tests.secured import PASSWORD, SecuredKafka, SecuredRedis, acls_of_service, sockets_closed

NOWHERE: Final = "127.0.0.1:1"
NO_RULES: Final = Rules()
HOW_REDIS_WAS_BUILT: Final = frozenset({"redis.allocator"})  # depends on the machine's server, not on a setting


class Findings(dict[str, list[Finding]]):
    """The findings by check."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__()
        for finding in findings:
            self.setdefault(finding.check, []).append(finding)

    def wrong(self, area: str = "") -> set[tuple[str, str]]:
        """List check and level of each finding that is not ok."""
        every = (
            finding for check, findings in self.items() if check not in HOW_REDIS_WAS_BUILT for finding in findings
        )
        return {(one.check, one.level.value) for one in every if one.level is not Level.OK and area in ("", one.area)}


async def examined(settings: Settings, rules: Rules = NO_RULES, **more: Any) -> Findings:
    async with sockets_closed():
        findings = await examine(settings, rules, **more)
    assert all(bool(finding.change) == (finding.level is not Level.OK) for finding in findings)
    return Findings(findings)


def settings_of(kafka: str, redis: str, namespace: str, **more: Any) -> Settings:
    given = {"request_timeout_ms": 5_000, "slots_max": 4, **more}
    return Settings(kafka=kafka, redis=redis, namespace=namespace, **given)


# --------------------------------------------------------------------------------------------------------- brokers


async def test_each_careless_setting_of_a_broker_is_reported(
    secured_kafka: SecuredKafka, secured_redis: SecuredRedis, namespace: str
) -> None:
    """Over TLS, as a user that may read the brokers' settings."""
    secured_kafka.add_user("doctor", PASSWORD)
    cluster = (ResourceType.BROKER, "kafka-cluster", ResourcePatternType.LITERAL, (AclOperation.DESCRIBE_CONFIGS,))
    secured_kafka.allow("doctor", cluster, *acls_of_service(namespace, namespace))
    environment = {**secured_kafka.environment("doctor"), **secured_redis.environment()}
    settings = Settings.from_env({**environment, "FENCEPOST_NAMESPACE": namespace})
    found = await examined(settings)
    assert found.wrong("kafka") == {
        ("kafka.brokers", "error"),
        ("kafka.default-replication", "error"),
        ("kafka.min-isr", "error"),
        ("kafka.unclean-election", "error"),
        ("kafka.transaction-verification", "error"),
        ("kafka.transaction-log", "error"),
        ("kafka.transaction-log-min-isr", "error"),
        ("kafka.transaction-timeout", "error"),
        ("kafka.id-expiration", "warning"),
        ("kafka.reauthentication", "warning"),
        ("kafka.transaction-markers", "warning"),  # since 4.2
    }
    assert found.wrong("access") == {("access.data-topics", "warning")}  # no topic exists yet
    assert found["kafka.transaction-timeout"][0].found == "transaction.max.timeout.ms=5000"
    assert found["kafka.version"][0].level is Level.OK
    (own,) = found["access.own-topics"]
    assert own.found == "not there yet, and may be made"
    assert len(own.subjects) == 3


async def test_a_broker_with_an_unreachable_advertised_listener_is_reported(
    secured_kafka: SecuredKafka, redis: Redis
) -> None:
    found = await examined(settings_of(secured_kafka.astray, redis.url, "any"))
    assert found.wrong() == {("kafka.brokers", "error"), ("kafka.advertised", "error"), ("redis.maxmemory", "warning")}
    (astray,) = found["kafka.advertised"]
    assert astray.found.startswith(f"{NOWHERE}: ")
    assert "advertised.listeners" in astray.change


async def test_kafka_and_redis_that_do_not_answer_are_reported() -> None:
    found = await examined(settings_of(NOWHERE, f"redis://{NOWHERE}/0", "any", request_timeout_ms=1_000))
    assert found.wrong() == {("kafka.reachable", "error"), ("redis.reachable", "error")}
    assert "Connect call failed" in found["kafka.reachable"][0].found


async def test_a_wrong_password_is_reported(secured_kafka: SecuredKafka, redis: Redis) -> None:
    environment = secured_kafka.environment(password="guess")
    found = await examined(Settings.from_env({**environment, "FENCEPOST_REDIS": redis.url}))
    assert found.wrong("kafka") == {("kafka.reachable", "error")}
    assert "Authentication failed" in found["kafka.reachable"][0].found


# ------------------------------------------------------------------------------------------------------------ ACLs


async def test_a_user_that_may_do_too_little(secured_kafka: SecuredKafka, redis: Redis, namespace: str) -> None:
    """Own topics without Write, without any permission, and one that may not be created; no transactional ids."""
    topics = {name: f"{namespace}.{name}" for name in ("ledger", "control")}
    events = {name: f"{namespace}-{name}" for name in ("open", "mute", "hidden", "unread", "unasked")}
    for name in (*topics.values(), *events.values()):
        secured_kafka.create_topic(name)
    a = AclOperation
    literal = ResourcePatternType.LITERAL
    secured_kafka.add_user("weak", PASSWORD)
    secured_kafka.allow(
        "weak",
        (ResourceType.TOPIC, topics["ledger"], literal, (a.DESCRIBE, a.DESCRIBE_CONFIGS, a.READ)),
        (ResourceType.TRANSACTIONAL_ID, f"{namespace}.slot.0", literal, (a.DESCRIBE,)),
        (ResourceType.TOPIC, events["open"], literal, (a.READ, a.WRITE, a.DESCRIBE_CONFIGS)),
        (ResourceType.TOPIC, events["mute"], literal, (a.READ, a.DESCRIBE_CONFIGS)),
        (ResourceType.TOPIC, events["unread"], literal, (a.READ, a.WRITE)),
        (ResourceType.TOPIC, events["unasked"], literal, (a.WRITE, a.DESCRIBE_CONFIGS)),
        (ResourceType.GROUP, f"{namespace}-read", literal, (a.READ,)),
    )
    caller = (
        f'[[callers]]\nname = "shop"\ntoken_sha256 = "{"0" * 64}"\ngroups = ["{namespace}-read", "{namespace}-not"]\n'
    )
    rules = Rules.parse(caller + "".join(f'[[topics]]\npattern = "{name}"\n' for name in events.values()))
    environment = {**secured_kafka.environment("weak"), "FENCEPOST_REDIS": redis.url, "FENCEPOST_SLOTS_MAX": "2"}
    found = await examined(
        Settings.from_env({**environment, "FENCEPOST_NAMESPACE": namespace, "FENCEPOST_SLOTS": "1"}), rules
    )

    own = {(one.subjects, one.found) for one in found["access.own-topics"]}
    assert own == {
        ((topics["ledger"],), "no permission to Write, Alter"),  # Alter: the ledger has one partition and needs two
        ((topics["control"], f"{namespace}.requests"), "may not be described"),
    }
    assert {(one.subjects, one.found) for one in found["access.slots"]} == {
        ((f"{namespace}.slot.0",), "no permission to Write"),
        ((f"{namespace}.slot.1",), "no permission to Describe, Write"),
    }
    assert {(one.subjects, one.level, one.found.partition(":")[0]) for one in found["access.data-topics"]} == {
        ((events["open"],), Level.OK, "may be written"),
        ((events["mute"],), Level.ERROR, "no permission to Write"),
        ((events["hidden"],), Level.ERROR, "may not be described"),
        ((events["unread"],), Level.WARNING, "no permission to DescribeConfigs"),
        ((events["unasked"],), Level.WARNING, "no permission to Read"),
    }
    assert {(one.subjects, one.level) for one in found["access.groups"]} == {
        ((f"{namespace}-read",), Level.OK),
        ((f"{namespace}-not",), Level.ERROR),
        ((f"{namespace}.slot.0.0",), Level.WARNING),
    }
    assert {one.level for one in found["access.offsets-topic"]} == {Level.WARNING}
    assert found.wrong("kafka") == {
        ("kafka.brokers", "error"),
        ("kafka.settings", "warning"),
        ("kafka.transaction-markers", "warning"),
    }


async def test_a_user_that_may_not_make_topics(secured_kafka: SecuredKafka, redis: Redis, namespace: str) -> None:
    secured_kafka.add_user("maker", PASSWORD)
    described = (ResourceType.TOPIC, f"{namespace}.", ResourcePatternType.PREFIXED, (AclOperation.DESCRIBE,))
    secured_kafka.allow("maker", described)
    environment = {**secured_kafka.environment("maker"), "FENCEPOST_REDIS": redis.url}
    found = await examined(Settings.from_env({**environment, "FENCEPOST_NAMESPACE": namespace}))
    (own,) = found["access.own-topics"]
    assert (own.level, own.found) == (Level.ERROR, "not there, and may not be made")


# ---------------------------------------------------------------------------------------------------------- topics


async def test_topics_that_are_not_as_they_should_be(
    kafka: Kafka, redis: Redis, namespace: str, make_topic: MakeTopic
) -> None:
    unclean = {"unclean.leader.election.enable": "true"}
    wrong_ledger = {"retention.ms": "3600000", "message.timestamp.type": "CreateTime", **unclean}
    kafka.create_topic(f"{namespace}.ledger", partitions=8, config=wrong_ledger)
    kafka.create_topic(f"{namespace}.control", config={"cleanup.policy": "delete", "max.message.bytes": "100000"})
    compacted = make_topic(1, {"cleanup.policy": "compact"})
    small = make_topic(1, {"max.message.bytes": "100000", "retention.ms": "3600000", **unclean})
    text = "".join(f'[[topics]]\npattern = "{name}"\n' for name in (compacted, small, "no-such-topic"))
    for name in (compacted, "no-letters"):
        text += f'[[topics]]\npattern = "refusing-*"\nschema = "s"\nquarantine = "{name}"\n'
    rules = Rules.parse(text)
    found = await examined(settings_of(kafka.bootstrap, redis.url, namespace), rules)
    assert found.wrong("topics") == {
        ("topics.own-settings", "error"),
        ("topics.own-there", "error"),  # deleted: a running process does not create it again
        ("topics.own-replicas", "error"),
        ("topics.own-unclean-election", "error"),
        ("topics.own-message-bytes", "warning"),
        ("topics.own-timestamps", "warning"),
        ("topics.data-there", "warning"),
        ("topics.quarantine-there", "error"),
        ("topics.quarantine-policy", "error"),
        ("topics.data-replicas", "error"),
        ("topics.data-unclean-election", "error"),
        ("topics.data-compaction", "warning"),
        ("topics.data-message-bytes", "warning"),
        ("topics.data-retention", "warning"),
    }
    own = " ".join(one.found for one in found["topics.own-settings"])
    for fault in ("retention.ms=3600000", "CreateTime", "SLOTS_MAX=4 is less than the 8", "cleanup.policy=delete"):
        assert fault in own
    for check, name in (("compaction", compacted), ("message-bytes", small), ("retention", small)):
        (one,) = (one for one in found[f"topics.data-{check}"] if one.level is Level.WARNING)
        assert one.subjects == (name,)
    # The checks that a broker with Kafka's own settings passes.
    assert not found.wrong("kafka") & {(f"kafka.{name}", "error") for name in ("unclean-election", "version")}
    assert found["kafka.transaction-verification"][0].level is Level.OK


# ----------------------------------------------------------------------------------------------------------- Redis


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, redis: Redis) -> Iterator[dict[str, Redis]]:
    """Servers, each with findings."""
    folder = tmp_path_factory.mktemp("servers")
    arguments = {
        "evicting": ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"],
        "replica": ["--replicaof", "127.0.0.1", str(redis.port)],
        "cluster": ["--cluster-enabled", "yes"],
        "scriptless": ["--rename-command", "EVAL", "NO-EVAL", "--rename-command", "EVALSHA", "NO-EVALSHA"],
        "failing": ["--dir", str(folder / "gone"), "--save", "3600", "1"],
    }
    (folder / "gone").mkdir()
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(Redis(folder / name, args=args, name=name)) for name, args in arguments.items()
        }
        shutil.rmtree(folder / "gone")
        with started["failing"].client() as client:
            client.set("a", "b")
            client.bgsave()
            until = time.monotonic() + 10
            while client.info("persistence")["rdb_last_bgsave_status"] == "ok" and time.monotonic() < until:
                time.sleep(0.05)
        yield started
        started["failing"].kill()  # it would not stop before it has saved


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("evicting", {("redis.policy", "error")}),
        ("replica", {("redis.role", "error"), ("redis.maxmemory", "warning")}),
        ("cluster", {("redis.script", "error"), ("redis.cluster", "warning"), ("redis.maxmemory", "warning")}),
        ("scriptless", {("redis.script", "error"), ("redis.maxmemory", "warning")}),
        ("failing", {("redis.saving", "error"), ("redis.maxmemory", "warning")}),
    ],
)
async def test_a_misconfigured_redis_is_reported(
    servers: dict[str, Redis], server: str, expected: set[tuple[str, str]]
) -> None:
    found = await examined(settings_of(NOWHERE, servers[server].url, "any", request_timeout_ms=1_000))
    assert found.wrong("redis") == expected


@pytest.mark.parametrize(("rate", "level"), [(1.0, Level.OK), (5.0, Level.WARNING), (1_000.0, Level.ERROR)])
async def test_memory_is_held_against_retention_and_rate(servers: dict[str, Redis], rate: float, level: Level) -> None:
    """The keys of a day at about 200 bytes each, in 100 MB."""
    found = await examined(settings_of(NOWHERE, servers["evicting"].url, "any", request_timeout_ms=1_000), rate=rate)
    (memory,) = found["redis.memory"]
    assert memory.level is level
    assert f"{rate:g} events/s (as given) for 24 h: {rate * 86_400:,.0f} keys" in memory.found


async def test_the_rate_is_measured_from_the_ledgers_growth(
    served: Service, kafka: Kafka, redis: Redis, make_topic: MakeTopic
) -> None:
    async with Client() as client:
        await client.load([served.url], events(make_topic(1), 60))
    found = await examined(settings_of(kafka.bootstrap, redis.url, served.env["FENCEPOST_NAMESPACE"]))
    (memory,) = found["redis.memory"]
    assert memory.found.startswith("0.1 events/s (measured over 10 minutes) for 24 h: 8,640 keys")


# ---------------------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize(("wrong_s", "level"), [(0, Level.OK), (-5, Level.WARNING), (120, Level.ERROR)])
async def test_a_machine_whose_clock_is_off_is_reported(
    served: Service, kafka: Kafka, redis: Redis, wrong_s: int, level: Level
) -> None:
    """The clock of this machine is off; those of Kafka and Redis are right."""
    settings = settings_of(kafka.bootstrap, redis.url, served.env["FENCEPOST_NAMESPACE"])
    found = await examined(settings, now=lambda: now_ms() + wrong_s * 1000)
    for check in ("clocks.kafka", "clocks.redis"):
        (clock,) = found[check]
        assert clock.level is level, clock
    side = "ahead of" if wrong_s < 0 else "behind"
    assert wrong_s == 0 or side in found["clocks.redis"][0].found


# ------------------------------------------------------------------------------------------------------ all is well


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", 3) as cluster:
        yield cluster


def test_three_brokers_and_a_bounded_redis_have_nothing_to_find(three: Cluster, tmp_path: Path, namespace: str) -> None:
    """As a person runs it; then with one broker less, which is the only new finding."""
    three.brokers[0].create_topic("orders")
    with Redis(tmp_path / "redis", args=["--maxmemory", "200mb"]) as redis:
        environment = {
            **places.hermetic_environment(),
            "FENCEPOST_KAFKA": three.bootstrap,
            "FENCEPOST_REDIS": redis.url,
            "FENCEPOST_NAMESPACE": namespace,
        }
        done = run_doctor(environment, "--rate", "5", "--json")
        document = json.loads(done.stdout)
        wrong = {one["check"] for one in document["findings"] if one["level"] != "ok"}
        expected = {"kafka.transaction-markers"}  # no release since 4.2 writes them all
        assert (done.returncode, wrong - HOW_REDIS_WAS_BUILT) == (0, expected), done.stdout
        assert document["verdict"] == ("warning" if wrong else "ok")
        done = run_doctor(environment, "--rate", "5000")
        assert done.returncode == 1
        assert "432,000,000 keys" in done.stdout
        assert f"errors 1, warnings {len(wrong)}" in done.stdout


def run_doctor(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.cli", "doctor", *arguments],
        env=environment,
        cwd=places.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
