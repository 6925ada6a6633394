"""Tests checks of the doctor that need servers which are not available here: old versions, and counts."""

import re
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from service.claims.redis_requirements import unmet_demands
from service.claims.redis_seeds import View
from service.cli import check_access, check_brokers, check_login, check_redis, check_topics, doctor
from service.cli.finding import Finding, Level, grouped, judged, worst
from service.contract import Rules, TopicRule
from service.contract.wire.control import GENERATION_KEY, retention_key
from service.core.problems import StoreAway
from service.core.settings import Settings
from service.kafka.acl_inspector import ClusterSnapshot, Operation, VisibleTopic, supported_features
from service.kafka.reader import Item
from service.kafka.tokens import token_source_of
from service.kafka.topic_admin import Topic
from service.kafka.topics import InternalTopics
from tests.unit.fakes import FakeTopicAdmin, unreachable_kafka

INFO = {
    "redis_version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "role": "master",
    "run_id": "r",
    "master_replid": "m",
}


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.found for one in findings if one.level is Level.ERROR}


def test_a_broker_that_cannot_verify_transactions_is_too_old() -> None:
    old = {"transaction.max.timeout.ms": "900000"}
    new = {**old, check_brokers.VERIFICATION: "true"}
    found = list(check_brokers.broker_settings({1: new, 2: old}, Settings(), topics_there=True))
    assert wrong(found) == {"kafka.version": "older than 3.6: it cannot verify transactions"}
    (version,) = (one for one in found if one.check == "kafka.version" and one.level is Level.ERROR)
    assert version.subjects == ("broker 2",)


def test_brokers_are_named_by_their_release() -> None:
    """By the newest metadata.version; a broker with ZooKeeper has none."""
    versions = {1: 14, 2: 11, 3: None, 4: 30, 5: 99, 6: 30, 7: 22}
    found = {one.subjects: (one.level, one.found) for one in check_brokers.releases(versions)}
    assert found == {
        ("broker 1",): (Level.OK, "Kafka 3.6"),
        ("broker 2",): (Level.ERROR, "older than Kafka 3.6"),
        ("broker 4", "broker 6"): (Level.OK, "Kafka 4.3"),
        ("broker 5",): (Level.OK, "newer than Kafka 4.4, the newest that was tested"),
        ("broker 7",): (Level.OK, "Kafka 4.0"),
    }


def test_the_features_of_a_broker_are_read_of_a_tagged_field() -> None:
    content = b"\x03" + b"\x11metadata.version" + b"\0\x01\0\x1e\0" + b"\x0ekraft.version" + b"\0\0\0\x01\0"
    assert supported_features(content) == {"metadata.version": 30, "kraft.version": 1}
    assert supported_features(b"") == {}


def test_transactions_of_version_2_need_a_patch_level_without_their_faults() -> None:
    """A broker reports its release and the finalized features, and no patch level.

    Kafka 4.2.0 already accepts markers that its coordinator sends again (KAFKA-19999), so that no release lacks this.
    """
    versions = {1: 33, 2: 25, 3: 29, 4: 21, 5: None}
    found = list(check_brokers.transactions({1: 2, 2: 2, 3: 2, 4: 0, 5: 0}, versions, "auto"))
    assert [(each.level, each.subjects) for each in found if each.level is not Level.OK] == [
        (Level.WARNING, ("broker 2",))
    ]
    assert "KAFKA-19367" in str(found)
    assert {each.level for each in check_brokers.transactions({2: 2, 3: 2}, versions, "1")} == {Level.OK}


def test_brokers_that_skip_markers_are_named() -> None:
    """By the version of WriteTxnMarkers, which is higher since 4.2; a broker that reports none is older."""
    found = list(check_brokers.transaction_markers({1: {27: 2}, 2: {27: 1}, 3: {}, 4: {27: 3}}))
    assert {(one.level, one.subjects) for one in found} == {
        (Level.WARNING, ("broker 1", "broker 4")),
        (Level.OK, ("broker 2", "broker 3")),
    }
    assert "KAFKA-20734" in found[0].found


def test_brokers_defaults_matter_less_once_the_topics_are_there() -> None:
    values = {"default.replication.factor": "1", "min.insync.replicas": "1", check_brokers.VERIFICATION: "true"}
    for there, level in ((False, Level.ERROR), (True, Level.WARNING)):
        assert worst(check_brokers.broker_settings({1: values}, Settings(), there)) is level


