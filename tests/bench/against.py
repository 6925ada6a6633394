"""Compares this tree's service with that of another revision: `python -m tests.bench against REV`.

The revision is unpacked into a temporary folder, and this tree's files are copied into another one. Each has its own
virtual environment and compiled modules, made in the same way. Both services run at the same time, each in its own
namespace, on one warm broker and one warm Redis. They are loaded in turn, so that a change of the machine's speed
affects both; and they are started again several times, in turn first, because two processes of the same code differ by
their places in memory. Each ratio is this tree's figure over the revision's, round by round. The goals are the floors
for a change of the service.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from deploy.places import ROOT
from tests.bench import replay, results
from tests.bench.client import OneClient
from tests.bench.rows import Goal, NotRealWork, Row, quantile, ratios
from tests.bench.single import one_by_one
from tests.bench.stage import Stage, Target
from tests.revisions import Checkout, output_of


@dataclass(frozen=True)
class Load:
    """The load for one ratio, and the floor of the ratio."""

    of: str
    goal: Goal
    connections: int = 1  # one: a client that waits for each answer
    batch: int = 0  # events in each request
    replays: bool = False


LOADS: Final = {
    "post256": Load("POST /events, 256 connections", Goal(least=0.85), 256),
    "post64": Load("POST /events, 64 connections", Goal(least=0.92), 64),
    "batch100": Load("batches of 100, 16 connections", Goal(least=0.85), 16, batch=100),
    "batch1000": Load("batches of 1,000, 4 connections", Goal(least=0.85), 4, batch=1_000),
    "one": Load("one client", Goal(most=1.08)),
    "replay": Load("replays, 256 connections", Goal(least=0.9), 256, replays=True),
}


@dataclass(frozen=True)
class Plan:
    """The revision to compare with, the loads, the number of rounds, and the folder of the result."""

    revision: str
    loads: Sequence[str] = tuple(LOADS)
    rounds: int = 0  # after each start; 0: the number of the depth
    starts: int = 0  # of both services; 0: the number of the depth
    depth: str = "standard"
    settings: dict[str, Any] = field(default_factory=dict)  # for this tree's side
    folder: Path = results.KEPT
    name: str = "against"
    least: float = 0.0  # floor of the ratios of rates, instead of their own; 0 for none

    def goal_of(self, load: Load) -> Goal:
        """Return the floor of a load's ratio."""
        return Goal(least=self.least) if self.least and load.goal.least else load.goal

    @property
    def described(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.settings.items()]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """Parse a command line."""
        parser = argparse.ArgumentParser(prog="python -m tests.bench against", description=(__doc__ or "").strip())
        parser.add_argument("revision", metavar="REV", help="a commit, a tag or a branch of this repository")
        parser.add_argument("--rows", default=",".join(LOADS), help=f"of {','.join(LOADS)}")
        parser.add_argument("--rounds", type=int, default=0, help="of each row after each start (3)")
        parser.add_argument("--starts", type=int, default=0, help="of both services (5)")
        parser.add_argument("--quick", action="store_const", dest="depth", const="quick", default="standard")
        parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of this tree's")
        parser.add_argument("--name", default="against", help="of the result that is kept")
        parser.add_argument("--least", type=float, default=0.0, metavar="RATIO", help="the floor of each rate's ratio")
        parser.add_argument("--results", type=Path, help="folder for what is measured (--quick: build/bench)")
        found = parser.parse_args(arguments)
        loads = found.rows.split(",")
        if unknown := set(loads) - LOADS.keys():
            parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(LOADS)}")
        folder = found.results or (ROOT / "build" / "bench" if found.depth == "quick" else results.KEPT)
        settings = dict(setting.split("=", 1) for setting in found.set)
        return cls(
            revision=found.revision,
            loads=loads,
            rounds=found.rounds,
            starts=found.starts,
            depth=found.depth,
            settings=settings,
            folder=folder.absolute(),
            name=found.name,
            least=found.least,
        )


def _compiled(root: Path) -> str:
    """Check whether a project's inner loops are compiled. Raises NotRealWork if the project imports another service."""
    code = "import service, service.native; print(service.__file__, service.native.COMPILED)"
    python = Path(sys.executable) if root == ROOT else root / ".venv" / "bin" / "python"
    file, _, compiled = output_of(str(python), "-c", code, cwd=root).strip().rpartition(" ")
    if not Path(file).is_relative_to(root):
        raise NotRealWork(f"the service of {root} is {file}")
    return compiled


