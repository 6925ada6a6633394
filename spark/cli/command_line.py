"""The command lines of the job: each parser returns the options of its command (spark.settings). An argument that is
left out has the default of its option.

On errors argparse prints a message and exits with status 2.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from service.contract.wire.names import TOPIC
from spark.settings import (
    CSV,
    HOUR_MS,
    JSON,
    OFFSETS_MOST,
    PARQUET,
    SLACK,
    FindingsOptions,
    Options,
    RatesOptions,
    RepairOptions,
    is_url,
)

# A century: longer than any log, and all times computed from these limits are valid timestamps.
DAYS_MOST: Final = 36_500
HOURS_MOST: Final = DAYS_MOST * 24
SECONDS_MOST: Final = HOURS_MOST * 3600
RUNS_MOST: Final = 1000

PAUSE_S_LEAST: Final = 5
PAUSE_S_MOST: Final = 60
"""Bounds of the pause between two turns of --follow: a run that takes up to 30 s has each verdict two minutes after its
time."""

REPAIRED_KINDS: Final = ("lost", "missing_in_sink")
"""The kinds of findings about events that `repair` can send or copy."""


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line of a run."""
    parser = _parser(
        "",
        description="Audit what was delivered to Kafka against what was requested; one run, or with --follow many.",
        epilog="Exit status: 0 clean, 3 any finding (of --fail-on), 2 could not run; with --follow 0 after SIGTERM or "
        "SIGINT, 2 if it could not run. Kafka, the namespace and the key "
        "retention come from the same FENCEPOST_ variables as the service's. Other commands: view TOPIC (a topic as a "
        "table with each id once), show ID (all data about an id), findings (the current findings, as CSV, JSON or "
        "Parquet), rates (surplus copies and latencies by topic, process or caller), repair (plans and sends what is "
        "lost or missing, writes a topic without surplus copies), schema (of report.json); -h after a command prints "
        "its options. The command run is the default.",
    )
    _add_lake(parser, "folder or URL of the Delta tables; created if missing")
    parser.add_argument(
        "--report",
        type=_without_slash,
        required=True,
        help="folder or URL for report.json, report.html and metrics.prom",
    )
    for add in (_add_audited, _add_findings, _add_webhook, _add_maintenance, _add_sinks, _add_way_of_running):
        add(parser)
    given = vars(parser.parse_args(arguments))
    expressions = given.get("identity", [])
    identity = dict(expressions)
    if len(identity) < len(expressions):
        parser.error("argument --identity: a topic is named twice; give one expression for each")
    options = Options(**{**given, "identity": identity})
    if wrong := _wrong_run(options):
        parser.error(wrong)
    return options


def _add_audited(parser: argparse.ArgumentParser) -> None:
    """Add what a run audits, and how far it looks back."""
    parser.add_argument(
        "--topics",
        type=_listed,
        help="comma-separated globs of the topics to audit; default: every topic that the ledger, an answer 201, 202 "
        "or 504, or the rules name",
    )
    parser.add_argument(
        "--without-topics",
        type=_listed,
        help="comma-separated globs of topics that are not audited, whatever else names them; default: none",
    )
    parser.add_argument(
        "--identity",
        action="append",
        type=_identity,
        metavar="TOPIC=EXPRESSION",
        help="an idempotency key for records of a topic without Fencepost's headers: a Spark SQL expression over key, "
        "value, topic, partition, offset, timestamp and headers; may be given once for each topic",
    )
    parser.add_argument(
        "--max-records", type=_integer(1, OFFSETS_MOST), help="merge at most about this many offsets; default: all"
    )
    parser.add_argument(
        "--grace-s",
        type=_integer(0, SECONDS_MOST),
        help="how long after all timeouts a missing record is still expected",
    )
    parser.add_argument(
        "--window-h",
        type=_integer(1, HOURS_MOST),
        help="how many hours back the report's window begins",
    )
    parser.add_argument(
        "--skip-ids", action="store_true", help="skip the pass over all ids, which finds copies in other hours"
    )


