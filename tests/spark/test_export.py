"""The command `findings`: the current findings as JSON, CSV and Parquet."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark.__main__ import main
from spark.cli.command_line import parse_findings
from spark.engine import session
from spark.queries import export
from spark.rules import current_findings
from spark.rules.findings import HOUR
from spark.tables import schemas
from spark.tables.lake import Lake
from tests.spark.rows import NOW_MS
from tests.spark.scans import reads
from tests.spark.times import DAY_MS, HOUR_MS

KEY = 'a "key", with\nlines'


@pytest.fixture(scope="module")
def root(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A lake with four findings, one of them from before the window of the last run."""
    folder = str(tmp_path_factory.mktemp("export") / "lake")
    lake = Lake(spark, folder)
    coordinates = [{"topic": "orders.eu", "partition": 0, "offset": 7}]
    found: dict[str, Any] = {"scope": HOUR, "count": 1, "last_ms": NOW_MS, "coordinates": coordinates, "run": 1}
    rows = [
        {**found, "kind": "lost", "id": b"l" * 16, "key": KEY, "topic": "orders.eu"},
        {**found, "kind": "stuck", "id": b"s" * 16, "topic": "orders.us", "last_ms": NOW_MS - 3 * HOUR_MS},
        {**found, "kind": "unkeyed", "topic": "payments", "partition": 3, "first_offset": 1, "last_offset": 9},
        {**found, "kind": "lost", "id": b"o" * 16, "topic": "orders.eu", "last_ms": NOW_MS - 9 * HOUR_MS},
    ]
    lake.append_once("findings", spark.createDataFrame(rows, schemas.of("findings")), 1)
    report = json.dumps({"run": {"window_from": "2023-11-14T17:00:00.000Z"}})
    row = {"run": 1, "frozen_ms": NOW_MS, "verdict": "findings", "summary": "{}", "report": report}
    lake.append_once("runs", spark.createDataFrame([row], schemas.of("runs")), 1)
    return folder


@pytest.fixture
def printed(spark: SparkSession, root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the function that carries out the command, and returns its exit status, output and errors."""

    def carry_out(*arguments: str, root: str = root) -> tuple[int, str, str]:
        monkeypatch.setattr("spark.__main__.open_session", lambda **_: spark)
        monkeypatch.setattr("sys.argv", ["spark", "findings", "--lake", root, *arguments])
        status = main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return carry_out


def names(text: str) -> list[str]:
    return [json.loads(line)["finding_id"] for line in text.splitlines()]


LOST, STUCK, OLD = (f"{kind}:{char * 16}" for kind, char in (("lost", "6c"), ("stuck", "73"), ("lost", "6f")))
UNKEYED = "unkeyed::payments:3"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), [LOST, UNKEYED, STUCK]),
        (("--kind", "error"), [LOST]),
        (("--kind", "stuck,lost", "--topic", "*.us,none"), [STUCK]),
        (("--since", "2023-11-14T22:13:20"), [LOST, UNKEYED]),
        (("--since", "2023-11-14"), [OLD, LOST, UNKEYED, STUCK]),
    ],
)
def test_the_findings_of_the_last_window_or_since_a_time_are_selected(
    printed: Any, arguments: tuple[str, ...], found: list[str]
) -> None:
    status, out, _ = printed(*arguments)
    assert (status, sorted(names(out))) == (0, sorted(found))


def test_csv_has_a_line_for_each_finding_with_the_fields_of_the_report(printed: Any) -> None:
    _, out, _ = printed("--format", "csv")
    header, *rows = csv.reader(out.splitlines(keepends=True))
    assert tuple(header) == current_findings.FIELDS
    first = dict(zip(header, rows[0], strict=True))
    assert (first["finding_id"], first["key"], first["count"], first["fingerprint"]) == (LOST, KEY, "1", "")
    assert json.loads(first["coordinates"])[0]["offset"] == 7
    assert len(rows) == 3


def test_parquet_goes_into_a_new_folder_only(spark: SparkSession, printed: Any, tmp_path: Path) -> None:
    output = str(tmp_path / "found")
    assert printed("--format", "parquet", "--output", output)[:2] == (0, "")
    written = spark.read.parquet(output)
    assert (tuple(written.columns), written.count()) == (current_findings.FIELDS, 3)
    status, _, errors = printed("--format", "parquet", "--output", output)
    assert (status, errors) == (2, f"cannot run: --output {output} exists: give a new folder\n")


def test_a_lake_without_a_finished_run_and_an_unknown_kind_are_refused(printed: Any, tmp_path: Path) -> None:
    status, _, errors = printed(root=str(tmp_path))
    assert (status, errors) == (2, f"cannot run: --lake {tmp_path} has no finished run: give the --lake of a run\n")
    assert "--kind 'losst' is no kind of finding: write duplicate" in printed("--kind", "losst")[2]


def test_the_window_of_the_last_run_is_read_from_the_file_of_that_run(spark: SparkSession, tmp_path: Path) -> None:
    """The table of runs is not compacted: with --follow it has a file for each of thousands of runs."""
    lake = Lake(spark, str(tmp_path))
    for run in range(1, 5):
        report = json.dumps({"run": {"window_from": f"1970-01-0{run}T00:00:00.000Z"}})
        row = {"run": run, "frozen_ms": NOW_MS, "verdict": "clean", "summary": "{}", "report": report}
        lake.append_once("runs", spark.createDataFrame([row], schemas.of("runs")), run)
    with session.settings(spark, {"spark.sql.maxMetadataStringLength": "1000"}):
        assert export.since(lake, None) == 3 * DAY_MS
    assert reads(spark, tmp_path, "runs")["number of files read"] == 1


@pytest.mark.parametrize(
    ("text", "ms"), [("24h", 76_000), ("1970-01-01T00:01:00+00:01", 0), ("1970-01-02", 86_400_000)]
)
def test_since_is_a_time_or_an_age(text: str, ms: int) -> None:
    assert parse_findings(["--lake", "l", "--since", text], 86_400_000 + 76_000).since_ms == ms


@pytest.mark.parametrize("text", ["999999d", "0001-01-01T00:00", "0001-01-01T00:00+14:00", "1969-12-31"])
def test_since_is_not_before_the_first_time_that_a_record_can_have(text: str) -> None:
    """An hour before the year 1000 is no literal of Spark, one before the year 1 no time of Python."""
    assert parse_findings(["--lake", "l", "--since", text], 86_400_000).since_ms == 0


@pytest.mark.parametrize("text", ["yesterday", "7", "7w", "2023-13-01"])
def test_a_wrong_time_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_findings(["--lake", "l", "--since", text], 0)
    assert f"argument --since: {text!r} is no time, as 2026-12-24T18:00, and no age, as 7d" in capsys.readouterr().err
