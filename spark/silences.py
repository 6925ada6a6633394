"""Silences: known findings that do not count until a time.

A file has a TOML table for each:

    [[silences]]
    finding = "client_duplicate:0f1e2d3c4b5a6978"   # its finding_id in the report, or a glob as "unkeyed::orders:*"
    until = 2026-12-24                              # a day, which counts to its end in UTC, or a time with its offset
    reason = "the importer makes new keys: OPS-123"
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from service.contract import SettingsError
from service.contract.faults import Faults, Table, line_of, parse_toml, shown, start_of, unknown_faults

SILENCES_MAX: Final = 1_000
"""Each finding is compared with each glob."""
FINDING_CHARS: Final = 400
REASON_CHARS: Final = 500

_SECTION: Final = "silences"
_SETTINGS: Final = ("finding", "until", "reason")
# The kind is written out, so that no silence is of all kinds.
_FINDING: Final = re.compile(r"[a-z_]+:[ -~]+")


@dataclass(frozen=True, slots=True)
class Silence:
    """One silence: the `finding_id` or a glob (`*`, `?`) of several, the time (ms) at which it ends, and the reason."""

    finding: str
    until_ms: int
    reason: str

    @property
    def is_glob(self) -> bool:
        """Whether the silence may be of several findings."""
        return "*" in self.finding or "?" in self.finding

    def is_active(self, now_ms: int) -> bool:
        """Check whether the silence has not ended."""
        return now_ms < self.until_ms


def read(path: str) -> tuple[Silence, ...]:
    """Read a file of silences; none for an empty path. Raises SettingsError with a line for each mistake."""
    if not path:
        return ()
    try:
        text = Path(path).read_bytes().decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--silences {path!r} cannot be read: {error}; give the path of a TOML file") from None
    return parse(text, path)


def parse(text: str, path: str) -> tuple[Silence, ...]:
    """Parse silences. Raises SettingsError with a line for each mistake: the file, its line, and what to write."""
    document = parse_toml(text, path)
    wrong = [
        f"{path}:{line_of(text, name)}: {shown(name)}: no such section; write [[{_SECTION}]]"
        for name in document.keys() - {_SECTION}
    ]
    tables = document.get(_SECTION, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        wrong.append(f"{path}:{line_of(text, _SECTION)}: {_SECTION}: write [[{_SECTION}]], once for each finding")
        tables = []
    if len(tables) > SILENCES_MAX:
        where = line_of(text, _SECTION, start_of(text, _SECTION, SILENCES_MAX))
        wrong.append(f"{path}:{where}: {_SECTION}: write at most {SILENCES_MAX}; a glob is of several findings")
        tables = []
    for index, table in enumerate(tables):
        for name, remedy in _faults(table):
            wrong.append(f"{path}:{line_of(text, name, start_of(text, _SECTION, index))}: {shown(name)}: {remedy}")
    if wrong:
        raise SettingsError("\n".join(wrong))
    return tuple(Silence(table["finding"], _end_ms(table["until"]), table["reason"].strip()) for table in tables)


def _faults(table: Table) -> Faults:
    """Find the mistakes of a table: the name concerned, and the remedy."""
    yield from unknown_faults(table, _SETTINGS)
    finding, reason = table.get("finding"), table.get("reason")
    if not isinstance(finding, str) or len(finding) > FINDING_CHARS or _FINDING.fullmatch(finding) is None:
        yield "finding", 'write a finding_id of report.json, or its kind and a glob, as in "client_duplicate:*"'
    if not _is_end(table.get("until")):
        yield "until", "write a day, as 2026-12-24, or a time with its offset, as 2026-12-24T18:00:00Z"
    if not isinstance(reason, str) or not reason.strip() or len(reason) > REASON_CHARS or not reason.isprintable():
        yield "reason", f"write a line of at most {REASON_CHARS} characters: why the finding need not be acted on"


def _is_end(until: Any) -> bool:
    """Check whether a value of TOML is a day, or a time whose offset is known, that Python's calendar can bear."""
    if isinstance(until, datetime) and until.tzinfo is None:
        return False
    return isinstance(until, date) and until.year < date.max.year


def _end_ms(until: date) -> int:
    """Return when a silence ends (ms): a day counts to its end in UTC."""
    if isinstance(until, datetime):
        return int(until.timestamp() * 1000)
    return int((datetime(until.year, until.month, until.day, tzinfo=UTC) + timedelta(days=1)).timestamp() * 1000)
