"""Tests the `[[sinks]]` tables of the rules, and a line for each mistake."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from service.contract import Rules, SettingsError, SinkRule

DELTA = """[[sinks]]
name = "lakehouse"
topics = ["orders.*", "returns"]
format = "delta"
path = "s3a://warehouse/orders"
id = "event_id"
event_time = "accepted_at"
late_s = 900
"""
JDBC = """[[sinks]]
name = "warehouse"
topics = ["orders"]
format = "jdbc"
url = "jdbc:postgresql://db:5432/warehouse"
table = "public.orders"
user = "auditor"
password_file = "warehouse.password"
coordinates = ["topic", "kafka_partition", "kafka_offset"]
event_time = "accepted_at"
arrived = "loaded_at"
late_s = 3600
margin_s = 60
exclusive = true
since = 2026-01-31T00:00:00Z
"""


def test_sinks_are_read_with_the_files_beside_the_rules() -> None:
    lakehouse, warehouse = Rules.parse(DELTA + JDBC, "etc/rules.toml").sinks
    assert lakehouse == SinkRule(
        "lakehouse",
        ("orders.*", "returns"),
        "delta",
        "accepted_at",
        900,
        path="s3a://warehouse/orders",
        id="event_id",
    )
    assert (lakehouse.expressions, lakehouse.margin_s, lakehouse.exclusive, lakehouse.since_ms) == (
        ("event_id",),
        3600,
        False,
        0,
    )
    assert Path(warehouse.password_file) == Path("etc/warehouse.password")
    assert warehouse.expressions == ("topic", "kafka_partition", "kafka_offset")
    assert warehouse.since_ms == int(datetime(2026, 1, 31, tzinfo=UTC).timestamp() * 1000)


def test_a_sink_expects_the_topics_of_its_globs() -> None:
    (lakehouse,) = Rules.parse(DELTA).sinks
    assert [name for name in ("orders", "orders.eu", "returns", "returns.eu") if lakehouse.expects(name)] == [
        "orders.eu",
        "returns",
    ]


def test_another_password_is_no_other_definition() -> None:
    (one,), (other,), (third,) = (
        Rules.parse(text).sinks
        for text in (JDBC, JDBC.replace("warehouse.password", "new"), JDBC.replace("3600", "3601"))
    )
    assert one.definition == other.definition != third.definition


def test_a_setting_that_was_added_later_changes_no_definition_without_it() -> None:
    """Another definition would let the next run compare each hour again, and forget what was missing."""
    (lakehouse,) = Rules.parse(DELTA).sinks
    assert lakehouse.definition == "faeb7769ca9042e127c3b5d45a44e7da"
    assert replace(lakehouse, catalog_file="c.toml").definition != lakehouse.definition


def test_an_iceberg_table_is_named_by_its_catalog_or_its_metadata() -> None:
    table, catalog, path = 'table = "sales.orders"', 'catalog_file = "c.toml"', 'path = "s3://w/v7.metadata.json"'

    def parsed(*lines: str) -> SinkRule:
        text = DELTA.replace('format = "delta"', 'format = "iceberg"').replace('path = "s3a://warehouse/orders"\n', "")
        (sink,) = Rules.parse("\n".join([text, *lines]), "etc/rules.toml").sinks
        return sink

    assert Path(parsed(table, catalog).catalog_file) == Path("etc/c.toml")
    assert (parsed(path).path, parsed(path, catalog).table) == ("s3://w/v7.metadata.json", "")
    for lines, message in (
        ((), "1: table: write table = "),
        ((table, path, catalog), "9: table: write table = "),
        ((table,), "1: catalog_file: write the file with the properties"),
        ((table, catalog, 'user = "a"'), "11: user: iceberg has no such setting"),
    ):
        with pytest.raises(SettingsError, match=f"^etc/rules.toml:{message}"):
            parsed(*lines)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('name = "lakehouse"', 'name = "a b"', "2: name: write 1 to 64 of letters"),
        ('topics = ["orders.*", "returns"]', "topics = []", "3: topics: write names or globs"),
        ('format = "delta"', 'format = "hudi"', "4: format: write one of delta, parquet, jdbc, iceberg"),
        ('format = "delta"', 'format = ["delta"]', "4: format: write one of delta, parquet, jdbc, iceberg"),
        ('path = "s3a://warehouse/orders"', "", "1: path: write a text, as in path = "),
        ('path = "s3a://warehouse/orders"', "path = 7", "5: path: write a text"),
        ('id = "event_id"', "", "1: id: write an expression for the id"),
        ('id = "event_id"', 'id = " "', "6: id: write a column or an expression"),
        ('id = "event_id"', 'coordinates = ["topic"]', "6: coordinates: write three expressions"),
        ('event_time = "accepted_at"', "", "1: event_time: write the name of a column"),
        ('event_time = "accepted_at"', 'event_time = "now() "', "7: event_time: write the name of a column"),
        ("late_s = 900", "", "1: late_s: write seconds, from 1 to 2592000"),
        ("late_s = 900", "late_s = true", "8: late_s: write seconds"),
        ("late_s = 900", "late_s = 900\nmargin_s = -1", "9: margin_s: write seconds, from 0"),
        ("late_s = 900", "late_s = 900\nexclusive = 1", "9: exclusive: write true or false"),
        ("late_s = 900", "late_s = 900\nsince = 2026-01-31T00:00:00", "9: since: write a time with its zone"),
        ("late_s = 900", 'late_s = 900\narrived = ""', "9: arrived: write the name of a column"),
        ("late_s = 900", 'late_s = 900\nuser = "a"', "9: user: delta has no such setting"),
        ("late_s = 900", "late_s = 900\nlate = 1", "9: late: no such setting; write name, topics"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_the_remedy(before: str, after: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"^rules:{message}"):
        Rules.parse(DELTA.replace(before, after))


def test_no_two_sinks_have_one_name() -> None:
    with pytest.raises(SettingsError, match=r"^rules:10: name: another sink has it"):
        Rules.parse(DELTA + DELTA)


@pytest.mark.parametrize(
    "url",
    [
        "jdbc:postgresql://db/w?user=a&password=secret",
        "jdbc:postgresql://a:secret@db/w",
        "jdbc:sqlserver://db;PASSWORD=secret",
        "jdbc:sqlserver://db;encrypt=true;trustStorePassword=secret",
        "jdbc:sqlserver://db;accessToken=secret",
        "jdbc:db2://db:50000/w:user=a;password=secret;",
        "jdbc:oracle:thin:a/secret@//db:1521/w",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^rules:5: url: a password in it would come into logs") as caught:
        Rules.parse(JDBC.replace("jdbc:postgresql://db:5432/warehouse", url))
    assert "secret" not in str(caught.value)


def test_a_url_may_name_files_of_keys() -> None:
    url = "jdbc:postgresql://db:5432/warehouse?sslmode=verify-full&sslkey=/etc/key&sslpasswordcallback=a.B"
    (sink,) = Rules.parse(JDBC.replace("jdbc:postgresql://db:5432/warehouse", url)).sinks
    assert sink.url == url


def test_a_url_of_a_database_is_one_of_jdbc() -> None:
    with pytest.raises(SettingsError, match=r"^rules:5: url: write a URL of JDBC"):
        Rules.parse(JDBC.replace("jdbc:postgresql", "postgresql"))