def _add_findings(parser: argparse.ArgumentParser) -> None:
    """Add where findings go, and which of them count."""
    parser.add_argument(
        "--no-publish",
        dest="publish",
        action="store_false",
        help="neither create nor write the topic {namespace}.findings",
    )
    parser.add_argument(
        "--replace-findings",
        action="store_true",
        help="replace the findings in that topic that another lake has published, since this lake takes its place",
    )
    parser.add_argument(
        "--fail-on",
        type=_listed,
        metavar="KINDS",
        help="comma-separated kinds of findings, or severities (error, warning, information), that make the exit "
        "status 3; default: all",
    )
    parser.add_argument(
        "--silences",
        metavar="FILE",
        help="a TOML file of known findings, each with a time and a reason: until then exit status, metrics and "
        "the counts of the report leave the finding out",
    )


def _add_webhook(parser: argparse.ArgumentParser) -> None:
    """Add where new findings are sent."""
    parser.add_argument(
        "--webhook",
        metavar="URL",
        help="where to POST new findings, each once; @FILE for a file with the URL, which may be a secret",
    )
    parser.add_argument(
        "--webhook-secret",
        metavar="FILE",
        help="a file with the secret by which each request is signed, as Standard Webhooks has it (whsec_ and base64)",
    )
    parser.add_argument(
        "--webhook-format",
        choices=(JSON, SLACK),
        help="the body: a JSON document, or a message of Slack",
    )
    parser.add_argument(
        "--webhook-after",
        type=_integer(1, RUNS_MOST),
        metavar="RUNS",
        help="send a finding when so many runs in a row had it",
    )


def _add_maintenance(parser: argparse.ArgumentParser) -> None:
    """Add what a run deletes from the lake, and what it compacts."""
    parser.add_argument(
        "--keep-days",
        type=_integer(1, DAYS_MOST),
        help="delete from the lake, but not from views, what was accepted more days ago; default: keep all",
    )
    parser.add_argument(
        "--optimize",
        action="store_true",
        help="compact the small files of hours that are over, and those of other tables and views that have many",
    )
    parser.add_argument(
        "--vacuum-h",
        type=_integer(1, HOURS_MOST),
        help="delete files that no table version of the last VACUUM_H hours needs; default: none",
    )


def _add_sinks(parser: argparse.ArgumentParser) -> None:
    """Add which sinks are compared, and how much of them."""
    parser.add_argument(
        "--sinks",
        metavar="FILE",
        help="a TOML file with [[sinks]] tables, in place of those in FENCEPOST_RULES",
    )
    parser.add_argument(
        "--recheck-sinks",
        action="store_true",
        help="compare every hour of the window with the sinks again; default: hours that may have changed",
    )


def _add_way_of_running(parser: argparse.ArgumentParser) -> None:
    """Add whether the process makes one run, many, or only the plan of one."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print what a run would read, and about how long; write nothing"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on: make a run of what has come, and of verdicts that time has decided, again and again until SIGTERM",
    )
    parser.add_argument(
        "--pause-s",
        type=_integer(PAUSE_S_LEAST, PAUSE_S_MOST),
        help="with --follow: how long to wait after a run until the logs are listed again",
    )
    parser.add_argument(
        "--alive-file",
        metavar="FILE",
        help="with --follow: a local file, whose time of modification is set when a step of a run begins",
    )


def _wrong_run(options: Options) -> str:
    """Return what is wrong with options that are right each by itself, and the remedy; empty if nothing is."""
    if options.follow and (options.dry_run or options.recheck_sinks):
        return "argument --follow: leave out --dry-run and --recheck-sinks, which are for a single run"
    if options.alive_file and not options.follow:
        return "argument --alive-file: give it with --follow"
    if options.webhook_secret and not options.webhook:
        return "argument --webhook-secret: give it with --webhook"
    if options.keep_days is not None and options.keep_days * 24 < options.window_h:
        return f"argument --keep-days: a report of {options.window_h} hours needs {-(-options.window_h // 24)} days"
    return ""


def parse_about(command: str, name: str, help: str, description: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Parse the command line of `view` and `show`: return the positional argument and the lake."""
    parser = _parser(command, description=description)
    parser.add_argument(name, help=help)
    _add_lake(parser, "folder or URL of the Delta tables that the runs fill")
    parsed = parser.parse_args(arguments)
    return getattr(parsed, name), parsed.lake


