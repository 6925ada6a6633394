"""Stores plans and their entries in the lake.

A plan is stored before anything is sent, so that a process that is killed leaves a plan without its outcome.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark.engine import frames
from spark.repair import layouts
from spark.repair.entries import Entry
from spark.repair.layouts import Layout
from spark.settings import RepairOptions
from spark.tables import schemas
from spark.tables.lake import Lake

PLANNED: Final = "planned"
EXECUTING: Final = "executing"
DONE: Final = "done"
"""States of a plan."""

TABLES: Final = ("repairs", "repair_entries")
_NUMBERED: Final = (("repairs", "plan"), ("progress", "run"))


class RepairPlans:
    """Stores the plans of one invocation of the command `repair`. `run` is the run of the audit that they are about."""

    def __init__(self, lake: Lake, options: RepairOptions, run: int, now_ms: Callable[[], int]) -> None:
        self._lake = lake
        self._options = options
        self._run = run
        self._now_ms = now_ms
        self._began_ms = now_ms()
        self._number = 0  # of the commits to the tables (take_number)

    def take_number(self) -> int:
        """Number the commits that follow, and a new plan among them, after those of all plans and runs.

        The outcomes of an interrupted plan get a number of their own too: Delta skips a commit with the number of that
        plan if a later plan is in the table (commits.number).
        """
        newest = [self._lake.read(name).agg(F.max(by)).collect()[0][0] or 0 for name, by in _NUMBERED]
        self._number = 1 + int(max(newest))
        self._lake.take_over(self._number, TABLES)
        return self._number

    def begin(self, made: Sequence[Entry], layout: Layout, state: str = PLANNED) -> int:
        """Store a new plan and its entries, and return its number."""
        plan = self.take_number()
        self.store_entries(plan, made)
        self.store(plan, state, layout, len(made))
        return plan

    def store(self, plan: int, state: str, layout: Layout, count: int) -> None:
        """Store the row of a plan of this invocation, in place of the one that is stored."""
        row = {
            "plan": plan,
            "made_ms": self._began_ms,
            "run": self._run,
            "options": json.dumps(self._options.shown()),
            "state": state,
            "source": self._options.clean or None,
            "target": self._options.into or None,
            "layout": layouts.encoded(layout) if layout.parts else None,
            "entries": count,
        }
        self._put_rows("repairs", plan, [row])

    def store_entries(self, plan: int, made: Iterable[Entry]) -> None:
        """Store the entries of a plan, in place of those that are stored."""
        rows = [entry.row(plan) for entry in made]
        if rows:
            self._put_rows("repair_entries", plan, rows)

    def end(self, plan: int, written: int) -> None:
        """Store that a plan is done, with the number of records that it has written."""
        ended: dict[str, str | Column] = {
            "state": F.lit(DONE),
            "written": F.lit(written),
            "ended_ms": F.lit(self._now_ms()),
        }
        with self._lake.begin_commit("repairs", self._number) as table:
            table.update(F.col("plan") == plan, ended)
        self._lake.check_committed("repairs", self._number)

    def _put_rows(self, name: str, plan: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the rows of a plan in a table."""
        frame = frames.rows_of(self._lake.spark, schemas.of(name), rows)
        self._lake.replace(name, frame, f"plan = {plan}", self._number)
        self._lake.check_committed(name, self._number)

    def last_deduplication(self, source: str, target: str) -> tuple[int, Layout] | None:
        """Return the newest plan that was executed for this source and target, and its layout; None without one."""
        wanted = (F.col("source") == source) & (F.col("target") == target) & (F.col("state") != PLANNED)
        row = self._lake.read("repairs").where(wanted).orderBy(F.desc("plan")).first()
        return None if row is None else (row["plan"], layouts.decoded(row["layout"]))

    def interrupted(self, target: str) -> list[tuple[int, Layout, list[Entry]]]:
        """Return the plans that a killed process has begun to copy into a target, each with layout and entries."""
        wanted = (F.col("target") == target) & (F.col("state") == EXECUTING) & F.col("source").isNull()
        rows = self._lake.read("repairs").where(wanted & F.col("layout").isNotNull()).orderBy("plan").collect()
        return [(row["plan"], layouts.decoded(row["layout"]), self._entries(row["plan"])) for row in rows]

    def _entries(self, plan: int) -> list[Entry]:
        rows = self._lake.read("repair_entries").where(F.col("plan") == plan).drop("plan").collect()
        return [Entry(**row.asDict()) for row in rows]