@dataclass
class _Figures:
    """The figures of one service for one load, a round each."""

    measured: list[float] = field(default_factory=list)  # answers a second; for one client, its p50 in ms
    p99_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # for a request; not measured for one client


class _Side:
    """One of the two services: its code and its settings, and its figures for each load."""

    def __init__(self, root: Path, settings: dict[str, Any], loads: Sequence[str]) -> None:
        self.root = root
        self.settings = settings
        self.figures = {name: _Figures() for name in loads}

    @contextmanager
    def started(self, stage: Stage) -> Iterator["_Running"]:
        """Run a process of the service."""
        with stage.target(root=self.root, **self.settings) as target:
            target.warm(stage.pick(2, 4), 64)  # the first answers of a cold broker are slow
            yield _Running(self, target, replay.write_known(target, stage.pick(200, 2_000)))


@dataclass(frozen=True)
class _Running:
    """A running process of a side."""

    side: _Side
    target: Target
    known: dict[str, Any]  # arguments of load.lua that send known keys again

    def run(self, name: str, seconds: float, count: int) -> None:
        """Run one round of a load: `seconds` long, or `count` requests of one client."""
        load, figures = LOADS[name], self.side.figures[name]
        if load.connections == 1:
            with OneClient(self.target.service.port) as client:
                took_ms = one_by_one(self.target, client, count)
            self.target.answered += count
            figures.measured.append(quantile(took_ms, 0.5))
            figures.p99_ms.append(quantile(took_ms, 0.99))
            return
        if load.replays:
            loaded, replayed = replay.run(self.target, seconds, load.connections, self.known)
            if replayed < loaded.requests or not loaded.requests:
                raise NotRealWork(f"{replayed:.0f} of {loaded.requests} answers were replays")
        else:
            loaded = self.target.load(seconds, load.connections, batch=load.batch)
        figures.measured.append(loaded.rate)
        figures.p99_ms.append(loaded.p99_ms)
        figures.cpu_us.append(self.target.cpu_us)


def measure(stage: Stage, this: Checkout, other: Checkout, plan: Plan) -> list[Row]:
    """Run all loads of a plan on both services.

    Raises:
        NotRealWork: a side's work was not real, or one of them only is compiled.
    """
    compiled = [_compiled(root) for root in (this.root, other.root)]
    if compiled[0] != compiled[1]:
        raise NotRealWork(f"compiled: this tree {compiled[0]}, {other.commit} {compiled[1]}")
    ours, theirs = _Side(this.root, plan.settings, plan.loads), _Side(other.root, {}, plan.loads)
    for number in range(plan.starts or stage.pick(1, 5)):
        _run_once(stage, plan, (theirs, ours) if number % 2 else (ours, theirs), number)
    return [row for name in plan.loads for row in _rows(plan, name, ours, theirs)]


def _run_once(stage: Stage, plan: Plan, sides: tuple[_Side, _Side], number: int) -> None:
    """Start both services, in this order, and run all rounds of all loads."""
    seconds, count = stage.pick(1, 3), stage.pick(50, 600)
    with sides[0].started(stage) as first, sides[1].started(stage) as second:
        running = (first, second)
        _warm_up(stage, running, broker_is_cold=number == 0)
        for name in plan.loads:
            for turn in range(plan.rounds or stage.pick(1, 3)):
                for side in running[:: -1 if turn % 2 else 1]:
                    side.run(name, seconds, count)
        for side in running:
            side.target.check()


def _warm_up(stage: Stage, running: Sequence[_Running], broker_is_cold: bool) -> None:
    if stage.depth == "quick":
        return
    for side in running:
        if broker_is_cold:
            stage.warm_up(side.target, 3, 256)
        side.target.warm(3, 16, batch=100)


def _rows(plan: Plan, name: str, ours: _Side, theirs: _Side) -> list[Row]:
    load, mine, other = LOADS[name], ours.figures[name], theirs.figures[name]
    what, unit = ("p50", "ms") if load.connections == 1 else ("requests", "/s")
    rows = [
        Row(f"{load.of}: {what} over the revision's", "x", ratios(mine.measured, other.measured), plan.goal_of(load)),
        Row(f"{load.of}: {what}", unit, mine.measured),
        Row(f"{load.of}: {what}, the revision", unit, other.measured),
        Row(f"{load.of}: p99 over the revision's", "x", ratios(mine.p99_ms, other.p99_ms)),
    ]
    if mine.cpu_us:
        rows.append(Row(f"{load.of}: CPU a request over the revision's", "x", ratios(mine.cpu_us, other.cpu_us)))
        rows.append(Row(f"{load.of}: CPU a request", "µs", mine.cpu_us))
    return rows
