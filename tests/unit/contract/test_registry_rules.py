"""Tests the `registry` of a topic's rule: which schemas it names, and a line for each mistake."""

import pytest

from service.cli.check_registry import subjects_of
from service.contract import RegistryRule, Rules, SchemaRule, SettingsError

TABLE = '[[topics]]\npattern = "orders"\n'


def rule(registry: str) -> RegistryRule | None:
    return Rules.parse(f"{TABLE}registry = {registry}").rule("orders").registry


@pytest.mark.parametrize(
    ("registry", "key", "value"),
    [
        ("{ value = {} }", None, SchemaRule()),
        ('{ value = { version = "latest" } }', None, SchemaRule()),
        ("{ key = { version = 3 } }", SchemaRule(version=3), None),
        (
            '{ key = { subject = "k é" }, value = { strategy = "record", record = "shop.Order", message = "a.B" } }',
            SchemaRule(subject="k é"),
            SchemaRule("record", "shop.Order", message="a.B"),
        ),
    ],
)
def test_schemas_of_rules(registry: str, key: SchemaRule | None, value: SchemaRule | None) -> None:
    assert rule(registry) == RegistryRule(key, value)
    assert Rules.parse(TABLE).rule("orders").registry is None


@pytest.mark.parametrize(
    ("registry", "remedy"),
    [
        ("{}", "write key, value or both"),
        ("[]", "write key, value or both"),
        ('"a"', "write key, value or both"),
        ("{ values = {} }", "write key, value or both"),
        ("{ value = 1 }", "write key, value or both"),
        ("{ value = { latest = true } }", "value: latest: no such setting"),
        ('{ value = { strategy = "topics" } }', "value: strategy: write one of topic, record, topic-record"),
        ('{ value = { strategy = ["topic"] } }', "value: strategy: write one of"),
        ('{ value = { strategy = "record" } }', "value: record: the strategies record and topic-record, only"),
        ('{ value = { record = "a" } }', "value: record: the strategies"),
        ('{ value = { strategy = "record", record = "a-b" } }', "value: record: the strategies"),
        ('{ value = { strategy = "record", record = 1 } }', "value: record: the strategies"),
        ('{ value = { subject = "a", strategy = "topic" } }', "value: subject: write it, or strategy and record"),
        ('{ value = { subject = ".." } }', "value: subject: write 1 to 500"),
        ('{ value = { subject = "" } }', "value: subject: write 1 to 500"),
        ('{ value = { subject = "a\\n" } }', "value: subject: write 1 to 500"),
        ("{ value = { subject = 1 } }", "value: subject: write 1 to 500"),
        ("{ key = { version = 0 } }", 'key: version: write "latest"'),
        ("{ key = { version = true } }", 'key: version: write "latest"'),
        ('{ key = { version = "1" } }', 'key: version: write "latest"'),
        ("{ key = { version = 99999999999 } }", 'key: version: write "latest"'),
        ('{ value = { message = "a b" } }', "value: message: write the full name"),
    ],
)
def test_a_mistake_is_a_line(registry: str, remedy: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(f"{TABLE}registry = {registry}", "rules.toml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"rules.toml:3: registry: {remedy}")


def test_values_have_one_schema() -> None:
    with pytest.raises(SettingsError, match=r"write registry.value or schema"):
        Rules.parse(TABLE + 'schema = "a.json"\nregistry = { value = {} }')
    Rules.parse(TABLE + 'schema = "a.json"\nregistry = { key = {} }')


@pytest.mark.parametrize(
    ("schema", "subject"),
    [
        (SchemaRule(), "orders-key"),
        (SchemaRule("record", "a.B"), "a.B"),
        (SchemaRule("topic-record", "a.B"), "orders-a.B"),
        (SchemaRule(subject="s"), "s"),
    ],
)
def test_subjects(schema: SchemaRule, subject: str) -> None:
    assert schema.subject_of("orders", "key") == subject


def test_subjects_that_are_known_without_a_topic() -> None:
    text = """
[[topics]]
pattern = "orders"
registry = { key = { subject = "k" }, value = { version = 2 } }
[[topics]]
pattern = "a.*"
registry = { key = { subject = "k" }, value = {} }
[[topics]]
pattern = "b.*"
registry.value = { strategy = "record", record = "n.R" }
[[topics]]
pattern = "c"
"""
    assert [*subjects_of(Rules.parse(text))] == [("k", None), ("orders-value", 2), ("n.R", None)]
