"""`python -m spark`: one reconciliation run, as the command `run` makes it.

`view` creates a table of a topic with each id once, `show` prints all data about an id, `findings` the current
findings, `rates` surplus copies and latencies by topic, `schema` the JSON Schema of report.json. `repair` plans what to
do about lost and missing events and surplus copies, and does it.
"""

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pyspark.errors import PySparkException

from service.contract import Rules, SettingsError, SharedSettings
from spark import follow, job, silences
from spark.cli.command_line import parse, parse_about, parse_findings, parse_rates, parse_repair
from spark.cli.console import Console
from spark.engine import class_data
from spark.engine.jvm import Py4JError
from spark.engine.session import JAVA_OPTIONS, SMALL_RUN_JAVA_OPTIONS, open_session
from spark.errors import CannotRun
from spark.queries import export, rates, show
from spark.repair import command as repair
from spark.report import model, terminal
from spark.report.document import Report
from spark.rules.kinds import kinds_of
from spark.settings import Options, Settings, read_webhook, rules_of
from spark.steps import dry_run
from spark.tables import view
from spark.without_spark import before_spark, idle, small_run

EXIT_CANNOT_RUN: Final = 2
EXIT_LEFT: Final = 3


def main() -> int:
    """Carry out the command line. Returns the exit status: 0; 3 for a run with findings; 2 if it was not possible.

    With `--follow` findings do not change the status.
    """
    command, *arguments = sys.argv[1:] or [""]
    # PySpark warns about the version of an installed pandas, which the job does not use.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    try:
        if command in _COMMANDS:
            return _COMMANDS[command](arguments)
        return _run(sys.argv[1:])
    except (SettingsError, CannotRun) as error:
        sys.stderr.write(f"cannot run: {error}\n")
        return EXIT_CANNOT_RUN
    except (PySparkException, Py4JError, OSError):
        # Spark, Delta, a disk or a file failed, or the JVM has died: there is no report.
        traceback.print_exc()
        sys.stderr.write("cannot run: Spark or a file failed, see above; start the run again\n")
        return EXIT_CANNOT_RUN


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    console = Console(sys.stderr)
    settings = _read_settings(options)
    known = before_spark.known(settings, os.environ)
    report = None if known is None else idle.run(known, console)
    if report is not None:
        return _print(report, options)
    began_s = time.monotonic()
    is_small = known is not None and small_run.is_small(known)
    java_options = SMALL_RUN_JAVA_OPTIONS if is_small else JAVA_OPTIONS
    sharing = class_data.options_or_recording if is_small else class_data.options
    # A sink may be on S3 where lake and report are not.
    urls = (options.lake, options.report, *(rule.path for rule in settings.rules.sinks))
    session = open_session(java_options=java_options, urls=urls, sharing=sharing)
    before = {"start Spark": time.monotonic() - began_s}
    if options.dry_run:
        with console.watching(session):
            preview = job.preview(session, settings, console)
        _write(f"{line}\n" for line in dry_run.lines(preview))
        return 0
    if options.follow:
        stop = follow.Stop()
        stop.listen()
        with console.watching(session):
            return follow.follow(session, lambda: _read_settings(options), console, stop)
    with console.watching(session):
        report = job.run(session, settings, console, before=before)
    status = _print(report, options)
    class_data.record(session, os.environ)
    return status


def _print(report: Report, options: Options) -> int:
    """Print a report in a few lines. Returns its exit status."""
    _write([terminal.text_of(report, options.report)])
    return report.status


def _write(texts: Iterable[str]) -> None:
    """Write texts to stdout. If stdout is a pipe that was closed, as by `| head`, drop the rest: it is no failure."""
    try:
        sys.stdout.writelines(texts)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_settings(options: Options) -> Settings:
    """Read all that the options name, anew: environment, rules, silences, URL and secret of the webhook."""
    shared = SharedSettings.from_env()
    kinds_of("--fail-on", options.fail_on)
    settings = Settings(
        shared=shared,
        options=options,
        rules=rules_of(shared, options),
        silences=silences.read(options.silences),
        webhook=read_webhook(options),
    )
    for rule in settings.rules.topics:
        kinds_of(f"{shared.rules}: findings of the topics {rule.pattern!r}:", rule.findings)
    return settings


def _view(arguments: Sequence[str]) -> int:
    described = "Create a topic's view: a Delta table with each id once. Each later run updates the view."
    topic, root = parse_about("view", "topic", "a topic that the last run has audited", described, arguments)
    shared = SharedSettings.from_env()
    rows = view.register(open_session(urls=(root,)), shared, root, topic)
    _write([f"view       {root}/{view.FOLDER}/{topic}\nrows       {rows}\n"])
    return 0


def _show(arguments: Sequence[str]) -> int:
    described = "Show all data about an id: its rows in the lake, its findings, its records in Kafka."
    text, root = parse_about("show", "id", "an id (hexadecimal), or an idempotency key", described, arguments)
    shared = SharedSettings.from_env()
    _write(f"{line}\n" for line in show.show(open_session(urls=(root,)), shared, root, text))
    return 0


def _findings(arguments: Sequence[str]) -> int:
    options = parse_findings(arguments, int(time.time() * 1000))
    kinds_of("--kind", options.kinds)
    _write(export.export(open_session(urls=(options.lake, options.output)), options))
    return 0


def _rates(arguments: Sequence[str]) -> int:
    options = parse_rates(arguments, int(time.time() * 1000))
    scopes = Rules.read(SharedSettings.from_env().rules).scopes if options.by_caller else ()
    _write(rates.rates(open_session(urls=(options.lake,)), options, scopes))
    return 0


def _repair(arguments: Sequence[str]) -> int:
    """Print the entries of the plan as JSON, and its summary to stderr. Returns 3 if something is left to do."""
    options = parse_repair(arguments, int(time.time() * 1000))
    outcome = repair.carry_out(
        open_session(urls=(options.lake,)), SharedSettings.from_env(), options, Console(sys.stderr)
    )
    _write(repair.lines(outcome))
    sys.stderr.writelines(f"{line}\n" for line in outcome.lines)
    return EXIT_LEFT if outcome.is_left else 0


def _schema(arguments: Sequence[str]) -> int:
    _write([json.dumps(model.schema(), indent=1) + "\n"])
    return 0


_COMMANDS: Final[Mapping[str, Callable[[Sequence[str]], int]]] = {
    "run": _run,
    "view": _view,
    "show": _show,
    "findings": _findings,
    "rates": _rates,
    "repair": _repair,
    "schema": _schema,
}


if __name__ == "__main__":
    sys.exit(main())
