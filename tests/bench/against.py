"""Compares this tree's service with that of another revision: `python -m tests.bench against REV`.

The revision is unpacked into a temporary folder, with its own virtual environment and compiled modules. Both services
run at the same time, each in its own namespace, on one warm broker and one warm Redis. They are loaded in turn, so that
a change of the machine's speed affects both. Each ratio is this tree's figure over the revision's, round by round. The
goals are the floors for a change of the service.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from deploy import places
from deploy.console import StackError
from deploy.places import ROOT
from tests.bench import replay, results
from tests.bench.client import OneClient
from tests.bench.rows import Goal, NotRealWork, Row, quantile, ratios
from tests.bench.single import one_by_one
from tests.bench.stage import Stage, Target


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
    rounds: int = 0  # 0: the number of the depth
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
        parser.add_argument("--rounds", type=int, default=0, help="of each row (9)")
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
            found.revision, loads, found.rounds, found.depth, settings, folder.absolute(), found.name, found.least
        )


@dataclass(frozen=True)
class Checkout:
    """A project to run: its folder and its commit."""

    root: Path
    commit: str


def checkout(revision: str, folder: Path) -> Checkout:
    """Unpack a revision into a folder, and create its virtual environment there.

    Raises:
        StackError: git does not know it, or it could not be installed.
    """
    found = unpack(revision, folder)
    _run(_uv(), "sync", "--quiet", "--frozen", "--no-dev", "--extra=service", cwd=folder)
    return found


def unpack(revision: str, folder: Path) -> Checkout:
    """Read the files of a revision. Raises StackError if git does not know it."""
    commit = _run("git", "rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}", cwd=ROOT).strip()
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    _run("git", "archive", "--format=tar", f"--output={archive}", commit, cwd=ROOT)
    _run("tar", "-xf", str(archive), cwd=folder)
    archive.unlink()
    return Checkout(folder, commit)


def _uv() -> str:
    """Find uv: on PATH, or where the local stack has installed it."""
    found = shutil.which("uv") or str(places.cache() / "uv" / "bin" / "uv")
    if not Path(found).exists():
        raise StackError("no uv here, which installs the other revision: run ./tests/run once, or install uv")
    return found


def _run(*command: str, cwd: Path) -> str:
    # These variables would make uv use another environment than the folder's own .venv.
    left_out = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StackError(f"{' '.join(command)} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _compiled(root: Path) -> str:
    """Check whether a project's inner loops are compiled. Raises NotRealWork if the project imports another service."""
    told = "import service, service.native; print(service.__file__, service.native.COMPILED)"
    python = Path(sys.executable) if root == ROOT else root / ".venv" / "bin" / "python"
    file, _, compiled = _run(str(python), "-c", told, cwd=root).strip().rpartition(" ")
    if not Path(file).is_relative_to(root):
        raise NotRealWork(f"the service of {root} is {file}")
    return compiled


class _Side:
    """One of the two services, and its figures for one load."""

    def __init__(self, target: Target, known: dict[str, Any]) -> None:
        self.target = target
        self.figures: list[float] = []  # answers a second; for one client, its p50 in ms
        self.p99_ms: list[float] = []
        self.cpu_us: list[float] = []  # for a request; not measured for one client
        self._known = known

    def begin(self) -> None:
        """Reset the figures for the next load."""
        self.figures, self.p99_ms, self.cpu_us = [], [], []

    def run(self, load: Load, seconds: float, count: int) -> None:
        """Run one round: `seconds` long, or `requests` of one client."""
        if load.connections == 1:
            with OneClient(self.target.service.port) as client:
                took_ms = one_by_one(self.target, client, count)
            self.target.answered += count
            self.figures.append(quantile(took_ms, 0.5))
            self.p99_ms.append(quantile(took_ms, 0.99))
            return
        if load.replays:
            loaded, replayed = replay.run(self.target, seconds, load.connections, self._known)
            if replayed < loaded.requests or not loaded.requests:
                raise NotRealWork(f"{replayed:.0f} of {loaded.requests} answers were replays")
        else:
            loaded = self.target.load(seconds, load.connections, batch=load.batch)
        self.figures.append(loaded.rate)
        self.p99_ms.append(loaded.p99_ms)
        self.cpu_us.append(self.target.cpu_us)


def measure(stage: Stage, other: Checkout, plan: Plan) -> list[Row]:
    """Run all loads of a plan on both services.

    Raises:
        NotRealWork: a side's work was not real, or one of them only is compiled.
    """
    compiled = [_compiled(root) for root in (ROOT, other.root)]
    if compiled[0] != compiled[1]:
        raise NotRealWork(f"compiled: this tree {compiled[0]}, {other.commit} {compiled[1]}")
    rounds = plan.rounds or stage.pick(1, 9)
    with _side(stage, ROOT, plan.settings) as ours, _side(stage, other.root, {}) as theirs:
        _warm_up(stage, ours.target, theirs.target)
        rows = [row for name in plan.loads for row in _compare(stage, plan, LOADS[name], (ours, theirs), rounds)]
        for side in (ours, theirs):
            side.target.check()
    return rows


@contextmanager
def _side(stage: Stage, root: Path, settings: dict[str, Any]) -> Iterator[_Side]:
    with stage.target(root=root, **settings) as target:
        target.warm(stage.pick(2, 4), 64)  # the first answers of a cold broker are slow
        yield _Side(target, replay.write_known(target, stage.pick(200, 2_000)))


def _warm_up(stage: Stage, ours: Target, theirs: Target) -> None:
    if stage.depth != "quick":
        ours.warm_up(3, 256)
        theirs.warm_up(3, 256)
        for target in (ours, theirs):
            target.warm(3, 16, batch=100)


def _compare(stage: Stage, plan: Plan, load: Load, sides: tuple[_Side, _Side], rounds: int) -> list[Row]:
    seconds, count = stage.pick(1, 3), stage.pick(50, 600)
    for side in sides:
        side.begin()
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:
            side.run(load, seconds, count)
    ours, theirs = sides
    what, unit = ("p50", "ms") if load.connections == 1 else ("requests", "/s")
    rows = [
        Row(f"{load.of}: {what} over the revision's", "x", ratios(ours.figures, theirs.figures), plan.goal_of(load)),
        Row(f"{load.of}: {what}", unit, ours.figures),
        Row(f"{load.of}: {what}, the revision", unit, theirs.figures),
        Row(f"{load.of}: p99 over the revision's", "x", ratios(ours.p99_ms, theirs.p99_ms)),
    ]
    if ours.cpu_us:
        rows.append(Row(f"{load.of}: CPU a request over the revision's", "x", ratios(ours.cpu_us, theirs.cpu_us)))
        rows.append(Row(f"{load.of}: CPU a request", "µs", ours.cpu_us))
    return rows
