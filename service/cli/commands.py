"""The commands: their arguments, their output, and their exit codes."""

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import structlog
import typer

from service.claims.redis_connections import check_url
from service.cli import doctor as doctors
from service.cli import look, show
from service.cli.finding import Level, worst
from service.contract import Rules, SettingsError
from service.contract.wire.ids import event_id, member_id
from service.contract.wire.names import ledger_topic
from service.contract.wire.versions import NewerVersion
from service.core.problems import KafkaAway, Problem, StoreAway, StoreLost, StoreUnanswered
from service.core.settings import Settings
from service.events.event import parse_key
from service.events.schemas import Schemas

ERRORS_FOUND = 1
CANNOT = 2

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

app = typer.Typer(
    help="Exactly once into Apache Kafka, over HTTP. Every command reads the same FENCEPOST_ variables as the service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def serve() -> None:
    """Serve until SIGTERM or SIGINT, as `python -m service` does."""
    from service.__main__ import main

    raise typer.Exit(main())


_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASSED_ON, options_metavar="run|view|show|findings|rates|repair|schema [...]")
def audit(context: typer.Context) -> None:
    """Audit what was delivered against what was requested, and show what was found, as `python -m spark` does.

    run: one run; findings: the current findings, as CSV, JSON or Parquet; rates: surplus copies and latencies by topic
    or process; show: all data about an id; repair: plans and sends what is lost or missing, cleans a topic; view: a
    topic as a table with each id once; schema: of report.json. Each prints its options with --help.
    """
    _run_job(context.args or ["--help"])


@app.command(context_settings=_PASSED_ON, options_metavar="--lake DIR --report DIR [...]")
def reconcile(context: typer.Context) -> None:
    """Do what `fencepost audit run` does (its --help tells the options).

    Ends with 0: clean, 3: findings, 2: could not run.
    """
    _run_job(context.args)


def _run_job(arguments: Sequence[str]) -> NoReturn:
    """Become `python -m spark` with these arguments."""
    if importlib.util.find_spec("pyspark") is None or importlib.util.find_spec("spark") is None:
        give_up("the audit is not installed here: pip install 'fencepost[spark]' (it needs Java 17 besides)")
    os.execv(sys.executable, [sys.executable, "-m", "spark", *arguments])  # noqa: S606 - this very Python


@app.command()
def slots(as_json: AsJson = False) -> None:
    """Show the holder and the term of each slot, and how far its ledger is applied."""
    settings = settings_or_exit()
    found = run(look.slots(settings))
    if not found.rows:
        give_up(f"there is no topic {ledger_topic(settings.namespace)}: the first start of the service makes it")
    if as_json:
        show.document(
            {"store": found.store, "generation": found.generation, "slots": [r.document() for r in found.rows]}
        )
    else:
        show.slots(found)


@app.command()
def key(
    text: Annotated[str, typer.Argument(metavar="KEY", help="The idempotency key, quoted or bare.")],
    scope: Annotated[
        str, typer.Option(help="The caller's name, source:NAME, or issuer:NAME:CALLER, where callers have one.")
    ] = "",
    member: Annotated[
        int | None, typer.Option(min=0, help="Of a produce request or an atomic batch: a record's index, from 0.")
    ] = None,
    entry: Annotated[str, typer.Option(help="Of a request to records:batch: an entry's id.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show a key's entries in Redis and in the ledger. Exit code 1 if there are none, which proves nothing."""
    settings = settings_or_exit()
    try:
        bare = parse_key(text)
    except Problem as problem:
        give_up(problem.detail)
    if entry and member is not None:
        give_up("--member and --entry: give one of them: a request to records:batch has entries, others have members")
    longest_ttl_s = rules_or_exit(settings).longest_ttl_s
    with show.progress("reading the ledger") as on_progress:
        own = entry or member
        id = event_id(bare, scope) if own is None else member_id(bare, own, scope)
        found = run(look.key(settings, longest_ttl_s, id, doctors.now_ms(), on_progress))
    if as_json:
        show.document({"key": bare, "scope": scope, **found.document()})
    else:
        show.key(found, settings)
    raise typer.Exit(0 if found.known else ERRORS_FOUND)


@app.command()
def doctor(
    rate: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Events/s to expect; measured from the ledger's growth if not given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check brokers, ACLs, topics, Redis and clocks, and say what to change.

    Each finding is ok, a warning (slow, hidden or late) or an error (the guarantee does not hold, or the service cannot
    work). Exit code 0 without errors, else 1; 2 for a wrong setting.
    """
    settings = settings_or_exit()
    rules = rules_or_exit(settings)
    findings = [*doctors.rules_file(settings, rules), *run(doctors.examine(settings, rules, rate))]
    if as_json:
        show.document({"verdict": worst(findings).value, "findings": [finding.document() for finding in findings]})
    else:
        show.findings(findings)
    raise typer.Exit(ERRORS_FOUND if worst(findings) is Level.ERROR else 0)


def rules_or_exit(settings: Settings) -> Rules:
    """Read the rules and their schemas, or end with a line for each mistake."""
    try:
        rules = Rules.read(settings.rules)
        Schemas(rules)  # raises for wrong schemas
        if wrong := rules.conflicts(settings):
            raise SettingsError("\n".join(wrong))
        return rules
    except SettingsError as error:
        give_up(str(error))


def settings_or_exit() -> Settings:
    """Read the settings from the environment; print the mistakes and end the process if there are any."""
    try:
        settings = Settings.from_env()
        check_url(settings.redis)
    except SettingsError as error:
        give_up(str(error))
    return settings


def run(looking: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine without logging; if Kafka or Redis does not answer, one line says so."""
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
    logging.disable()
    try:
        return asyncio.run(looking)
    except NewerVersion as error:
        give_up(str(error))
    except (KafkaAway, StoreAway, StoreUnanswered, StoreLost) as error:
        give_up(f"{error}; run `fencepost doctor` for details")


def give_up(why: str) -> NoReturn:
    typer.echo(why, err=True)
    raise typer.Exit(CANNOT)