@pytest.mark.parametrize(("reauth_ms", "well"), [("0", True), ("5000", True), ("4999", False)])
def test_sessions_that_are_too_short_for_a_login_are_reported(reauth_ms: str, well: bool) -> None:
    values = {"connections.max.reauth.ms": reauth_ms, check_brokers.VERIFICATION: "true"}
    settings = Settings(kafka_security_protocol="SASL_SSL", kafka_sasl_mechanism="PLAIN")
    found = {one.check: one for one in check_brokers.broker_settings({1: values}, settings, topics_there=True)}
    assert found["kafka.reauthentication"].level is (Level.OK if well else Level.WARNING)


@pytest.mark.parametrize(
    ("settings", "whose"),
    [
        ({}, "User:ANONYMOUS"),
        ({"kafka_security_protocol": "SASL_SSL", "kafka_sasl_username": "me"}, "User:me"),
        ({"kafka_security_protocol": "SSL", "kafka_ssl_certfile": "/c"}, "User: and the subject of"),
        ({"kafka_oauth_aws_region": "eu-central-1"}, "the IAM identity"),
    ],
)
def test_the_principal_is_named_as_acls_name_it(settings: dict[str, str], whose: str) -> None:
    assert check_login.principal(Settings(**settings)).startswith(whose)  # type: ignore[arg-type]


async def test_each_source_of_tokens_has_its_remedy(tmp_path: Path) -> None:
    login = {"kafka_security_protocol": "SASL_PLAINTEXT", "kafka_sasl_mechanism": "OAUTHBEARER"}
    settings = Settings(**login, kafka_oauth_token_file=str(tmp_path / "token"))  # type: ignore[arg-type]
    (missing,) = await check_login.examine(settings, token_source_of(settings))
    assert (missing.check, missing.level) == ("login.token", Level.ERROR)
    assert "projected serviceAccountToken" in missing.change
    (tmp_path / "token").write_text("opaque")
    given, whose = await check_login.examine(settings, token_source_of(settings))
    assert given.found == f"the token file {tmp_path / 'token'} gives one"
    assert whose.found == "unknown"
    settings = Settings(**login, kafka_oauth_token_url="http://127.0.0.1:1/token")  # type: ignore[arg-type]
    plain, away = await check_login.examine(settings, token_source_of(settings))
    assert (plain.level, away.level) == (Level.WARNING, Level.ERROR)
    assert "the network to it" in away.change


@pytest.mark.parametrize(("version", "well"), [("6.0.20", False), ("6.2.0", True), ("7.2.4", True), ("10.1", True)])
def test_redis_is_6_2_or_newer(version: str, well: bool) -> None:
    found = wrong(list(check_redis.server({**INFO, "redis_version": version})))
    assert found == ({} if well else {"redis.version": "Redis 6.0.20"})


def test_a_redis_without_a_run_id_is_a_wrong_identity() -> None:
    found = wrong(list(check_redis.server({name: text for name, text in INFO.items() if name != "run_id"})))
    assert found == {"redis.identity": "no run_id in INFO"}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, []),
        ({"role": "slave"}, ["role slave"]),
        ({"cluster_enabled": "1"}, []),
        ({"role": ""}, ["role "]),
        ({"run_id": "", "redis_version": "5.0.7"}, ["Redis 5.0.7", "no run_id in INFO"]),
    ],
)
def test_the_start_is_refused_for_each_error_of_the_doctor(change: dict[str, str], lines: list[str]) -> None:
    info = {**INFO, **change}
    assert [line.partition("(")[2].partition(")")[0] for line in unmet_demands(info)] == lines
    errors = [one for one in check_redis.server(info) if one.level is Level.ERROR]
    assert unmet_demands(info) == [
        f"FENCEPOST_REDIS names a server that will not do ({one.found}): {one.change}" for one in errors
    ]


@pytest.mark.parametrize(("os", "named"), [("Amazon ElastiCache", True), ("Linux 6.1", False)])
def test_elasticache_serverless_is_refused_by_name(os: str, named: bool) -> None:
    (line,) = unmet_demands({**INFO, "os": os, "maxmemory_policy": "volatile-lru"})
    assert ("ElastiCache Serverless" in line) == named
    assert "set maxmemory-policy noeviction" in line


UP = View(("a", 1), (0, 4))
DOWN = StoreAway("b:2 does not answer: TimeoutError")


@pytest.mark.parametrize(
    ("views", "errors", "level", "agreement"),
    [
        ([UP, UP, UP], [], Level.OK, [Level.OK]),
        ([UP, UP], [DOWN], Level.WARNING, [Level.OK]),
        ([UP], [DOWN], Level.ERROR, [Level.OK]),
        ([], [DOWN], Level.ERROR, []),
        ([UP, View(("b", 2), (0, 3))], [], Level.OK, [Level.WARNING]),
    ],
)
def test_sentinels_that_do_not_answer_or_do_not_agree_are_reported(
    views: list[View], errors: list[StoreAway], level: Level, agreement: list[Level]
) -> None:
    answers, *agree = check_redis.seeds(views, errors, "sentinel")
    assert (answers.check, answers.level) == ("redis.sentinels", level)
    assert f"{len(views)} of {len(views) + len(errors)} answer" in answers.found
    assert [(one.check, one.level) for one in agree] == [("redis.agreement", each) for each in agreement]
    assert not list(check_redis.seeds([], [], "")), "one server has none"