def parse_findings(arguments: Sequence[str], now_ms: int) -> FindingsOptions:
    """Parse the command line of `findings`."""
    parser = _parser(
        "findings",
        description="List the current findings of a lake: those of the last report, or since a time.",
    )
    _add_lake(parser, "folder or URL of the Delta tables that the runs fill")
    _add_kinds(parser, "comma-separated kinds, or severities (error, warning, information); default: all")
    _add_topics(parser)
    _add_since(
        parser,
        now_ms,
        "only findings with evidence since then: a time (UTC without an offset), as 2026-12-24T18:00, or how long "
        "ago, as 24h or 7d; default: the window of the last run",
    )
    parser.add_argument(
        "--format",
        choices=(CSV, JSON, PARQUET),
        help="json: an object for each finding, in a line of its own; csv: coordinates as JSON; parquet: into --output",
    )
    parser.add_argument("--output", help="a new folder or URL for the Parquet files")
    options = FindingsOptions(**vars(parser.parse_args(arguments)))
    if (options.format == PARQUET) != bool(options.output):
        parser.error("argument --output: give it with --format parquet, and only then; other formats are printed")
    return options


def parse_rates(arguments: Sequence[str], now_ms: int) -> RatesOptions:
    """Parse the command line of `rates`."""
    parser = _parser(
        "rates",
        description="Count records and surplus copies by topic, and how long after its acceptance an event was in its "
        "ledger record, which the commit makes visible.",
    )
    _add_lake(parser, "folder or URL of the Delta tables that the runs fill")
    _add_topics(parser)
    parser.add_argument(
        "--by-instance", action="store_true", help="a row for each topic and process that wrote its records"
    )
    parser.add_argument(
        "--by-caller", action="store_true", help="a row for each topic and caller, or source, that the rules name"
    )
    _add_since(
        parser,
        now_ms,
        "only what was accepted since then: as for the command findings; default: the window of the last run",
    )
    parser.add_argument("--format", choices=(CSV, JSON), help="json: an object for each row, in a line of its own")
    return RatesOptions(**vars(parser.parse_args(arguments)))


def parse_repair(arguments: Sequence[str], now_ms: int) -> RepairOptions:
    """Parse the command line of `repair`."""
    parser = _parser(
        "repair",
        description="Plan how to repair what the last run has found, and (--execute) do it: send lost events again, "
        "copy records that a sink lacks, write a topic without surplus copies. Without --execute nothing is sent.",
    )
    _add_lake(parser, "folder or URL of the Delta tables that the runs fill; plans are stored there too")
    _add_kinds(parser, "lost, missing_in_sink, or both (default)")
    _add_topics(parser)
    _add_since(parser, now_ms, "as for the command findings")
    parser.add_argument("--execute", action="store_true", help="send and copy; default: only plan")
    for add in (_add_sending, _add_copying):
        add(parser)
    given = vars(parser.parse_args(arguments))
    several = {name: tuple(given.get(name, ())) for name in ("bodies", "scopes")}
    options = RepairOptions(**{**given, **several, "kinds": given.get("kinds") or REPAIRED_KINDS})
    if wrong := _wrong_repair(options):
        parser.error(wrong)
    return options


def _add_sending(parser: argparse.ArgumentParser) -> None:
    """Add where lost events are, and how they are sent."""
    parser.add_argument(
        "--bodies",
        action="append",
        metavar="FILE",
        help="where the bytes of lost events are: lines as POST /events/batch takes them, each with its "
        "idempotency_key; may be given several times",
    )
    parser.add_argument(
        "--scope",
        dest="scopes",
        action="append",
        metavar="NAME",
        help="the caller of these keys, as for fencepost key; default: none",
    )
    parser.add_argument("--url", help="address of the service that gets lost events")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the caller's token")
    parser.add_argument("--cafile", metavar="FILE", help="the authorities of the service's certificate")
    parser.add_argument(
        "--new-keys",
        action="store_true",
        help="write a lost event under a new key if the service still remembers, or has forgotten, its own",
    )


