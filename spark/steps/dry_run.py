"""What a run would read, and about how long it would take: `--dry-run`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Log, Plan


class Preview(NamedTuple):
    """The plan that a run would make; the number of an interrupted run that a run would look at first, or None; the
    reports of the last runs as in `runs`, newest first."""

    plan: Plan
    interrupted: int | None
    reports: Sequence[Mapping[str, Any]]


def lines(preview: Preview) -> Iterator[str]:
    """Format a preview in lines for a terminal."""
    plan = preview.plan
    if preview.interrupted is not None:
        yield f"first      run {preview.interrupted} was interrupted: it is finished, or planned again as below"
    yield f"run        {plan.run}"
    for role in (DATA, LEDGER, REQUESTS):
        for topic in sorted({log.topic for log in plan.of(role)}):
            yield _line([log for log in plan.of(role) if log.topic == topic])
    yield f"total      {plan.unread:,} offsets"
    yield f"time       {estimate(plan.unread, preview.reports)}"


def _line(logs: Sequence[Log]) -> str:
    """Describe the logs of a topic."""
    unread = [log for log in logs if log.start < log.end]
    blocked = sum(log.is_blocked for log in logs)
    text = f"read       {logs[0].topic}: {sum(log.end - log.start for log in logs):,} offsets in {len(unread)} of "
    text += f"{len(logs)} partitions"
    return text + (f", {blocked} blocked by an open transaction" if blocked else "")


def estimate(offsets: int, reports: Sequence[Mapping[str, Any]]) -> str:
    """Estimate the time of a run that reads so many offsets, by earlier runs: the largest has the time for an offset,
    and no run is faster than the fastest."""
    known = [(report["cost"]["offsets"], sum(report["cost"]["seconds"].values()), report) for report in reports]
    if not known:
        return "not known: there is no earlier run"
    most, seconds, largest = max(known, key=lambda run: run[0])
    about_s = max(min(run[1] for run in known), seconds * offsets / most if most else 0)
    return f"about {about_s:,.0f} s, as run {largest['run']['number']} read {most:,} offsets in {seconds:,.0f} s"