@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        ("", {}, {}),
        ("", {"cluster_enabled": "1"}, {"redis.cluster": Level.WARNING}),
        ("cluster", {"cluster_enabled": "1", "connected_slaves": "1"}, {"redis.replicas": Level.OK}),
        ("sentinel", {"connected_slaves": "0"}, {"redis.replicas": Level.WARNING}),
    ],
)
def test_a_store_that_can_fail_over_has_a_replica(kind: str, fields: dict[str, str], found: dict[str, Level]) -> None:
    assert {one.check: one.level for one in check_redis.replicas({**INFO, **fields}, kind)} == found


def test_the_bytes_of_a_key_are_measured_once_the_server_has_many_keys() -> None:
    used = {"used_memory": "13500000", "used_memory_startup": "1000000"}
    assert check_redis.bytes_a_key({**used, "db0": "keys=9999,expires=1"}) == check_redis.KEY_BYTES
    assert check_redis.bytes_a_key({**used, "db0": "keys=90000,expires=1", "db3": "keys=10000,expires=0"}) == 125


@pytest.mark.parametrize(
    ("fields", "level"),
    [({"mem_allocator": "jemalloc-5.3.0"}, Level.OK), ({"mem_allocator": "libc"}, Level.WARNING), ({}, Level.OK)],
)
def test_the_level_of_the_allocator_check_follows_the_allocator(fields: dict[str, str], level: Level) -> None:
    (found,) = check_redis.allocator({**INFO, **fields})
    assert (found.check, found.level) == ("redis.allocator", level)


def test_each_kind_of_table_in_the_rules_is_counted(tmp_path: Path) -> None:
    one_of_each: dict[str, Any] = dict.fromkeys((each.name for each in fields(Rules)), (Mock(),))
    rules = Rules(**one_of_each)
    path = tmp_path / "rules.toml"
    path.write_text("")
    (found,) = doctor.rules_file(Settings(rules=str(path)), rules)
    assert {*re.findall(r"1 (\w+)", found.found)} == {each.name for each in fields(Rules)}
    (found,) = doctor.rules_file(Settings(rules=str(path)), Rules(sinks=rules.sinks))
    assert found.found.startswith(f"{path}: 1 sinks; sha256 ")


def test_groups_that_may_not_be_read_are_reported() -> None:
    text = '[[callers]]\nname = "a"\ntoken_sha256 = "' + 64 * "0" + '"\ngroups = ["billing", "other-*", "closed"]'
    rules = Rules.parse(text)
    assert check_access.has_groups(rules)
    assert not check_access.has_groups(Rules())
    assert check_access.groups_of_rules(rules) == ["billing", "closed"]
    slots = check_access.group_of_slots("ns")
    read = frozenset({Operation.READ, Operation.DESCRIBE})
    found = check_access.groups_allowed({"billing": read, "closed": frozenset(), slots: frozenset()}, "ns")
    assert {(one.subjects, one.level) for one in found} == {
        (("billing",), Level.OK),
        (("closed",), Level.ERROR),
        (("ns.slot.0.0",), Level.WARNING),
    }
    assert "ns.slot." in found[-1].change


@pytest.mark.parametrize(
    ("may", "text"),
    [
        ((Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.READ), "may be read"),
        ((Operation.DESCRIBE, Operation.READ), "no permission to DescribeConfigs: its min.insync.replicas is unknown"),
        ((), "no permission to Describe, Read, DescribeConfigs: a coordinator"),
    ],
)
def test_the_topic_of_offsets_is_checked_where_it_is_there(may: tuple[Operation, ...], text: str) -> None:
    name = "__consumer_offsets"
    seen = {name: VisibleTopic(name, 50, 3, frozenset(may))} if may else {}
    (found,) = check_access.offsets_topic_allowed(ClusterSnapshot((), seen, frozenset() if may else frozenset({name})))
    assert found.found.startswith(text)
    assert found.level is (Level.OK if text == "may be read" else Level.WARNING)
    assert check_access.offsets_topic_allowed(ClusterSnapshot((), {}, frozenset())) == []


