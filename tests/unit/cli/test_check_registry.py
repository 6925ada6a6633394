"""Tests the doctor's checks of the Schema Registry."""

import json

from service.cli.check_registry import examine
from service.cli.finding import Finding, Level
from service.contract import RegistryRule, Rules, SchemaRule, TopicRule
from service.core.metrics import Telemetry
from service.core.settings import Settings
from service.registry.client import RegistryClient
from service.registry.schema import Schema, SchemaType
from tests.contract.fake_registry import FakeRegistry


def rules(*subjects: str) -> Rules:
    topics = (TopicRule(name, registry=RegistryRule(value=SchemaRule(subject=name))) for name in subjects)
    return Rules(tuple(topics))


async def test_subjects_of_the_rules_are_looked_up() -> None:
    with FakeRegistry() as registry:
        settings = Settings(registry=registry.url)
        client = RegistryClient(settings, Telemetry())
        await client.registered("there", Schema(SchemaType.AVRO, json.dumps("long")), register=True)
        await client.close()
        found = await examine(settings, rules("there", "absent"))
    assert [(one.check, one.level, one.subjects) for one in found] == [
        ("registry.reachable", Level.OK, ()),
        ("registry.subjects", Level.OK, ("there",)),
        ("registry.subjects", Level.ERROR, ("absent",)),
    ]
    assert found[0].found == f"{settings.registry} takes AVRO, JSON, PROTOBUF"
    assert found[1].found == "AVRO, version 1"


async def test_a_registry_that_does_not_answer_is_an_error() -> None:
    with FakeRegistry() as registry:
        registry.status = 500
        (found,) = await examine(Settings(registry=registry.url), rules("a"))
    assert (found.check, found.level) == ("registry.reachable", Level.ERROR)
    assert "FENCEPOST_REGISTRY" in found.change


async def test_without_a_registry_nothing_is_checked() -> None:
    none: list[Finding] = []
    assert await examine(Settings(), rules("a")) == none
