"""Prints tables and findings, in colour on a terminal."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from service.claims.states import Claimed, Delivered, DeliveredBatch
from service.cli.finding import Finding, Level, worst
from service.cli.look import KeyView, OffsetsAt, SlotsView
from service.core.settings import Settings
from service.core.time_of_day import LAST_SECOND

# The width without a terminal, with which a finding takes one or two lines.
PLAIN_WIDTH: Final = 140
POSITIONS_SHOWN: Final = 10
STYLES: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
AREAS: Final = {
    "rules": "Rules",
    "login": "Login at Kafka",
    "kafka": "Brokers",
    "access": "ACLs",
    "topics": "Topics",
    "redis": "Redis",
    "clocks": "Clocks",
    "registry": "Schema Registry",
    "issuers": "Issuers of tokens",
}


class _Console(Console):
    """A console whose reader may stop early (`| head`), which does not change the exit code."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def _console(*, stderr: bool = False) -> Console:
    # No emoji: `:a:` in a key or a name is printed as it is.
    console = _Console(stderr=stderr, highlight=False, emoji=False)
    return console if console.is_terminal else _Console(stderr=stderr, highlight=False, emoji=False, width=PLAIN_WIDTH)


out: Final = _console()
errors: Final = _console(stderr=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; yields a function of the work done and the total."""
    with Progress(transient=True, console=errors, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def document(body: dict[str, Any]) -> None:
    """Print a JSON document."""
    out.print(json.dumps(body, indent=2), markup=False, soft_wrap=True)


def findings(found: list[Finding]) -> None:
    """Print findings by area, with what to change for those that did not pass."""
    order = list(AREAS)
    widest = max((len(one.check.partition(".")[2]) for one in found), default=0)
    for area, members in groupby(sorted(found, key=lambda one: order.index(one.area)), lambda one: one.area):
        out.print(Text(AREAS[area], style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=max(map(len, Level)) + 2)
        table.add_column(no_wrap=True, min_width=widest)
        table.add_column()
        for one in members:
            name = one.check.partition(".")[2]
            text = Text(f"{one.where}: {one.found}" if one.where else one.found)
            table.add_row(Text(f"  {one.level.value}", style=STYLES[one.level]), name, text)
            if one.change:
                table.add_row("", "", Text(f"→ {one.change}", style="italic"))
        out.print(table)
    counts = {level: sum(one.level is level for one in found) for level in Level}
    summary = f"errors {counts[Level.ERROR]}, warnings {counts[Level.WARNING]}, ok {counts[Level.OK]}"
    out.print(Text(summary, style=STYLES[worst(found)]))


def slots(found: SlotsView) -> None:
    """Print a line for each slot that is held or dead, and the number of free slots."""
    generation = (
        "none: Redis has lost it, or no process has started yet" if found.generation is None else found.generation
    )
    out.print(f"generation {generation}, store {found.store}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("slot", "term", "producer id", "epoch", "applied", "freed", "ledger end"):
        table.add_column(name, justify="right")
    table.add_column("state")
    table.add_column("owner")
    table.add_column("lease", justify="right")
    taken = [row for row in found.rows if row.view.state != "free"]
    for row in taken:
        view, begin = row.view, row.begin
        producer = (begin.producer_id, begin.epoch) if begin else (None, None)
        numbers = (view.slot, row.term, *producer, view.applied, view.freed, row.end)
        style = "green" if view.state == "held" else "bold red"
        lease = f"{view.lease_ms / 1000:.1f} s" if view.holder else "-"
        cells = ("-" if number is None else f"{number}" for number in numbers)
        table.add_row(*cells, Text(view.state, style=style), view.holder or "-", lease)
    out.print(table)
    out.print(f"{len(found.rows) - len(taken)} of {len(found.rows)} slots are free")


def key(found: KeyView, settings: Settings) -> None:
    """Print what Redis and the ledger hold of a key."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("event id", found.id.hex())
    table.add_row("Redis", Text(found.store or _state(found, settings)))
    for one in found.written:
        entry = one.entry
        member = (
            "" if entry.i is None else f", member {entry.i} of the batch {entry.batch.hex() if entry.batch else ''}"
        )
        text = (
            f"slot {one.slot}, offset {one.offset}: {entry.topic}[{entry.partition}] offset {entry.offset}{member}, "
            f"by producer {one.producer_id} epoch {one.epoch} of {one.instance}, accepted {when(entry.at)}"
        )
        table.add_row("ledger", Text(text))
    for committed in found.offsets:
        table.add_row("offsets", Text(_offsets(committed)))
    if not found.written and not found.offsets:
        table.add_row("ledger", "no entry")
    out.print(table)
    if not found.known or isinstance(found.found.state, Claimed):
        out.print(Text("Only a POST with this key proves that its event is absent: it may be in flight.", "italic"))


def _offsets(committed: OffsetsAt) -> str:
    offsets = committed.offsets
    shown = [f"{each.topic}[{each.partition}] {each.offset}" for each in offsets.positions[:POSITIONS_SHOWN]]
    if (more := len(offsets.positions) - POSITIONS_SHOWN) > 0:
        shown.append(f"{more} more (--json)")
    return (
        f"slot {committed.slot}, offset {committed.offset}: group {offsets.group} at {', '.join(shown)}, by member "
        f"{offsets.member} of generation {offsets.generation}, by producer {committed.producer_id} epoch "
        f"{committed.epoch} of {committed.instance}, accepted {when(offsets.at)}"
    )


def _state(found: KeyView, settings: Settings) -> str:
    match found.found.state:
        case Claimed(slot, term, at, _):
            outcome = "which never wrote it: the next POST does" if found.found.dead else "which may be writing it"
            return f"claimed by slot {slot} in term {term}, {outcome}; accepted {when(at)}"
        case Delivered(at, _, topic, partition, offset, _, ttl_s, refused):
            expiry = _expiry(at, ttl_s or settings.key_ttl_s)
            how = f"refused ({refused}), in quarantine" if refused else "delivered"
            return f"{how}: {topic}[{partition}] offset {offset}; accepted {when(at)}, {expiry}"
        case DeliveredBatch(at, _, count, ttl_s):
            expiry = _expiry(at, ttl_s or settings.key_ttl_s)
            return f"delivered: an atomic batch of {count}; accepted {when(at)}, {expiry}"
    return "no entry"


def _expiry(at: int, ttl_s: int) -> str:
    return f"remembered until {when(at + ttl_s * 1000)}"


def when(ms: int) -> str:
    """Format a time, in ms since the Unix epoch, as ISO 8601 in UTC; one that no date has, as a number."""
    if not 0 <= ms // 1000 <= LAST_SECOND:  # out of range, such as microseconds
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
