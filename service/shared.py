"""The settings that the service and the job read from the same environment, and how a setting is read.

Standard library only: the job imports this module and `wire`, and nothing else of the service.
"""

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Self

from service.wire import TOPIC

PREFIX = "FENCEPOST_"


class SettingsError(ValueError):
    """One or more settings are wrong; each line of the text says which, why, and what to set."""


Read = Callable[[str], Any]


def setting(default: Any, help: str, read: Read) -> Any:
    """A dataclass field that is a setting: its default, what it is for, and how its text becomes a value.

    `read` raises ValueError with what would be right ("an integer of 1 or more").
    """
    return field(default=default, metadata={"help": help, "read": read})


def integer(least: int, most: int | None = None) -> Read:
    """Reader of a decimal integer within bounds, both inclusive."""
    wanted = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if number < least or number > (math.inf if most is None else most):
            raise ValueError(wanted)
        return number

    return read


def matching(pattern: Any, wanted: str) -> Read:
    """Reader of a text that matches a compiled regular expression as a whole."""

    def read(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError(wanted)
        return text

    return read


def servers(text: str) -> str:
    """Reader of `host:port[,host:port…]`."""
    for server in text.split(","):
        host, colon, port = server.strip().rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("host:port, several separated by commas")
    return text


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """What the service and the job must agree on."""

    kafka: str = setting("127.0.0.1:9092", "Kafka's bootstrap servers, host:port separated by commas", servers)
    namespace: str = setting(
        "fencepost",
        "prefix of the internal topics, the transactional ids and the keys in Redis",
        matching(TOPIC, "1 to 249 of letters, digits, '.', '_' and '-'"),
    )
    key_ttl_s: int = setting(86_400, "key retention: for how long a key is remembered, in seconds", integer(1))
    transaction_timeout_ms: int = setting(
        10_000, "Kafka aborts a transaction that is open for longer, in milliseconds", integer(1_000, 900_000)
    )
    request_timeout_ms: int = setting(
        10_000, "deadline of a request, and of each call to Kafka, in milliseconds", integer(100, 900_000)
    )
    rules: str = setting("", "path of a TOML file with rules for topics; empty for none", str)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read every setting from `FENCEPOST_<NAME>`; SettingsError lists all that are wrong, a line each."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for item in fields(cls):
            name = PREFIX + item.name.upper()
            text = environ.get(name, "")
            if text == "":
                continue
            try:
                values[item.name] = item.metadata["read"](text)
            except ValueError as error:
                wrong.append(f"{name}={text!r} is wrong: set {error}")
        if not wrong:
            settings = cls(**values)
            wrong = settings.conflicts()
            if not wrong:
                return settings
        raise SettingsError("\n".join(wrong))

    def conflicts(self) -> list[str]:
        """Settings that do not fit together, a line each that says what to set."""
        least_ms = 10 * (self.request_timeout_ms + self.transaction_timeout_ms)
        if self.key_ttl_s * 1000 < least_ms:
            return [
                f"{PREFIX}KEY_TTL_S={self.key_ttl_s} is too short: a key must outlive ten times the request and the "
                f"transaction timeout together; set {math.ceil(least_ms / 1000)} or more, or shorter timeouts"
            ]
        return []


# --------------------------------------------------------------------------------------------------------- rules


class Guarantee(Enum):
    """What a topic's events are promised (design: two guarantees)."""

    EXACTLY_ONCE = "exactly_once"
    IDEMPOTENT = "idempotent"


@dataclass(frozen=True, slots=True)
class TopicRule:
    """One `[[topics]]` table: the topics whose names match the glob get the guarantee."""

    pattern: str
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a TOML file; the first `[[topics]]` table that matches a topic counts."""

    topics: tuple[TopicRule, ...] = ()

    def guarantee(self, topic: str) -> Guarantee:
        """The guarantee of a topic's events; exactly_once where no rule names it."""
        return next(
            (rule.guarantee for rule in self.topics if fnmatchcase(topic, rule.pattern)), Guarantee.EXACTLY_ONCE
        )

    @classmethod
    def read(cls, path: str) -> "Rules":
        """Read a file of rules; no rules for an empty path. SettingsError names the line."""
        if not path:
            return cls()
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{PREFIX}RULES={path!r} cannot be read: {error}; set the path of a TOML file"
            ) from None
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: str = "rules") -> "Rules":
        """Rules from TOML. SettingsError has a line for each mistake: the file, its line, and what to write."""
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path}: {error}") from None
        wrong = [
            f"{path}:{_line_of(text, 0, name)}: {name}: no such section; write [[topics]]"
            for name in document
            if name != "topics"
        ]
        tables = document.get("topics", [])
        if not isinstance(tables, list):
            wrong.append(f"{path}:{_line_of(text, 0, 'topics')}: topics: write [[topics]], once for each rule")
            tables = []
        rules: list[TopicRule] = []
        for index, table in enumerate(tables):
            faults = list(_faults(table))
            start = _start_of(text, index)
            wrong += [f"{path}:{_line_of(text, start, name)}: {name}: {remedy}" for name, remedy in faults]
            if not faults:
                rules.append(TopicRule(table["pattern"], Guarantee(table.get("guarantee", "exactly_once"))))
        if wrong:
            raise SettingsError("\n".join(wrong))
        return cls(tuple(rules))


_GUARANTEES: Final = tuple(guarantee.value for guarantee in Guarantee)


def _faults(table: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with one `[[topics]]` table: the name concerned and the remedy."""
    for name in table.keys() - {"pattern", "guarantee"}:
        yield name, "no such setting; write pattern and guarantee"
    pattern = table.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        yield "pattern", 'write the topic\'s name or a glob, as in pattern = "telemetry.*"'
    if table.get("guarantee", "exactly_once") not in _GUARANTEES:
        yield "guarantee", f"write one of {', '.join(_GUARANTEES)}"


def _start_of(text: str, index: int) -> int:
    """Where the `[[topics]]` table of that index begins."""
    starts = [match.start() for match in re.finditer(r"^\s*\[\[\s*topics\s*\]\]", text, re.MULTILINE)]
    return starts[index] if index < len(starts) else 0


def _line_of(text: str, start: int, name: str) -> int:
    """The line, from 1, of a name at or after `start`; the table's own where it is missing."""
    found = re.compile(rf"^\s*\[*\s*{re.escape(name)}\b", re.MULTILINE).search(text, start)
    following = re.compile(r"^\s*\[\[", re.MULTILINE).search(text, start + 2)
    inside = found is not None and (following is None or found.start() < following.start() or start == 0)
    place = found.end() if found is not None and inside else start + len(text[start:]) - len(text[start:].lstrip())
    return text.count("\n", 0, place) + 1
