"""The matrix: each row injects one fault under load, with a bound on the time until acknowledgements resume.

A row is a function in any `rows_*.py` of this folder:

    @row("A follower's disk is slow", brokers=3)
    def slow_disk(world: World) -> None:
        broker = world.leader()          # world.services, world.redis, world.cluster.brokers …
        broker.pause()                   # inject the fault …
        world.wait_acked(50)             # … check what must hold during the fault …
        broker.resume()                  # … and end it: the recovery time starts when the function returns

`@row(title, ...)` takes
    brokers    1 or 3 (replication 3, min ISR 2); rows share a cluster as long as each leaves it healthy
    pair       a Redis primary with a replica, behind one address (world.promote, world.link, world.address)
    stores     makes sentinels or a cluster in place of Redis (world.stores, tests/stores.py)
    proxied    whether the services reach Kafka through world.cluster.proxy (tests/faults/proxy.py)
    services   how many processes run before the row is called (0: the row starts its own with world.start_services)
    settings   FENCEPOST_ settings of every process, which override world.SETTINGS
    kafka      broker settings, for which the row gets a cluster of its own
    load       whether clients run before the row is called (otherwise it may call world.start_load)
    bound_s    the longest time from the return of the function until acknowledgements have resumed: all earlier
               requests are settled, and each running process has acknowledged a new event on each topic
    expect     the expected outcome in the table; the checker's assertions must hold in any case
    audit      run the reconciliation job too, and compare its report with the checker's findings
    in_run     one of the most important rows, which ./tests/run plays
    lacking    returns why this machine cannot play the row and what to install; "" if it can

A row fails if one of its own assertions fails. `world.notes` go into the table. `world.heal()` is called afterwards, so
a row need not start again what it killed; the measured recovery is then that of the other processes. A row that needs
another path from the service to its servers starts its own processes: `@row(title, services=0, load=False)`, then
`world.start_services(2, kafka="127.0.0.1:…", env={…})` and `world.start_load()`; it registers what it opens for them
with `world.exits` (an ExitStack, closed after the services have ended). `world.service(argv_prefix=[…])` puts a command
before the program (`ip netns exec …`). `world.start_processors(2)` starts members of a consumer group beside the
clients; their invoices and offsets are checked in the end, and count for the recovery.

`python -m tests.faults matrix [ROW…]` plays rows and writes `results/matrix.md`.
"""

import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deploy.stack import StackError
from tests.faults.checker import Verdict
from tests.faults.cluster import Cluster
from tests.faults.results import RESULTS, machine, table, update
from tests.faults.world import NotRecovered, World
from tests.stores import Store

BOUND_S: Final = 30.0
ALL_BROKERS_DIED_S: Final = 60.0
ONCE: Final = "each event once"
AFTERWARDS: Final = 30  # events acknowledged after the recovery, before the clients stop

Play = Callable[[World], None]


@dataclass(frozen=True)
class Row:
    """One row; the fields are the arguments of `row`."""

    name: str
    title: str
    play: Play
    brokers: int = 1
    pair: bool = False
    stores: Callable[[Path, str], Store] | None = None
    proxied: bool = False
    services: int = 2
    settings: Mapping[str, str] = field(default_factory=dict)
    kafka: Mapping[str, str] = field(default_factory=dict)
    load: bool = True
    bound_s: float = BOUND_S
    expect: str = ONCE
    audit: bool = False
    in_run: bool = False
    lacking: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Outcome:
    """The result of a row; `wrong` is empty if it is as expected."""

    row: Row
    wrong: list[str]
    recovery_s: float | None
    verdict: Verdict
    longest_s: float  # of any request, until its acknowledgement
    notes: list[str]
    took_s: float


ROWS: Final[dict[str, Row]] = {}


def row(title: str, **fields: object) -> Callable[[Play], Play]:
    """Add a row to the table; its name is that of the function."""

    def add(play: Play) -> Play:
        name = play.__name__.replace("_", "-")
        assert name not in ROWS, f"two rows are called {name}"
        ROWS[name] = Row(name, title, play, **fields)  # type: ignore[arg-type]
        return play

    return add


def load_rows() -> dict[str, Row]:
    """Load all rows."""
    for path in sorted(Path(__file__).parent.glob("rows_*.py")):
        importlib.import_module(f"tests.faults.{path.stem}")
    return ROWS


