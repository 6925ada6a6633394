"""Complete merged rows by other rows: the ids of copies with only a key, and the answers 202 and 504."""

from collections.abc import Callable

from pyspark.sql import DataFrame

from spark.engine import frames, session
from spark.reading import run_plan
from spark.reading.run_plan import RunContext
from spark.rules import cross_hour
from spark.step_timer import StepTimer
from spark.tables import hours
from spark.tables.lake import Lake


def complete_rows(lake: Lake, context: RunContext, timer: StepTimer) -> None:
    """Complete the rows of `deliveries` after the merge of a run; idempotent.

    Only recent hours are read: those of the report's window, of what was unread, and of the longest key retention
    before these.
    """
    first_hour = hours.text_of(context.unread_since - context.settings.longest_ttl_ms)
    if context.compares_ids:
        with timer.step("compare ids"), session.compiling(lake.spark, context.plan.unread):
            _change_ids(lake, context, first_hour)
    with timer.step("settle doubts"):
        _mark_past_end(lake, context, first_hour)
        _settle_by_other_rows(lake, context, first_hour)


def _change_ids(lake: Lake, context: RunContext, first_hour: str) -> None:
    """Give copies with only a key, read since the last run that compared ids, the id of the event that they are copies
    of."""
    found = cross_hour.copies_of_other_ids(_rows_since(lake, first_hour), context.of_last_run("last_pass", 0))
    _update(found, lake.change_ids, context.plan.run)


def _settle_by_other_rows(lake: Lake, context: RunContext, first_hour: str) -> None:
    """Settle each 202 or 504 by other rows of its id, in any hour, also without the pass over all ids."""
    run, truncated = context.plan.run, bool(run_plan.vanished(context.plan, context.last_plan))
    found = cross_hour.settled_elsewhere(_rows_since(lake, first_hour), run, truncated=truncated)
    _update(found, lake.settle_elsewhere, run)


def _mark_past_end(lake: Lake, context: RunContext, first_hour: str) -> None:
    """Store which claims of earlier runs were past the end of their log, where that end was unknown until now."""
    ends = run_plan.newly_known_ends(context.plan, context.last_plan)
    if ends and lake.exists("deliveries"):
        lake.mark_past_end(ends, first_hour, context.plan.run)


def _rows_since(lake: Lake, first_hour: str) -> DataFrame:
    """Return the rows (deliveries.ROW) of this hour and later ones."""
    return lake.read_cached("deliveries").where(hours.since(first_hour))


def _update(found: DataFrame | None, write: Callable[[DataFrame, list[str], int], None], run: int) -> None:
    """Write changes of rows into the hours of these rows."""
    if found is None:
        return
    # A checkpoint, so that the MERGE does not read the table that it writes.
    found = frames.checkpointed(found)
    if touched := hours.of(found):
        write(found, touched, run)
