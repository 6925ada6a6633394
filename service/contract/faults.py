"""The common parts of the tables of the rules: names, rates, retentions, and how their mistakes are reported."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from service.contract.settings import KEY_TTL_MOST_S, SettingsError
from service.contract.wire.names import TOPIC

Table = dict[str, Any]
Faults = Iterator[tuple[str, str]]
"""The mistakes of a table: the name concerned, and the remedy."""

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
"""The name of a header (RFC 9110, section 5.6.2), within a bound."""
NAME_REMEDY: Final = "write 1 to 64 of letters, digits, '.', '_' and '-'"
# Bounds of a rate, in events or bytes a second, within which its waiting times are meaningful.
_RATES: Final = (0.000001, 1_000_000_000)


def parse_toml(text: str, path: str) -> Table:
    """Parse the text of a file. Raises SettingsError if the text is not TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, or a number too long or lists too deep for Python
        raise SettingsError(f"{path}: {error}: write TOML that can be read") from None


def unknown_faults(table: Table, settings: Sequence[str]) -> Faults:
    """Find the names of a table that are no settings."""
    for unknown in table.keys() - set(settings):
        yield unknown, f"no such setting; write {', '.join(settings[:-1])} and {settings[-1]}"


def name_faults(table: Table, before: Sequence[Table], taken: str) -> Faults:
    """Find the mistakes of a table's `name`; `taken` is the remedy where a table `before` has it."""
    name = table.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        yield "name", NAME_REMEDY
    elif any(name == other.get("name") for other in before):
        yield "name", taken


def rate_faults(table: Mapping[str, Any]) -> Faults:
    """Find the mistakes of a table's optional `rate`, in events a second, and `rate_bytes`, in bytes a second."""
    for name, unit in (("rate", "events"), ("rate_bytes", "bytes")):
        rate = table.get(name, 1)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not _RATES[0] <= rate <= _RATES[1]:
            yield name, f"write {unit} a second, from {_RATES[0]:f} to {_RATES[1]}, or leave it out"


def group_faults(table: Mapping[str, Any]) -> Faults:
    """Find the mistakes of a table's optional `groups`, globs of consumer groups."""
    groups = table.get("groups", [])
    if not isinstance(groups, list) or not all(isinstance(glob, str) and glob for glob in groups):
        yield "groups", 'write names or globs of consumer groups, as in groups = ["billing-*"], or leave it out'


def ttl_faults(table: Mapping[str, Any]) -> Faults:
    """Find the mistakes of a table's optional `key_ttl_s`, in seconds."""
    ttl_s = table.get("key_ttl_s", 1)
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or not 1 <= ttl_s <= KEY_TTL_MOST_S:
        yield "key_ttl_s", f"write seconds, from 1 to {KEY_TTL_MOST_S}, or leave it out"


def quarantine_faults(table: Mapping[str, Any]) -> Faults:
    """Find the mistakes of a table's optional `quarantine`, a topic."""
    if "quarantine" in table and not is_topic(table["quarantine"]):
        yield "quarantine", 'write the name of a topic, as in quarantine = "orders.refused", or leave it out'


def is_topic(name: Any) -> bool:
    """Whether Kafka allows a topic of this name."""
    return isinstance(name, str) and TOPIC.fullmatch(name) is not None and name not in (".", "..")


def shown(name: str) -> str:
    """Format a name of the file for a message: names in TOML may contain line breaks."""
    return name if name.isprintable() else repr(name)


def start_of(text: str, section: str, index: int) -> int:
    """Find where a section's table of this index begins in the text."""
    starts = [match.start(1) for match in re.finditer(rf"^[ \t]*(\[\[)\s*{section}\s*\]\]", text, re.MULTILINE)]
    return starts[index] if index < len(starts) else 0


def line_of(text: str, name: str, table: int | None = None) -> int:
    """Find the line, from 1, of a name in the table that begins at `table`; of the table itself if it lacks the name.

    Without a table, the line of the name anywhere in the file.
    """
    start = table or 0
    found = re.compile(rf"^\s*\[*\s*(?:\w+\.)?{re.escape(name)}\b", re.MULTILINE).search(text, start)
    following = re.compile(r"^[ \t]*\[\[", re.MULTILINE).search(text, start + 2) if table is not None else None
    inside = found is not None and (following is None or found.start() < following.start())
    return text.count("\n", 0, found.end() if found is not None and inside else start) + 1