def play(row: Row, folder: Path, cluster: Cluster, seed: int | str = 1) -> Outcome:
    """Play a row on a healthy cluster, and leave the cluster healthy."""
    begun = time.monotonic()
    wrong: list[str] = []
    recovery_s: float | None = None
    verdict = Verdict()
    with World(folder, cluster, pair=row.pair, stores=row.stores, proxied=row.proxied, settings=row.settings) as world:
        try:
            world.start_services(row.services)
            if row.load:
                world.start_load(seed)
            row.play(world)
            assert world.load is not None, "the row has no load"
            recovery_s = world.recovery_s(row.bound_s)
            world.wait_acked(AFTERWARDS)
        except (NotRecovered, AssertionError, StackError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
        try:
            world.heal()
        except StackError as error:
            wrong.append(f"did not heal: {error}")
        if world.load is not None:
            world.load.stop()
            wrong += world.load.mistakes + world.load.hanging
            if world.processing is not None:
                wrong += world.processing.finish()
                longest_s = world.processing.longest_s
                world.notes.append(f"{world.processing.orders} orders, no offset for {longest_s:.1f} s at most")
            verdict = world.check(audit=row.audit)
            if world.repeatable:
                world.notes.append(f"{verdict.duplicates} copies; the job named {verdict.named} events")
                wrong += [] if verdict.duplicates else ["the row left no copy, so it shows nothing"]
        wrong += [f"{kind}: {text}" for kind, text in verdict.violations] + world.bugs()
        longest_s = 0.0 if world.load is None else world.load.longest_s
        return Outcome(row, wrong, recovery_s, verdict, longest_s, world.notes, time.monotonic() - begun)


class Clusters:
    """Provides a cluster for each row: the last one, if it is healthy and of the right kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exits = ExitStack()
        self._kept: tuple[tuple[int, Mapping[str, str]], Cluster] | None = None
        self._made = 0

    def __enter__(self) -> "Clusters":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def get(self, brokers: int, settings: Mapping[str, str]) -> Cluster:
        kind = (brokers, dict(settings))
        if self._kept is None or self._kept[0] != kind:
            self.drop()
            self._made += 1
            cluster = Cluster(self._folder / f"cluster-{self._made}", brokers, settings)
            self._kept = (kind, self._exits.enter_context(cluster))
        return self._kept[1]

    def drop(self) -> None:
        """Stop the cluster; the next row gets a new one."""
        self._exits.close()
        self._kept = None


def run(names: Sequence[str], say: Callable[[str], None], seed: int = 1) -> list[Outcome]:
    """Play rows, grouped by kind of cluster; keeps the folder of a failed row, and prints its path."""
    rows = load_rows()
    chosen = [rows[name] for name in names or rows]
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="fencepost-matrix-"))
    with Clusters(folder) as clusters:
        for each in sorted(chosen, key=lambda row: (row.brokers, sorted(row.kafka.items()))):
            if why := each.lacking():
                say(f"skipped {each.name}: {why}")
                continue
            cluster = clusters.get(each.brokers, each.kafka)
            outcome = play(each, folder / each.name, cluster, seed)
            outcomes.append(outcome)
            say(describe(outcome))
            write([outcome])
            if outcome.wrong:
                say("\n".join(f"    {text}" for text in outcome.wrong[:20]) + f"\n    see {folder / each.name}")
                clusters.drop()
            else:
                shutil.rmtree(folder / each.name, ignore_errors=True)
    if not any(outcome.wrong for outcome in outcomes):
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def describe(outcome: Outcome) -> str:
    recovery = "-" if outcome.recovery_s is None else f"{outcome.recovery_s:.1f} s"
    word = "FAILED" if outcome.wrong else "ok"
    return f"{word:<7}{outcome.row.name:<45}{recovery:>8} of {outcome.row.bound_s:.0f} s   {'; '.join(outcome.notes)}"


def write(outcomes: Sequence[Outcome]) -> None:
    """Renew these rows in results/matrix.md; other rows keep their last results."""
    lines = {
        outcome.row.name: [
            outcome.row.title,
            "**FAILED**" if outcome.wrong else outcome.row.expect,
            "-" if outcome.recovery_s is None else f"{outcome.recovery_s:.1f}",
            f"{outcome.row.bound_s:.0f}",
            f"{outcome.longest_s:.1f}",
            f"{outcome.verdict.acknowledged}",
            f"{outcome.verdict.lost} / {outcome.verdict.duplicates}",
            "; ".join(outcome.notes),
            machine(),
        ]
        for outcome in outcomes
    }
    heads = (
        "row",
        "what is broken",
        "outcome",
        "resumed after s",
        "bound s",
        "longest wait s",
        "keys",
        "lost / twice",
        "notes",
        "measured",
    )
    RESULTS.mkdir(exist_ok=True)
    known = update(RESULTS / "matrix.md", heads, lines, order=list(load_rows()))
    (RESULTS / "matrix.md").write_text(
        "# The matrix\n\n`python -m tests.faults matrix [ROW…]` plays rows and renews their lines. Each ends with the "
        "checker's verdict over all topics.\n\n" + table(heads, known)
    )
