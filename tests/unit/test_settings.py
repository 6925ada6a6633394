"""The settings: defaults as the contract has them, a line for each mistake, and the mistakes that only two make."""

from pathlib import Path

import pytest

from service.settings import Settings
from service.shared import Guarantee, Rules, SettingsError


def read(**settings: str) -> Settings:
    return Settings.from_env({f"FENCEPOST_{name.upper()}": text for name, text in settings.items()})


def lines(**settings: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(**settings)
    return str(caught.value).splitlines()


def test_defaults() -> None:
    settings = read()
    assert settings == Settings(
        kafka="127.0.0.1:9092",
        redis="redis://127.0.0.1:6379/0",
        namespace="fencepost",
        host="127.0.0.1",
        port=8000,
        instance="",
        slots=4,
        slots_max=64,
        key_ttl_s=86_400,
        transaction_timeout_ms=10_000,
        request_timeout_ms=10_000,
        lease_ttl_ms=3_000,
        queue_events_max=20_000,
        queue_bytes_max=64 * 1024 * 1024,
        body_bytes_max=8 * 1024 * 1024,
        rules="",
    )
    assert settings.name == "127.0.0.1:8000"


def test_what_is_set_is_read_and_what_is_empty_is_not() -> None:
    settings = read(port="9000", slots="2", namespace="a.b_c-d", instance="host-1:2", kafka="a:1,b:2", redis="")
    assert (settings.port, settings.slots, settings.namespace, settings.name) == (9000, 2, "a.b_c-d", "host-1:2")
    assert settings.kafka == "a:1,b:2"
    assert settings.redis == "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kafka", "localhost"),
        ("kafka", "localhost:"),
        ("kafka", "a:1,"),
        ("kafka", "a:99999"),
        ("redis", "localhost:6379"),
        ("redis", "http://localhost"),
        ("redis", "redis://"),
        ("instance", "a b"),
        ("instance", "x" * 65),
        ("instance", 'a"b'),
        ("namespace", "a/b"),
        ("namespace", "ü"),
        ("port", "0"),
        ("port", "65536"),
        ("port", "http"),
        ("slots", "0"),
        ("slots", "4097"),
        ("slots", "-1"),
        ("slots", "1.5"),
        ("slots_max", "0"),
        ("key_ttl_s", "0"),
        ("transaction_timeout_ms", "999"),
        ("transaction_timeout_ms", "900001"),
        ("request_timeout_ms", "99"),
        ("lease_ttl_ms", "299"),
        ("lease_ttl_ms", "60001"),
        ("queue_events_max", "0"),
        ("queue_bytes_max", "-5"),
        ("body_bytes_max", "10"),
    ],
)
def test_each_mistake_has_a_line_that_says_what_to_set(name: str, text: str) -> None:
    (line,) = lines(**{name: text})
    assert line.startswith(f"FENCEPOST_{name.upper()}={text!r} is wrong: set ")
    assert len(line) > len(f"FENCEPOST_{name.upper()}={text!r} is wrong: set ") + 5


def test_all_mistakes_are_told_at_once() -> None:
    assert len(lines(port="x", slots="x", kafka="x")) == 3


def test_a_key_must_outlive_its_write() -> None:
    (line,) = lines(key_ttl_s="199")
    assert line.startswith("FENCEPOST_KEY_TTL_S=199 is too short")
    assert "set 200 or more" in line
    assert read(key_ttl_s="200").key_ttl_s == 200
    assert read(key_ttl_s="61", request_timeout_ms="5000", transaction_timeout_ms="1000").key_ttl_s == 61


def test_nobody_can_want_more_slots_than_there_are() -> None:
    (line,) = lines(slots="5", slots_max="4")
    assert line == "FENCEPOST_SLOTS=5 is more than FENCEPOST_SLOTS_MAX=4: set FENCEPOST_SLOTS to 4 or less"


def test_a_host_that_makes_no_name_needs_an_instance() -> None:
    (line,) = lines(host="fe80::1%eth0")
    assert line.startswith("FENCEPOST_INSTANCE is needed")
    assert read(host="fe80::1%eth0", instance="a").name == "a"


def test_rules_must_be_a_file(tmp_path: Path) -> None:
    assert any("FENCEPOST_RULES" in line for line in lines(rules=str(tmp_path / "none.toml")))
    file = tmp_path / "rules.toml"
    file.write_text('[[topics]]\npattern = "telemetry.*"\nguarantee = "idempotent"\n')
    rules = Rules.read(read(rules=str(file)).rules)
    assert rules.guarantee("telemetry.cpu") is Guarantee.IDEMPOTENT
    assert rules.guarantee("orders") is Guarantee.EXACTLY_ONCE


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[[topics]]\npattern = "a"\nguarantee = "twice"\n', 3),
        ('[[topics]]\n\nguarantee = "idempotent"\n', 1),
        ('[[topics]]\npattern = "a"\n\n[[topics]]\npattern = "b"\nguarante = "idempotent"\n', 6),
        ('[topic]\npattern = "a"\n', 1),
    ],
)
def test_a_wrong_rule_is_told_by_its_line(text: str, line: int) -> None:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(text, "rules.toml")
    assert str(caught.value).startswith(f"rules.toml:{line}: ")


def test_the_first_rule_that_matches_counts() -> None:
    rules = Rules.parse(
        '[[topics]]\npattern = "a.exact"\n[[topics]]\npattern = "a.*"\nguarantee = "idempotent"\n', "rules.toml"
    )
    assert rules.guarantee("a.exact") is Guarantee.EXACTLY_ONCE
    assert rules.guarantee("a.other") is Guarantee.IDEMPOTENT
    assert rules.guarantee("A.other") is Guarantee.EXACTLY_ONCE
