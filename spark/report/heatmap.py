"""The data of the heat map: records and findings by hour and partition, reduced to the size of a page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from spark.rules.balance import RecordCounts
from spark.rules.record_counts import NO_PARTITION
from spark.tables import hours

COLUMNS_MAX: Final = 96
ROWS_MAX: Final = 32

RowKey = tuple[str, int]
"""Topic and partition (NO_PARTITION: the whole topic)."""
HourCounts = dict[str, int]
"""Records by hour (as text)."""


def drawn(
    records: RecordCounts,
    finding_counts: Iterable[Mapping[str, Any]],
    topics: Iterable[str],
    first_hour: str,
    last_hour: str,
) -> dict[str, Any]:
    """Build the map of report.json, from the first to the last hour with records or findings in the window.

    `records` are Balance.record_counts, `finding_counts` rows of current_findings.finding_counts. The window begins at
    `first_hour`. Records with a later time than `last_hour`, in which the run froze the ends, count in that
    hour: a single wrong clock would stretch the map over years.
    """
    audited = set(topics)
    delivered = _delivered(records, audited, first_hour, last_hour)
    of_findings = _records_of_findings(finding_counts, audited, first_hour, last_hour)
    with_counts = sorted({hour for counts in (*delivered.values(), *of_findings.values()) for hour in counts})
    if not with_counts:
        return {"from": None, "hours_a_column": 1, "columns": 0, "rows": [], "partitions_folded": 0}
    start, end = hours.at(with_counts[0]), hours.at(with_counts[-1])
    span = int((end - start) / timedelta(hours=1)) + 1
    step = -(-span // COLUMNS_MAX)
    columns = -(-span // step)
    column_of = {hour: _hours_between(start, hour) // step for hour in with_counts}
    shown, folded = _shown(delivered, of_findings)
    rows = [
        {
            "topic": topic,
            "partition": partition,
            "records": _summed((delivered.get(row, {}) for row in rows_of), columns, column_of),
            "troubled": _summed((of_findings.get(row, {}) for row in rows_of), columns, column_of),
        }
        for topic, partition, rows_of in _lines(shown, folded)
    ]
    return {
        "from": start.isoformat().replace("+00:00", "Z"),
        "hours_a_column": step,
        "columns": columns,
        "rows": rows,
        "partitions_folded": len(folded),
    }


def _delivered(records: RecordCounts, audited: set[str], first_hour: str, last_hour: str) -> dict[RowKey, HourCounts]:
    """Sum up the records of the window by row and hour."""
    found: dict[RowKey, HourCounts] = {}
    for hour, by_topic in records.items():
        if hour < first_hour:
            continue
        for topic in audited & by_topic.keys():
            for partition, count in by_topic[topic].items():
                _add(found.setdefault((topic, int(partition)), {}), min(hour, last_hour), count)
    return found


def _records_of_findings(
    finding_counts: Iterable[Mapping[str, Any]], audited: set[str], first_hour: str, last_hour: str
) -> dict[RowKey, HourCounts]:
    """Sum up the records with findings of the window by row and hour."""
    found: dict[RowKey, HourCounts] = {}
    for row in finding_counts:
        if row["hour"] >= first_hour and row["topic"] in audited:
            map_row = (row["topic"], NO_PARTITION if row["partition"] is None else row["partition"])
            _add(found.setdefault(map_row, {}), min(row["hour"], last_hour), row["records"])
    return found


def _shown(
    delivered: Mapping[RowKey, HourCounts], of_findings: Mapping[RowKey, HourCounts]
) -> tuple[list[RowKey], list[RowKey]]:
    """Split rows into those that are shown, and those folded into one row: most findings and records first."""
    rows = sorted({*delivered, *of_findings})
    if len(rows) <= ROWS_MAX:
        return rows, []
    ranked = sorted(rows, key=lambda row: (-_total(of_findings, row), -_total(delivered, row), row))
    return sorted(ranked[: ROWS_MAX - 1]), ranked[ROWS_MAX - 1 :]


def _lines(
    shown: Iterable[RowKey], folded: Sequence[RowKey]
) -> Iterator[tuple[str | None, int | None, Sequence[RowKey]]]:
    """Yield topic and partition of each line of the map, and the rows that the line adds up; the folded rows make the
    last line, which has neither topic nor partition."""
    for topic, partition in shown:
        yield topic, None if partition == NO_PARTITION else partition, [(topic, partition)]
    if folded:
        yield None, None, folded


def _summed(counts: Iterable[HourCounts], columns: int, column_of: Mapping[str, int]) -> list[int]:
    """Sum up several rows by column."""
    sums = [0] * columns
    for by_hour in counts:
        for hour, count in by_hour.items():
            sums[column_of[hour]] += count
    return sums


def _add(counts: HourCounts, hour: str, count: int) -> None:
    counts[hour] = counts.get(hour, 0) + count


def timeline(
    finding_counts: Iterable[Mapping[str, Any]], kinds: Iterable[str], first_hour: str, last_hour: str
) -> list[dict[str, Any]]:
    """Sum up rows of current_findings.finding_counts by hour, kind and cause; hours as in `drawn`."""
    wanted = set(kinds)
    summed: dict[tuple[str, str, str], int] = {}
    for row in finding_counts:
        if row["kind"] in wanted and row["hour"] >= first_hour:
            name = (min(row["hour"], last_hour), row["kind"], row["cause"] or "")
            summed[name] = summed.get(name, 0) + row["records"]
    return [
        {"hour": _iso(hour), "kind": kind, "cause": cause or None, "records": count}
        for (hour, kind, cause), count in sorted(summed.items())
    ]


def _total(counts: Mapping[RowKey, HourCounts], row: RowKey) -> int:
    return sum(counts.get(row, {}).values())


def _hours_between(start: datetime, hour: str) -> int:
    return int((hours.at(hour) - start) / timedelta(hours=1))


def _iso(hour: str) -> str:
    return hour.replace(" ", "T") + "Z"
