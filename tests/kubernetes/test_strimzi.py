"""Tests topics and users for Strimzi: the service accepts the topics, and the ACLs are those that are documented."""

import re
from typing import Any, Final

import pytest

from deploy.places import ROOT
from service.contract.wire.names import findings_topic, internal_topics
from service.core.settings import Settings
from service.kafka.topic_admin import Topic
from service.kafka.topics import InternalTopics
from tests.kubernetes.rendering import HERE, Rendered, render
from tests.kubernetes.test_schemas import VERSIONS, check

NAMESPACE: Final = Settings().namespace
EVENTS: Final = "orders."  # the topics of events in the manifests
GROUPS: Final = "orders-"  # and the consumer groups

Acl = tuple[str, str, str, frozenset[str]]


@pytest.fixture(scope="module")
def strimzi() -> Rendered:
    return Rendered("strimzi", render(HERE / "strimzi"))


def topics(strimzi: Rendered) -> dict[str, Topic]:
    """Return the topics as Kafka would describe them."""
    return {
        name: Topic(
            name, found["spec"]["partitions"], {key: str(each) for key, each in found["spec"]["config"].items()}
        )
        for name, found in strimzi.of("KafkaTopic").items()
    }


def test_the_internal_topics_are_there_and_the_service_accepts_them(strimzi: Rendered) -> None:
    found = topics(strimzi)
    cluster: Any = None
    own = InternalTopics(cluster, Settings())
    for name in internal_topics(NAMESPACE):
        assert name in found
        if name != findings_topic(NAMESPACE):
            assert own.faults(found[name]) == []
    assert found[own.ledger].partitions == Settings().slots_max


def test_the_findings_are_compacted(strimzi: Rendered) -> None:
    assert topics(strimzi)[findings_topic(NAMESPACE)].settings["cleanup.policy"] == "compact"


def test_a_topic_keeps_what_it_acknowledged(strimzi: Rendered) -> None:
    for name, found in strimzi.of("KafkaTopic").items():
        config = found["spec"]["config"]
        assert found["spec"]["replicas"] >= 3, name
        assert (config["min.insync.replicas"], config["unclean.leader.election.enable"]) == (2, "false")


def granted(strimzi: Rendered, user: str) -> set[Acl]:
    acls = strimzi.one("KafkaUser", user)["spec"]["authorization"]["acls"]
    return {
        (
            each["resource"]["type"],
            each["resource"]["name"],
            each["resource"]["patternType"],
            frozenset(each["operations"]),
        )
        for each in acls
    }


def documented(who: str) -> set[Acl]:
    """Read the ACLs of the service or the audit from the table in service/README.md."""
    text = (ROOT / "service" / "README.md").read_text()
    found: set[Acl] = set()
    for row in re.findall(rf"^\| {who} \| (.+) \| (.+) \|$", text, re.MULTILINE):
        on, operations = row[0], frozenset(row[1].split(", "))
        kind = "transactionalId" if on.startswith("transactional") else "group" if "groups" in on else "topic"
        for name in re.findall(r"`(fencepost\.[a-z.]*)\*`", on):
            found.add((kind, name, "prefix", operations))
        for name in re.findall(r"topic `(fencepost\.[a-z]+|__[a-z_]+)`", on):
            found.add((kind, name, "literal", operations))
        if on.startswith("the groups"):
            found.add((kind, GROUPS, "prefix", operations))
        if re.search("the topics of (its|the) events", on):
            found.add((kind, EVENTS, "prefix", operations))
    return found


@pytest.mark.parametrize(
    ("user", "who", "rows"), [("fencepost", "service(?:, for .+?)?", 6), ("fencepost-audit", "audit", 3)]
)
def test_a_user_may_what_the_table_says(strimzi: Rendered, user: str, who: str, rows: int) -> None:
    assert len(documented(who)) == rows
    assert granted(strimzi, user) == documented(who)


def test_a_topic_of_events_is_within_the_acls(strimzi: Rendered) -> None:
    others = set(strimzi.of("KafkaTopic")) - set(internal_topics(NAMESPACE))
    assert others
    assert all(name.startswith(EVENTS) for name in others)


def test_the_user_is_that_of_the_component_for_tls() -> None:
    text = (HERE / "components" / "kafka-sasl-tls" / "kustomization.yaml").read_text()
    assert "FENCEPOST_KAFKA_SASL_USERNAME=fencepost\n" in text
    assert "FENCEPOST_KAFKA_SASL_MECHANISM=SCRAM-SHA-512\n" in text


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema_and_names_its_cluster(strimzi: Rendered, version: str) -> None:
    assert {found["kind"] for found in strimzi.objects} == {"KafkaTopic", "KafkaUser"}
    for found in strimzi.objects:
        check(found, version)
        assert found["metadata"]["labels"]["strimzi.io/cluster"] == "kafka"
        assert found["metadata"]["namespace"] == "kafka"
