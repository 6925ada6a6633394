"""What a run is given: the environment that it shares with the service, and the command line."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.contract import Rules, SharedSettings, wire

HOUR_MS: Final = 3_600_000

# A century: longer than any log, and all times that are made of it can be written down.
DAYS_MOST: Final = 36_500
HOURS_MOST: Final = DAYS_MOST * 24
SECONDS_MOST: Final = HOURS_MOST * 3600
# Kafka's offsets, and Spark's integers.
OFFSETS_MOST: Final = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. Times in the units of their names."""

    lake: str
    report: str
    topics: tuple[str, ...] = ()
    max_records: int | None = None
    grace_s: int = 60
    window_h: int = 168
    skip_ids: bool = False
    publish: bool = True
    identity: Mapping[str, str] = field(default_factory=dict)
    keep_days: int | None = None
    optimize: bool = False
    vacuum_h: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run, checked."""

    shared: SharedSettings
    options: Options
    rules: Rules = field(default_factory=Rules)

    @property
    def grace_ms(self) -> int:
        """What a run waits beyond the timeouts, ms."""
        return self.options.grace_s * 1000

    @property
    def settle_ms(self) -> int:
        """By when, counted from its acceptance, the fate of a request is final and visible: ms."""
        return self.shared.request_timeout_ms + self.shared.transaction_timeout_ms + self.grace_ms

    @property
    def key_ttl_ms(self) -> int:
        """Key retention, ms."""
        return self.shared.key_ttl_s * 1000


def glob_regex(globs: Sequence[str]) -> str:
    """A regular expression, the same to Python and to Spark, for names that one of the globs (`*`, `?`) matches."""
    return "|".join(
        "(?:" + "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in glob) + ")" for glob in globs
    )


def matches(globs: Sequence[str], name: str) -> bool:
    """Whether one of the globs matches the whole name."""
    return bool(globs) and re.fullmatch(glob_regex(globs), name) is not None


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse prints what is wrong and leaves with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m spark",
        description="Audit what was delivered to Kafka against what was requested; one run.",
        epilog="Exit status: 0 clean, 3 any finding, 2 could not run. Kafka, the namespace and the key retention "
        "come from the same FENCEPOST_ variables as the service's. Other commands: view TOPIC (a topic as a table with "
        "each id once), show ID (all that is known of an id); -h after them tells more.",
    )
    parser.add_argument("--lake", required=True, help="folder or URL of the Delta tables; made where missing")
    parser.add_argument("--report", required=True, help="folder or URL for report.json, report.html and metrics.prom")
    parser.add_argument(
        "--topics",
        default="",
        help="comma-separated globs of the topics to audit; default: every topic that the ledger, an answer that "
        "refuses nothing (201, 202, 504), or the rules name",
    )
    parser.add_argument(
        "--max-records", type=_integer(1, OFFSETS_MOST), help="read at most about this many offsets; default: all"
    )
    parser.add_argument(
        "--grace-s",
        type=_integer(0, SECONDS_MOST),
        default=60,
        help="how long after all timeouts a missing record is waited for",
    )
    parser.add_argument(
        "--window-h", type=_integer(1, HOURS_MOST), default=168, help="how many hours back the report looks"
    )
    parser.add_argument(
        "--skip-ids", action="store_true", help="leave out the pass over all ids, for copies in other hours"
    )
    parser.add_argument(
        "--no-publish", action="store_true", help="leave the topic {namespace}.findings as it is; do not make it"
    )
    parser.add_argument(
        "--identity",
        action="append",
        type=_identity,
        default=[],
        metavar="TOPIC=EXPRESSION",
        help="an idempotency key for records of a topic that have no header of ours: a Spark SQL expression over key, "
        "value, topic, partition, offset, timestamp and headers; may be given once for each topic",
    )
    parser.add_argument(
        "--keep-days",
        type=_integer(1, DAYS_MOST),
        help="drop from the lake what was accepted more days ago; default: keep all",
    )
    parser.add_argument("--optimize", action="store_true", help="make one file of the small ones of each hour touched")
    parser.add_argument(
        "--vacuum-h",
        type=_integer(1, HOURS_MOST),
        help="delete files that no version of the last so many hours needs; default: none",
    )
    given = parser.parse_args(arguments)
    identity = dict(given.identity)
    if len(identity) < len(given.identity):
        parser.error("argument --identity: a topic is named twice; give one expression for each")
    if given.keep_days is not None and given.keep_days * 24 < given.window_h:
        parser.error(f"argument --keep-days: a report of {given.window_h} hours needs {-(-given.window_h // 24)} days")
    return Options(
        lake=given.lake.rstrip("/") or "/",
        report=given.report.rstrip("/") or "/",
        topics=tuple(glob.strip() for glob in given.topics.split(",") if glob.strip()),
        max_records=given.max_records,
        grace_s=given.grace_s,
        window_h=given.window_h,
        skip_ids=given.skip_ids,
        identity=identity,
        keep_days=given.keep_days,
        optimize=given.optimize,
        vacuum_h=given.vacuum_h,
        publish=not given.no_publish,
    )


def parse_about(command: str, name: str, help: str, description: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Read the command line of a command about one thing: what it names, and the lake."""
    parser = argparse.ArgumentParser(prog=f"python -m spark {command}", description=description)
    parser.add_argument(name, help=help)
    parser.add_argument("--lake", required=True, help="folder or URL of the Delta tables that the runs fill")
    given = parser.parse_args(arguments)
    return getattr(given, name), given.lake.rstrip("/") or "/"


def _identity(text: str) -> tuple[str, str]:
    topic, equals, expression = text.partition("=")
    if not (equals and wire.TOPIC.fullmatch(topic.strip()) and expression.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOPIC=EXPRESSION")
    return topic.strip(), expression.strip()


def _integer(least: int, most: int) -> Callable[[str], int]:
    """What makes an integer within these bounds, both inclusive, of a word of the command line."""

    def read(text: str) -> int:
        # More digits than the bound has are none that Python need read.
        number = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least} to {most}")
        return number

    return read
