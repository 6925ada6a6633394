"""Tests the `[[sinks]]` tables about mirrors: the cluster's settings by file, and a line for each mistake."""

from pathlib import Path

import pytest

from service.contract import Rules, SettingsError
from tests.unit.contract.test_sink_rules import DELTA

MIRROR = """[[sinks]]
name = "dr"
topics = ["orders.*"]
format = "kafka"
late_s = 900
kafka = "kafka-b:9093"
mirror_topic = "primary.{topic}"
kafka_security_protocol = "SASL_PLAINTEXT"
kafka_sasl_mechanism = "SCRAM-SHA-512"
kafka_sasl_username = "auditor"
kafka_sasl_password_file = "dr.password"
"""


def test_a_mirror_has_the_settings_of_its_cluster_with_files_beside_the_rules(tmp_path: Path) -> None:
    (tmp_path / "dr.password").write_text("a secret\n")
    (mirror,) = Rules.parse(MIRROR, str(tmp_path / "rules.toml")).sinks
    assert (mirror.is_mirror, mirror.has_ids, mirror.copy_of("orders.eu")) == (True, True, "primary.orders.eu")
    settings = mirror.kafka_settings()
    assert (settings.kafka, settings.kafka_security_protocol) == ("kafka-b:9093", "SASL_PLAINTEXT")
    assert (settings.kafka_sasl_username, settings.kafka_sasl_password) == ("auditor", "a secret")
    assert "a secret" not in repr(mirror)


def test_a_copy_has_the_name_of_its_topic_by_default() -> None:
    (mirror,) = Rules.parse(MIRROR.replace('mirror_topic = "primary.{topic}"', "")).sinks
    assert mirror.copy_of("orders.eu") == "orders.eu"


def test_the_service_reads_no_file_of_a_mirror_and_the_audit_says_which_it_lacks() -> None:
    tls = MIRROR.replace("SASL_PLAINTEXT", "SASL_SSL") + 'kafka_ssl_cafile = "ca.pem"\n'
    (mirror,) = Rules.parse(tls, "etc/rules.toml").sinks
    with pytest.raises(SettingsError) as caught:
        mirror.kafka_settings()
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("kafka_sasl_password_file='etc/dr.password' cannot be read")
    assert any(line.startswith("kafka_ssl_cafile") for line in lines), lines
    assert "FENCEPOST" not in str(caught.value)


def test_other_servers_or_another_user_are_no_other_definition() -> None:
    (one,), (other,), (third,) = (
        Rules.parse(text).sinks
        for text in (MIRROR, MIRROR.replace("kafka-b", "kafka-c"), MIRROR.replace("primary.", "other."))
    )
    assert one.definition == other.definition != third.definition


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('kafka = "kafka-b:9093"', "", "1: kafka: write the bootstrap servers of the mirror's cluster"),
        ("kafka-b:9093", "kafka-b", "6: kafka: kafka='kafka-b' is wrong: set "),
        ("primary.{topic}", "primary", "7: mirror_topic: write the name of a topic's copy with {topic} in it"),
        ("primary.{topic}", "a b {topic}", "7: mirror_topic: write the name"),
        ("SASL_PLAINTEXT", "TLS", "8: kafka_security_protocol: kafka_security_protocol='TLS' is wrong: set one of "),
        ('"SCRAM-SHA-512"', "7", "9: kafka_sasl_mechanism: write a text"),
        (
            'kafka_sasl_username = "auditor"',
            "",
            "8: kafka_security_protocol: kafka_security_protocol=SASL_PLAINTEXT needs kafka_sasl_username: set it",
        ),
        (
            'kafka_sasl_password_file = "dr.password"',
            "",
            "8: kafka_security_protocol: kafka_security_protocol=SASL_PLAINTEXT needs kafka_sasl_password_file: set it",
        ),
        ("kafka_sasl_password_file", "kafka_sasl_password", "11: kafka_sasl_password: a secret would come into logs"),
        ("late_s = 900", 'late_s = 900\nid = "event"', "6: id: kafka has no such setting; leave it out"),
        ("late_s = 900", "late_s = 900\nkafka_ssl_check_hostname = 1", "6: kafka_ssl_check_hostname: write true or"),
        ("late_s = 900", "late_s = 900\nkafka_acks = 1", "6: kafka_acks: no such setting; write name, topics, format"),
        ("late_s = 900", "", "1: late_s: write seconds, from 1 to 2592000"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_the_remedy(before: str, after: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(MIRROR.replace(before, after))
    assert f"rules:{message}" in str(caught.value)
    assert "dr.password" not in str(caught.value).replace("write kafka_sasl_password_file", "")


@pytest.mark.parametrize("name", ["kafka", "mirror_topic", "kafka_sasl_password"])
def test_a_table_has_no_settings_of_a_mirror(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"^rules:9: {name}: delta has no such setting; leave it out$"):
        Rules.parse(f'{DELTA}{name} = "a"\n')
