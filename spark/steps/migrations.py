"""Upgrades of a lake in place, from the layouts of earlier releases to that of this one.

A new layout is a higher `lake_version.VERSION` and one entry in MIGRATIONS. The version is stored after each step. A
step that was interrupted is repeated by the next run, so each step does nothing where it was done before.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark.rules import hourly
from spark.rules.balance import Balance
from spark.tables import lake_version, schemas
from spark.tables.lake import Lake

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "deliveries": {
        "plain": "is_clean",
        "entered_ms": "entry_seen_ms",
        "answered_ms": "answer_seen_ms",
        "unsure_ms": "in_doubt_ms",
        "copied_ms": "timestamp_ms",
        "copied_at": "record_accepted_ms",
        "fp": "fingerprint",
        "alt": "alternative_fingerprints",
        "stamped": "has_fencepost_header",
        "keyed": "has_record_key",
        "record_key": "record_key_hash",
        "batch": "batch_hash",
        "topic_id": "topic_id_hash",
    },
    "progress": {
        "life": "topic_id",
        "since_ms": "recreated_at_ms",
        "complete_ms": "complete_since_ms",
        "decided_ms": "decided_until_ms",
        "holder": "blocking_transaction",
        "heard_run": "caught_up_run",
        "mark_run": "behind_run",
        "mark_end": "behind_end",
        "first_ms": "first_record_ms",
    },
}
"""Names of columns in lakes of the first release, and their present names."""


def _name_columns(lake: Lake, run: int) -> None:
    """Rename the columns of the first release, and add those that later releases have added."""
    for name in ("deliveries", "findings", "progress"):
        lake.rename_columns(name, RENAMED.get(name, {}), run)
        lake.add_columns(name, run)


def _move_sums(lake: Lake, run: int) -> None:
    """Move the sums by hour from the summary of the last run to the tables `hourly_balance` and `hourly_records`."""
    lake.add_columns("runs", run)
    last = lake.read("runs").orderBy(F.desc("run")).select("run", "summary", "counted_run").first()
    if last is None or last["counted_run"] is not None:
        return
    # Earlier releases wrote `cells` and `shifted`.
    earlier = {"cells": "record_counts", "shifted": "evidence_changed"}
    summary = {earlier.get(name, name): found for name, found in json.loads(last["summary"]).items()}
    hourly.store(lake, Balance.of(summary), None, last["run"], commits_of=run)
    left = {name: found for name, found in summary.items() if name not in hourly.STORED}
    moved: dict[str, str | Column] = {"summary": F.lit(json.dumps(left)), "counted_run": F.lit(last["run"])}
    with lake.begin_commit("runs", run) as table:
        table.update(F.col("run") == last["run"], moved)


class Migration(NamedTuple):
    """A step to a version: what the step does, for the log, and the function that does it.

    The function takes the lake, and the run under whose number it commits.
    """

    version: int
    what: str
    carry_out: Callable[[Lake, int], None]


MIGRATIONS: Final = (
    Migration(1, "columns get their present names", _name_columns),
    Migration(2, "the sums by hour move to tables", _move_sums),
)


def migrate(lake: Lake, on_progress: Callable[[str], None], check_namespace: Callable[[str], None]) -> None:
    """Upgrade a lake to the version of this release; CannotRun, with the lake as it was, if it is of a newer release.

    `check_namespace` is called with the options of the newest plan, before anything is changed.
    """
    version = lake_version.refuse_newer(lake)
    pending = [step for step in MIGRATIONS if step.version > version]
    if not pending:
        if lake_version.stored(lake) is None:
            lake_version.store(lake, lake_version.VERSION)
        return
    newest = lake.read("progress").orderBy(F.desc("run")).select("run", "options").first()
    if newest is not None:
        check_namespace(newest["options"])
    run = newest["run"] if newest is not None else 0
    lake.take_over(run, schemas.TABLES)
    for step in pending:
        on_progress(f"upgrading --lake {lake.root} to version {step.version}: {step.what}")
        step.carry_out(lake, run)
        lake_version.store(lake, step.version)
