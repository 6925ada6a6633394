"""The last finished run in one file of the lake, which the next run reads in place of four tables.

The file repeats what the tables `runs`, `hourly_balance`, `hourly_records` and `progress` say, and names the newest
commit to each of them. After any other commit (of an interrupted run, of a run that has deleted or compacted rows, by
hand) the tables are read.

Runs without Spark (without_spark.idle) are in this file only, until the next run with Spark adds their rows to `runs`.
If the file is lost before, only their rows in the history of runs are lost: they have found nothing that the tables
lack.
"""

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.errors import PySparkException

from spark.engine.jvm import Py4JError
from spark.tables import commits, files
from spark.tables.lake import Lake

FILE: Final = "_last_run.json"

_VERSION: Final = 2
_OF_EACH_RUN: Final = ("progress", "runs")
_OF_SOME_RUNS: Final = ("hourly_balance", "hourly_records")
"""A run that has counted what the last one has counted does not commit to these."""
_NAMES: Final = (*_OF_SOME_RUNS, *_OF_EACH_RUN)

_COMMIT: Final = re.compile(r"\d{20}\.json")

_LOG: Final = logging.getLogger(__name__)


class LastRun(NamedTuple):
    """The last finished run as the next run reads it.

    `plan` are the rows of its plan (`progress`), `unstored` the rows of runs since the last commit to `runs`
    (schemas.RUN, oldest first), `shown` what its report shows of the lake, as a run without Spark reads it
    (without_spark.idle), or None.
    """

    finished: dict[str, Any]
    plan: list[dict[str, Any]]
    unstored: list[dict[str, Any]]
    shown: dict[str, Any] | None


class LocalFile(NamedTuple):
    """The file of a lake in a local folder: the run, and the commits that the file names."""

    last_run: LastRun
    commits: dict[str, str | None]


def load(lake: Lake) -> LastRun | None:
    """Read the last finished run; None if the tables have to be read."""
    found = _parsed(files.read(lake.spark, lake.root, FILE))
    return found.last_run if found is not None and found.commits == _newest(lake, _NAMES) else None


def load_local(folder: Path) -> LocalFile | None:
    """Read the last finished run of a lake in a local folder, without Spark; None if the tables have to be read."""
    found = _parsed(files.read_local(folder, FILE))
    if found is None or found.commits != {name: _newest_id(folder / name) for name in _NAMES}:
        return None
    return found


def _parsed(text: str | None) -> LocalFile | None:
    """Parse the file; None if there is none, or of a damaged one or another version: the tables say the same."""
    if text is None:
        return None
    try:
        stored = json.loads(text)
        if stored["version"] != _VERSION:
            return None
        return LocalFile(LastRun(*(stored[name] for name in LastRun._fields)), stored["commits"])
    except (ValueError, KeyError, TypeError):
        return None


def store(lake: Lake, last_run: LastRun) -> None:
    """Write the run that this process has just finished. Nothing is written if the newest commits are not its own: then
    it has finished a run that another process began, or has lost the lake.

    The run is finished without the file: an error of Spark or of the file system is logged, and the next run reads the
    tables.
    """
    try:
        # Read first: no later run has begun if the newest plan is still this process's.
        counted = _newest(lake, _OF_SOME_RUNS)
        newest = counted | {name: lake.own_commit(name) for name in _OF_EACH_RUN}
        if None in newest.values():
            return
        lake.check_held()
        files.write(lake.spark, lake.root, FILE, _text(LocalFile(last_run, newest)))
    except (PySparkException, Py4JError) as error:
        _LOG.warning("%s/%s was not written, and the next run reads the tables: %s", lake.root, FILE, error)


def store_local(folder: Path, stored: LocalFile) -> None:
    """Write a run that was finished without Spark, after the same commits."""
    files.write_local(folder, FILE, _text(stored))


def _text(stored: LocalFile) -> Iterable[str]:
    document = {"version": _VERSION, "commits": stored.commits, **stored.last_run._asdict()}
    return json.JSONEncoder().iterencode(document)


def _newest(lake: Lake, names: Iterable[str]) -> dict[str, str | None]:
    """Return the id of the newest commit to each of these tables; None if there is none."""
    newest = {name: lake.newest_commit(name) for name in names}
    return {name: None if commit is None else commit.id for name, commit in newest.items()}


def _newest_id(table: Path) -> str | None:
    """Return the id of the newest commit to a table in a local folder; None if there is none.

    The newest commit is the file with the greatest number in the table's log (Delta's protocol).
    """
    log = table / "_delta_log"
    # Other files in the log are checkpoints, checksums and compacted commits.
    newest = max((path.name for path in log.glob("*.json") if _COMMIT.fullmatch(path.name)), default=None)
    made = None if newest is None else commits.of(files.read_local(log, newest) or "")
    return None if made is None else made.id
