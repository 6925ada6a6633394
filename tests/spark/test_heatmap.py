"""The heat map: hours and partitions are reduced to the size of a page, and every record still counts."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from spark.report import charts, heatmap
from spark.rules.balance import Balance, RecordCounts
from spark.rules.findings import SUMS
from spark.tables import hours

START = datetime(2026, 11, 1, tzinfo=UTC)
FIRST = hours.text_at(START)


def _hour(nth: int) -> str:
    return hours.text_at(START + timedelta(hours=nth))


LAST = _hour(1000)


def _finding_count(hour: int, partition: int | None, records: int, **more: str) -> dict[str, object]:
    return {"hour": _hour(hour), "topic": "t", "partition": partition, "records": records, **more}


def test_a_heat_map_without_records_is_empty() -> None:
    chart = heatmap.drawn({}, [], ["t"], FIRST, LAST)
    assert (chart["rows"], chart["columns"]) == ([], 0)
    assert charts.heat_map(chart) == ""


def test_many_hours_share_columns_and_no_record_is_left_out() -> None:
    record_counts: RecordCounts = {_hour(n): {"t": {"0": n}} for n in range(200)} | {_hour(-1): {"t": {"0": 9}}}
    record_counts[_hour(7)]["other"] = {"0": 1}
    chart = heatmap.drawn(record_counts, [_finding_count(199, 0, 3)], ["t"], FIRST, LAST)
    (row,) = chart["rows"]
    assert (chart["hours_a_column"], chart["columns"]) == (3, 67)
    assert sum(row["records"]) == sum(range(200))
    assert row["troubled"] == [0] * 66 + [3]
    assert chart["from"] == "2026-11-01T00:00:00Z"
    drawing = charts.heat_map(chart)
    assert drawing.count('<g class="bad">') == 1
    assert "09 Nov 06:00 and 2 h more: 397 records, 3 in trouble" in drawing


def test_records_dated_later_than_the_run_count_in_the_hour_of_the_run() -> None:
    record_counts: RecordCounts = {_hour(n): {"t": {"0": 1}} for n in (0, 4, 5, 700_000)}
    finding_counts = [_finding_count(n, 0, 1, kind="duplicate", cause="rewrite") for n in (5, 600_000)]
    chart = heatmap.drawn(record_counts, finding_counts, ["t"], FIRST, _hour(5))
    assert [(row["records"], row["troubled"]) for row in chart["rows"]] == [([1, 0, 0, 0, 1, 2], [0, 0, 0, 0, 0, 2])]
    points = heatmap.timeline(finding_counts, ["duplicate"], FIRST, _hour(5))
    assert [(point["hour"], point["records"]) for point in points] == [("2026-11-01T05:00:00Z", 2)]


def test_partitions_beyond_the_limit_share_a_row_and_those_with_findings_have_their_own() -> None:
    record_counts: RecordCounts = {_hour(0): {"t": {str(n): 100 - n for n in range(100)}}}
    chart = heatmap.drawn(record_counts, [_finding_count(0, 99, 1), _finding_count(0, None, 2)], ["t"], FIRST, LAST)
    assert len(chart["rows"]) == heatmap.ROWS_MAX
    assert {row["partition"] for row in chart["rows"] if row["troubled"][0]} == {99, None}
    assert chart["rows"][-1]["topic"] is None
    assert chart["partitions_folded"] == 101 - (heatmap.ROWS_MAX - 1)
    assert sum(sum(row["records"]) for row in chart["rows"]) == sum(range(1, 101))


def test_a_cell_with_more_records_is_never_lighter() -> None:
    shades = [charts.shade(count, 1_000_000) for count in (1, 10, 100, 10_000, 1_000_000)]
    assert shades == sorted(shades)
    assert (shades[0], shades[-1]) == (1, charts.SHADES)
    assert charts.shade(1, 1) == charts.SHADES


def test_the_timeline_counts_the_wanted_kinds_within_the_window() -> None:
    rows = [
        _finding_count(1, 0, 2, kind="duplicate", cause="rewrite"),
        _finding_count(1, 1, 3, kind="duplicate", cause="rewrite"),
        _finding_count(1, 1, 3, kind="lost", cause="ledger"),
        _finding_count(-1, 0, 2, kind="duplicate", cause="rewrite"),
    ]
    assert heatmap.timeline(rows, ["duplicate"], FIRST, LAST) == [
        {"hour": "2026-11-01T01:00:00Z", "kind": "duplicate", "cause": "rewrite", "records": 5}
    ]


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_new_york")
def test_hours_are_counted_in_utc_wherever_the_job_runs() -> None:
    balance = Balance({_hour(0): {"t": {"accepted": 5}}})
    # Spark collects a timestamp without zone, in the time zone of the machine.
    local = datetime.fromtimestamp(START.timestamp())
    row = dict.fromkeys(SUMS, 0) | {"accepted": 7, "accepted_hour": local, "topic": "t"}
    balance.replace([_hour(0)], [row])
    assert balance.hours == {_hour(0): {"t": {"accepted": 7}}}