def test_findings_with_the_same_content_are_grouped() -> None:
    names = [f"topic-{n}" for n in range(8)]
    rows = [(name, judged("topics.x", name != "topic-3", "so", "change it")) for name in names]
    well, broken = sorted(grouped(rows), key=lambda one: one.level)[::-1]
    assert {well.level, broken.level} == {Level.OK, Level.ERROR}
    (many,) = (one for one in (well, broken) if one.level is Level.OK)
    assert many.where == "topic-0, topic-1, topic-2, topic-4, topic-5 and 2 more"
    assert worst([many]) is Level.OK
    assert worst([well, broken]) is Level.ERROR


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (2048, "2 KiB"), (8.64e9, "8.05 GiB"), (1e13, "9.09 TiB")])
def test_a_size_is_shown_with_its_unit(number: float, text: str) -> None:
    assert check_redis.size(number) == text


def test_a_quarantine_topic_that_is_missing_or_compacted_is_an_error() -> None:
    """What should go there is answered 503 until it can."""
    rules = Rules((TopicRule("a*", schema="s", quarantine="there"), TopicRule("b*", schema="s", quarantine="absent")))
    seen = {"there": VisibleTopic("there", 1, 3, frozenset(Operation))}
    snapshot = ClusterSnapshot((), seen, frozenset())
    assert check_access.names_of_rules(rules) == ["absent", "there"]
    assert wrong(check_access.data_topics_allowed(snapshot, seen, rules)) == {"topics.quarantine-there": "not there"}
    compacted = {"there": Topic("there", 1, {"cleanup.policy": "compact", "min.insync.replicas": "2"})}
    found = wrong(check_topics.data_topic_settings(compacted, seen, rules.quarantine_topics))
    assert found == {"topics.quarantine-policy": "it is compacted"}


def test_a_topic_whose_leader_may_be_elected_unclean_is_an_error() -> None:
    """The brokers' own setting is another check; the owner of a topic may have set it on the topic."""
    name, seen = "fencepost.control", VisibleTopic("fencepost.control", 1, 3, frozenset(Operation))
    internal = InternalTopics(FakeTopicAdmin(), Settings())
    for unclean in ("true", "false"):
        topic = Topic(name, 1, {"min.insync.replicas": "2", "unclean.leader.election.enable": unclean})
        snapshot = ClusterSnapshot((), {name: seen}, frozenset())
        own = wrong(check_topics.own_topics({name: topic}, internal, snapshot, 64))
        of_events = wrong(check_topics.data_topic_settings({name: topic}, {name: seen}))
        expected = "unclean.leader.election.enable=true"
        assert own.get("topics.own-unclean-election") == (expected if unclean == "true" else None)
        assert of_events == ({"topics.data-unclean-election": expected} if unclean == "true" else {})


@pytest.mark.parametrize(
    ("before_s", "longest_s", "level", "found"),
    [
        (None, 259_200, None, ""),  # of a namespace in which nothing was written yet
        (0, 86_400, None, ""),
        (0, 259_200, Level.WARNING, "keys live for 259200 s, by earlier rules for 86400 s at most"),
        (200_000, 259_200, Level.WARNING, "keys live for 259200 s, by earlier rules for 200000 s at most"),
        (259_200, 259_200, Level.OK, "keys live for 259200 s at most"),
        (
            604_800,
            86_400,
            Level.OK,
            "keys live for 86400 s at most; the recovery of a lost Redis reads back 604800 s, as earlier rules need it",
        ),
    ],
)
def test_a_longer_retention_is_to_come_by_a_reload(
    before_s: int | None, longest_s: int, level: Level | None, found: str
) -> None:
    findings = check_topics.retention(before_s, longest_s, 86_400)
    expected = [("rules.retention", level, found)] if level else []
    assert [(one.check, one.level, one.found) for one in findings] == expected
    assert all(("SIGHUP" in one.change) is (one.level is Level.WARNING) for one in findings)


async def test_the_doctor_finds_the_longest_retention_in_control(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    async def read(_: object, topic: str, spans: dict[int, tuple[int, int]], __: float) -> AsyncIterator[list[Item]]:
        (start, until), offsets = spans[0], range(len(keys))
        for offset in offsets[start:until]:
            yield [Item(0, offset, keys[offset], b"")]

    async def until(*_: object) -> dict[int, int]:
        return {0: len(keys)}

    async def since(*_: object) -> dict[int, int | None]:
        return {0: 0 if keys else None}

    for name, fake in (("read_between", read), ("high_watermarks", until), ("offsets_since", since)):
        monkeypatch.setattr(doctor, name, fake)
    kafka = unreachable_kafka()
    assert await doctor.remembered_retention(kafka, "fencepost.control") is None
    keys += [b"barrier/3", GENERATION_KEY]
    assert await doctor.remembered_retention(kafka, "fencepost.control") == 0
    keys += [retention_key(600_000), retention_key(500_000), b"barrier/3"]
    assert await doctor.remembered_retention(kafka, "fencepost.control") == 600_000
