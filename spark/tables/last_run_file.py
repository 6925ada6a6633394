"""The last finished run in one file of the lake, which the next run reads in place of four tables.

The file repeats what the tables `runs`, `hourly_balance`, `hourly_records` and `progress` say, and names the newest
commit to each of them. After any other commit (of an interrupted run, of a run that has deleted or compacted rows, by
hand) the tables are read.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from spark.tables import files
from spark.tables.lake import Lake

FILE: Final = "_last_run.json"

_VERSION: Final = 1
_OF_EACH_RUN: Final = ("progress", "runs")
_OF_SOME_RUNS: Final = ("hourly_balance", "hourly_records")
"""A run that has counted what the last one has counted does not commit to these."""


class LastRun(NamedTuple):
    """The last finished run as the next run reads it, and its plan (rows of `progress`)."""

    finished: dict[str, Any]
    plan: list[dict[str, Any]]


def load(lake: Lake) -> LastRun | None:
    """Read the last finished run; None if the tables have to be read."""
    try:
        text = files.read(lake.spark, lake.root, FILE)
        if text is None:
            return None
        stored = json.loads(text)
        if stored["version"] != _VERSION or stored["commits"] != _newest(lake, (*_OF_SOME_RUNS, *_OF_EACH_RUN)):
            return None
        return LastRun(stored["finished"], stored["plan"])
    except (ValueError, KeyError, TypeError):  # a damaged file: the tables say the same
        return None


def store(lake: Lake, finished: Mapping[str, Any], plan: Sequence[Mapping[str, Any]]) -> None:
    """Write the run that this process has just finished. Nothing is written if the newest commits are not its own: then
    it has finished a run that another process began, or has lost the lake."""
    # Read first: no later run has begun if the newest plan is still this process's.
    counted = _newest(lake, _OF_SOME_RUNS)
    commits = counted | {name: lake.own_commit(name) for name in _OF_EACH_RUN}
    if None in commits.values():
        return
    stored = {"version": _VERSION, "commits": commits, "finished": finished, "plan": plan}
    lake.check_held()
    files.write(lake.spark, lake.root, FILE, json.JSONEncoder().iterencode(stored))


def _newest(lake: Lake, names: Iterable[str]) -> dict[str, str | None]:
    """Return the id of the newest commit to each of these tables; None if there is none."""
    commits = {name: lake.newest_commit(name) for name in names}
    return {name: None if commit is None else commit.id for name, commit in commits.items()}
