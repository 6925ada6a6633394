"""Findings of the doctor: one for each check, passed or not."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

SUBJECTS_SHOWN: Final = 5


class Level(StrEnum):
    """The level of a finding."""

    OK = "ok"  # the check passed
    WARNING = "warning"  # the guarantee holds, but something will be slower, hidden or late
    ERROR = "error"  # the guarantee does not hold, or the service cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: `found` describes the state, `change` what to do (empty if the check passed).

    `check` is the check's name, "<area>.<subject>", and stays the same in later versions.
    """

    check: str
    level: Level
    found: str
    change: str = ""
    subjects: tuple[str, ...] = ()

    @property
    def area(self) -> str:
        return self.check.partition(".")[0]

    @property
    def where(self) -> str:
        """Format the subjects, at most SUBJECTS_SHOWN of them."""
        more = len(self.subjects) - SUBJECTS_SHOWN
        shown = ", ".join(self.subjects[:SUBJECTS_SHOWN])
        return f"{shown} and {more} more" if more > 0 else shown

    def document(self) -> dict[str, Any]:
        """Make the JSON document of the finding."""
        return {
            "check": self.check,
            "level": self.level.value,
            "subjects": list(self.subjects),
            "found": self.found,
            "change": self.change,
        }


def judged(check: str, well: bool, found: str, change: str, otherwise: Level = Level.ERROR) -> Finding:
    """Make a finding of level OK if `well`, else of the other level with what to change."""
    return Finding(check, Level.OK, found) if well else Finding(check, otherwise, found, change)


def grouped(rows: Iterable[tuple[str, Finding]]) -> list[Finding]:
    """Join equal findings about single subjects into findings about all of these subjects."""
    subjects: dict[Finding, list[str]] = {}
    for subject, finding in rows:
        subjects.setdefault(finding, []).append(subject)
    return [
        Finding(one.check, one.level, one.found, one.change, tuple(sorted(names))) for one, names in subjects.items()
    ]


def worst(findings: Iterable[Finding]) -> Level:
    """Return the most severe level."""
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.ERROR, Level.WARNING) if level in levels), Level.OK)