def _add_copying(parser: argparse.ArgumentParser) -> None:
    """Add where records are copied to, and a topic that is copied without surplus copies."""
    parser.add_argument(
        "--into",
        metavar="TOPIC",
        help="the topic that gets records that sinks lack, or those of --clean",
    )
    parser.add_argument("--bodies-out", metavar="FILE", help="a file for the records that sinks lack")
    parser.add_argument("--clean", metavar="TOPIC", help="write this topic to --into without surplus copies")


def _wrong_repair(options: RepairOptions) -> str:
    """Return what is wrong with options that are right each by itself, and the remedy; empty if nothing is."""
    if wrong := [name for name in options.kinds if name not in REPAIRED_KINDS]:
        return f"argument --kind: {wrong[0]!r} cannot be repaired: give {' or '.join(REPAIRED_KINDS)}"
    for name, topic in (("--into", options.into), ("--clean", options.clean)):
        if topic and TOPIC.fullmatch(topic) is None:
            return f"argument {name}: {topic!r} is no name of a topic"
    if options.clean and (not options.into or options.into == options.clean):
        return "argument --clean: give the topic that gets the records with --into, another one than --clean"
    if options.clean and (options.bodies or options.url or options.bodies_out):
        return "argument --clean: leave out --bodies, --url and --bodies-out: they are about lost and missing events"
    if options.execute and not (options.url or options.into):
        return "argument --execute: give the service with --url, or a topic with --into"
    if options.url and not is_url(options.url):
        return f"argument --url: {options.url!r} is no address of http or https"
    return ""


def _parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a command, "" for that of a run; its result has only the arguments that are given."""
    prog = f"python -m spark {command}".rstrip()
    return argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, argument_default=argparse.SUPPRESS
    )


def _add_lake(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--lake", type=_without_slash, required=True, help=help)


def _add_topics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topic",
        dest="topics",
        type=_listed,
        metavar="TOPIC",
        help="comma-separated globs of topics; default: all",
    )


def _add_kinds(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--kind", dest="kinds", type=_listed, metavar="KIND", help=help)


def _add_since(parser: argparse.ArgumentParser, now_ms: int, help: str) -> None:
    parser.add_argument("--since", dest="since_ms", type=_since(now_ms), metavar="SINCE", help=help)


def _without_slash(text: str) -> str:
    """Remove the slashes at the end of a folder or URL."""
    return text.rstrip("/") or "/"


def _listed(separated: str) -> tuple[str, ...]:
    """Split names or globs that are separated by commas."""
    return tuple(name.strip() for name in separated.split(",") if name.strip())


_AGO: Final = re.compile(r"([0-9]{1,6})([hd])")


def _since(now_ms: int) -> Callable[[str], int]:
    """Return a parser for a time, or for how long ago it was; the result is in ms, 0 for any time before 1970.

    No record counts before 2000 (decode.PLAUSIBLE_MS), and Spark has no literal for a time of the first centuries.
    """

    def read(text: str) -> int:
        if ago := _AGO.fullmatch(text):
            return max(0, now_ms - int(ago[1]) * HOUR_MS * (24 if ago[2] == "d" else 1))
        try:
            time = datetime.fromisoformat(text)
            return max(0, int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is no time, as 2026-12-24T18:00, and no age, as 7d") from None

    return read


def _identity(text: str) -> tuple[str, str]:
    """Parse TOPIC=EXPRESSION; ArgumentTypeError, which argparse prints, for any other text."""
    topic, equals, expression = text.partition("=")
    if not (equals and TOPIC.fullmatch(topic.strip()) and expression.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOPIC=EXPRESSION")
    return topic.strip(), expression.strip()


def _integer(least: int, most: int) -> Callable[[str], int]:
    """Return a parser for integers within these bounds, both inclusive."""

    def read(text: str) -> int:
        # A text with more digits than the bound is refused without parsing it.
        number = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least} to {most}")
        return number

    return read
