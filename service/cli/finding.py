"""What the doctor says: one finding for each thing that it looked at, well or not."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

SUBJECTS_SHOWN: Final = 5


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"  # as it should be
    WARNING = "warning"  # the promise holds; something will be slower, hidden or late
    ERROR = "error"  # the promise does not hold, or the service cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` is how it is, and `change` what to do about it (empty where all is well).

    `check` is its name, an area and what was looked at, and stays the same from one version to the next.
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
        """Its subjects as text; of many, the first few."""
        more = len(self.subjects) - SUBJECTS_SHOWN
        shown = ", ".join(self.subjects[:SUBJECTS_SHOWN])
        return f"{shown} and {more} more" if more > 0 else shown

    def document(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "level": self.level.value,
            "subjects": list(self.subjects),
            "found": self.found,
            "change": self.change,
        }


def judged(check: str, well: bool, found: str, change: str, otherwise: Level = Level.ERROR) -> Finding:
    """A finding that is well, or of the other level with what to change."""
    return Finding(check, Level.OK, found) if well else Finding(check, otherwise, found, change)


def grouped(rows: Iterable[tuple[str, Finding]]) -> list[Finding]:
    """Findings about one subject each, those that say the same joined."""
    subjects: dict[Finding, list[str]] = {}
    for subject, finding in rows:
        subjects.setdefault(finding, []).append(subject)
    return [
        Finding(one.check, one.level, one.found, one.change, tuple(sorted(names))) for one, names in subjects.items()
    ]


def worst(findings: Iterable[Finding]) -> Level:
    """The level of the whole."""
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.ERROR, Level.WARNING) if level in levels), Level.OK)
