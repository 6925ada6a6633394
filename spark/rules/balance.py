"""The balance over ids: sums by hour, carried over from run to run, and the line that must close."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from spark.errors import CannotRun
from spark.rules.classify import CATEGORIES
from spark.rules.findings import SUMS
from spark.tables.hours import text_at, text_of

Counts = dict[str, int]
ByTopic = dict[str, Counts]
ByHour = dict[str, ByTopic]
RecordCounts = dict[str, dict[str, Counts]]
"""Records by hour, topic and partition (as text, for JSON)."""

_PARTS: Final = ("accepted", *CATEGORIES)


@dataclass
class Balance:
    """Counts (findings.SUMS) by hour (`yyyy-MM-dd HH:mm:ss`, UTC) and topic; zeros are left out.

    `adjustment` is added to the hours, so that an id with rows in several hours counts once. The adjustment is valid
    only for the hours as they were when it was computed: if one of its hours is counted again, the whole adjustment is
    dropped, and such ids count in each of their hours until the next pass over all ids.
    `record_counts`: records by hour, topic and partition.
    `late_hours`: hours that left the window with open verdicts, or before their records were read, and the time (ms) of
    the last run that may have decided these verdicts; kept for a window.
    `evidence_changed`: since the hours were counted, the logs prove something else (run_plan.evidence_changed), and no
    pass over all ids has been made.
    `open_ids`: the last pass over all ids has judged an id with rows in several hours whose verdict may change by time
    alone.
    """

    hours: ByHour = field(default_factory=dict)
    adjustment: ByHour = field(default_factory=dict)
    record_counts: RecordCounts = field(default_factory=dict)
    late_hours: dict[str, int] = field(default_factory=dict)
    evidence_changed: bool = False
    open_ids: bool = False

    @classmethod
    def of(cls, summary: Mapping[str, Any] | None) -> "Balance":
        """Read the balance (`document`) of the last finished run."""
        if summary is None:
            return cls()
        hours, adjustment, counts, late_hours = (
            copy.deepcopy(summary.get(name, {})) for name in ("hours", "adjustment", "record_counts", "late_hours")
        )
        evidence_changed = summary.get("evidence_changed", False)
        # Earlier versions did not store whether the verdict about any such id was open.
        return cls(hours, adjustment, counts, late_hours, evidence_changed, summary.get("open_ids", True))

    def document(self) -> dict[str, Any]:
        """Return the balance as the next run reads it."""
        return {
            "hours": self.hours,
            "adjustment": self.adjustment,
            "record_counts": self.record_counts,
            "late_hours": self.late_hours,
            "evidence_changed": self.evidence_changed,
            "open_ids": self.open_ids,
        }

    def open_hours(self) -> set[str]:
        """Return the hours with verdicts that may change by time alone."""
        return {hour for hour, topics in self.hours.items() if any(counts.get("open") for counts in topics.values())}

    def decided_late(self, since_ms: int) -> set[str]:
        """Return the hours whose findings are in the reports of a window from `since_ms` on because they are late."""
        late = {hour for hour, decided_ms in self.late_hours.items() if decided_ms >= since_ms}
        return late - self.open_hours()

    def note_late_hours(self, since_ms: int, frozen_ms: int) -> None:
        """Note the hours before the window (`since_ms`) whose verdicts are open until this run (`frozen_ms`)."""
        first_hour = text_of(since_ms)
        kept = {hour: decided_ms for hour, decided_ms in self.late_hours.items() if decided_ms >= since_ms}
        self.late_hours = kept | dict.fromkeys((hour for hour in self.open_hours() if hour < first_hour), frozen_ms)

    def note_read_late(self, hours: Iterable[str], frozen_ms: int) -> None:
        """Note hours before the window whose records this run (`frozen_ms`) was the first to read."""
        self.late_hours |= dict.fromkeys(hours, frozen_ms)

    def replace(self, hours: Iterable[str], rows: Iterable[Any], double_counted: Iterable[Any] = ()) -> None:
        """Replace the counts of these hours by new ones (rows of findings.sums), less the `double_counted` ones."""
        for hour in hours:
            self.hours.pop(hour, None)
            if hour in self.adjustment:
                self.adjustment = {}
        _add(self.hours, rows, 1)
        _add(self.hours, double_counted, -1)

    def replace_record_counts(self, hours: Iterable[str], rows: Iterable[Any]) -> None:
        """Replace the record counts of these hours by new ones (rows of record_counts)."""
        for hour in hours:
            self.record_counts.pop(hour, None)
        for row in rows:
            topics = self.record_counts.setdefault(row["hour"], {})
            topics.setdefault(row["topic"], {})[str(row["partition"])] = int(row["records"])

    def adjust(self, judged_per_hour: Iterable[Any], judged_per_id: Iterable[Any]) -> None:
        """Make the ids of these rows (findings.sums) count once, not once for each of their hours."""
        self.adjustment = {}
        self.open_ids = any(row["open"] for row in judged_per_id)
        _add(self.adjustment, judged_per_hour, -1)
        _add(self.adjustment, judged_per_id, 1)

    def since(self, first_hour: str) -> ByHour:
        """Return the counts of `first_hour` and all later hours, with the adjustment."""
        found: ByHour = {}
        for part in (self.hours, self.adjustment):
            for hour, topics in part.items():
                if hour >= first_hour:
                    for topic, counts in topics.items():
                        _sum(found.setdefault(hour, {}).setdefault(topic, {}), counts)
        return found

    def delete_before(self, first_hour: str) -> None:
        """Drop the hours before `first_hour`, also those with open verdicts."""
        for part in (self.hours, self.adjustment):
            for hour in [hour for hour in part if hour < first_hour]:
                del part[hour]

    def closes(self, first_hour: str) -> bool:
        """Check whether the balance of `first_hour` and all later hours closes."""
        return _closes(_line(by_topic(self.since(first_hour))))

    def close(self, first_hour: str) -> "Closed":
        """Drop the hours before `first_hour`, except those with open verdicts, and sum up the hours since.

        CannotRun if the balance does not close.
        """
        kept = self.open_hours()
        self.hours = {hour: topics for hour, topics in self.hours.items() if hour >= first_hour or hour in kept}
        self.adjustment = {hour: topics for hour, topics in self.adjustment.items() if hour >= first_hour}
        self.record_counts = {hour: topics for hour, topics in self.record_counts.items() if hour >= first_hour}
        topics = by_topic(self.since(first_hour))
        line = _line(topics)
        if not _closes(line):
            parts_text = ", ".join(f"{name} {line[name]}" for name in _PARTS)
            raise CannotRun(
                f"the balance does not close: {parts_text}; this is a fault of the audit: keep the lake as it is, open "
                "an issue, and continue with --lake at a new folder and --replace-findings"
            )
        return Closed(topics, line, self.record_counts)


class Closed(NamedTuple):
    """A balance that closes: sums (findings.SUMS) by topic, its line (with `phantom` and `records`), record counts."""

    topics: ByTopic
    line: Counts
    record_counts: RecordCounts


def by_topic(hours: ByHour) -> ByTopic:
    """Sum up the hours by topic, in alphabetical order."""
    found: ByTopic = {}
    for topics in hours.values():
        for topic, counts in topics.items():
            _sum(found.setdefault(topic, {}), counts)
    return {topic: {name: found[topic].get(name, 0) for name in SUMS} for topic in sorted(found)}


def _line(topics: ByTopic) -> Counts:
    """Return the balance over all topics: its line, `phantom` and `records`."""
    total: Counts = {}
    for counts in topics.values():
        _sum(total, counts)
    return {name: total.get(name, 0) for name in (*_PARTS, "phantom", "records")}


def _closes(line: Counts) -> bool:
    """Check whether the categories of a line add up to what was accepted, and none is negative."""
    parts = [line[name] for name in CATEGORIES]
    return line["accepted"] == sum(parts) and min(parts) >= 0


def _add(into: ByHour, rows: Iterable[Any], sign: int) -> None:
    """Add rows of findings.sums to `into`, each count times `sign`."""
    for row in rows:
        counts = {name: sign * int(row[name]) for name in SUMS if row[name]}
        hour = text_at(row["accepted_hour"])
        _sum(into.setdefault(hour, {}).setdefault(row["topic"], {}), counts)


def _sum(into: Counts, counts: Mapping[str, int]) -> None:
    """Add `counts` to `into`."""
    for name, count in counts.items():
        into[name] = into.get(name, 0) + count
