"""The file of silences, and the kinds of --fail-on: each mistake is a line that says what to write."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from service.contract import SettingsError
from spark import silences
from spark.errors import CannotRun
from spark.rules.current_findings import BY_RULE, with_silence
from spark.rules.kinds import KINDS, kinds_of
from spark.silences import SILENCES_MAX, Silence, parse, read

GOOD = """# known
[[silences]]
finding = "client_duplicate:0f1e2d3c4b5a6978"
until = 2026-12-24
reason = " the importer: OPS-123 "

[[silences]]
finding = "unkeyed::orders:*"
until = 2026-12-24T18:00:00.5+01:00
reason = "a mirror"
"""


def test_a_silence_ends_with_its_day_in_utc_or_at_its_time() -> None:
    day, moment = parse(GOOD, "s.toml")
    assert day == Silence("client_duplicate:0f1e2d3c4b5a6978", 1_798_156_800_000, "the importer: OPS-123")
    assert (day.is_active(day.until_ms - 1), day.is_active(day.until_ms)) == (True, False)
    assert moment.until_ms == 1_798_131_600_500
    assert (day.is_glob, moment.is_glob) == (False, True)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("silences = [1]", "s.toml:1: silences: write [[silences]], once for each finding"),
        ("\n[[silence]]\nfinding = 1", "s.toml:2: silence: no such section; write [[silences]]"),
        ("[[silences]", "s.toml: Expected ']]' at the end of an array declaration"),
        (GOOD.replace("until = 2026-12-24\n", ""), "s.toml:2: until: write a day, as 2026-12-24, or a time with its"),
        (GOOD.replace("+01:00", ""), "s.toml:9: until: write a day, as 2026-12-24, or a time with its offset"),
        (GOOD.replace("2026-12-24T", "9999-12-24T"), "s.toml:9: until: write a day"),
        (GOOD.replace('"unkeyed::orders:*"', '"*"'), "s.toml:8: finding: write a finding_id of report.json, or its"),
        (GOOD.replace('"unkeyed::orders:*"', "7"), "s.toml:8: finding: write a finding_id of report.json, or its kind"),
        (GOOD.replace('"a mirror"', '""'), "s.toml:10: reason: write a line of at most 500 characters"),
        (GOOD.replace('"a mirror"', '"a\\nb"'), "s.toml:10: reason: write a line of at most 500 characters"),
        (GOOD + "topic = 'orders'", "s.toml:11: topic: no such setting; write finding, until and reason"),
        (GOOD * (SILENCES_MAX // 2) + GOOD, "s.toml:5002: silences: write at most 1000; a glob is of several"),
    ],
)
def test_a_mistake_is_one_line_with_its_line_number(text: str, line: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse(text, "s.toml")
    (shown,) = str(raised.value).splitlines()
    assert shown.startswith(line)


def test_many_silences_are_read_in_one_pass() -> None:
    assert len(parse(GOOD * (SILENCES_MAX // 2), "s.toml")) == SILENCES_MAX


def test_as_many_globs_as_a_file_may_have_are_compared_with_each_finding(spark: SparkSession) -> None:
    """The first glob that names a finding counts, an exact silence before any, and all before the rule of the topic."""
    globs = [f"lost:{nth}*" for nth in range(SILENCES_MAX - 2)]
    many = [Silence(finding, 1, "known") for finding in (*globs, "lost:1*", "lost:13")]
    finding_ids = ["lost:0", "lost:13", "lost:16", "lost:999", "lost:x", "stuck:1"]
    rows = [(finding_id, finding_id.partition(":")[0], "t") for finding_id in finding_ids]
    found = spark.createDataFrame(rows, "finding_id string, kind string, topic string")
    silenced = with_silence(found, many, {"t": ["stuck", "lost"]}).collect()
    assert [row["silence"] for row in silenced] == [0, SILENCES_MAX - 1, 1, 9, BY_RULE, BY_RULE]


def test_no_file_has_no_silences_and_a_missing_one_is_named(tmp_path: Path) -> None:
    assert read("") == ()
    with pytest.raises(SettingsError, match=r"--silences '.*none' cannot be read: .*; give the path of a TOML file"):
        silences.read(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        ((), tuple(KINDS)),
        (("lost", "duplicate"), ("duplicate", "lost")),
        (
            ("error", "stuck"),
            tuple(name for name, kind in KINDS.items() if kind.severity == "error" or name == "stuck"),
        ),
    ],
)
def test_kinds_are_named_by_themselves_or_by_their_severity(names: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    assert kinds_of("--fail-on", names) == kinds


def test_an_unknown_kind_is_named_with_those_that_there_are() -> None:
    with pytest.raises(CannotRun, match=r"--fail-on 'losst' is no kind of finding: write duplicate, .*, or error, w"):
        kinds_of("--fail-on", ("lost", "losst"))
