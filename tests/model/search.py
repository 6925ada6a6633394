"""Breadth-first search through all steps that a configuration allows: the first violation has the shortest trace."""

import gc
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.model import faults, recovering, writing
from tests.model.rules import Configuration, Rules, start
from tests.model.world import PROCESSES, World, has_offsets

# Far more than any search of the tests needs: bounds a search that a fault of the model makes endless.
STATES_MOST: Final = 20_000_000


@dataclass(frozen=True)
class Result:
    """The result of a search: no violation, or the shortest trace to one."""

    states: int
    depth: int
    seconds: float
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = f"{self.states} states, depth {self.depth}, {self.seconds:.1f} s"
        if not self.violation:
            return f"no violation in {size}"
        steps = "".join(f"\n{number:4} {label}" for number, label in enumerate(self.trace, 1))
        return f"{self.violation}, after {len(self.trace)} steps ({size}):{steps}"


def steps(world: World, rules: Rules, configuration: Configuration) -> Iterator[tuple[str, World]]:
    """List every step from a state, with its name. A step that uses up a part of `left` is a fault."""
    for p in PROCESSES:
        yield from writing.steps(world, p, rules, configuration)
        yield from recovering.steps(world, p, rules, configuration)
    yield from faults.steps(world, rules, configuration)


def violation(world: World) -> str:
    """Describe the violation of a state; "" if there is none."""
    if world.wrong:
        return world.wrong
    if 2 in world.copies:
        return "an event is in the log twice"
    if 0 in world.copies and not _hangs(world):
        if world.acknowledged:
            return "an acknowledged event is missing"
        if 1 in world.copies:
            return "offsets are torn from their event" if has_offsets(world) else "an atomic pair is torn"
    return ""


def _hangs(world: World) -> bool:
    """Check whether a transaction hangs, so that a missing event may still appear."""
    return any(part.hung for part in world.parts)


def search(configuration: Configuration, rules: Rules = Rules(), *, progress: bool = True) -> Result:  # noqa: B008
    """Search completely, or to the first violation. Safety first, then progress.

    Progress: from every state there is a path without further faults to a 201, and one to a state without hanging
    transactions. The paths are finite, so a system that is fair to each of its steps reaches these states.
    """
    gc.disable()  # millions of tuples without a cycle
    try:
        return _search(configuration, rules, progress)
    finally:
        gc.enable()


def _search(configuration: Configuration, rules: Rules, progress: bool) -> Result:
    started = time.monotonic()
    first = start(configuration)
    worlds = [first]
    numbers = {first: 0}
    parents, labels, depths = array("i", [-1]), [""], array("i", [0])
    quiet: tuple[array[int], array[int]] = array("i"), array("i")  # steps that are no faults: from, to
    hangs = bool(configuration.faults.skip_marker)
    at = 0

    def trace(number: int) -> tuple[str, ...]:
        way = []
        while number > 0:
            way.append(labels[number])
            number = parents[number]
        return tuple(reversed(way))

    def result(violation: str = "", number: int = 0) -> Result:
        return Result(len(worlds), depths[-1], time.monotonic() - started, violation, trace(number))

    while at < len(worlds):
        world = worlds[at]
        for label, after in steps(world, rules, configuration):
            number = numbers.setdefault(after, len(worlds))  # one hash of a state, which takes as long as many steps
            if number == len(worlds):
                worlds.append(after)
                parents.append(at)
                labels.append(label)
                depths.append(depths[at] + 1)
                if found := violation(after):
                    return result(found, number)
                assert number < STATES_MOST, "the model does not end"
            if progress and after.left == world.left:
                quiet[0].append(at)
                quiet[1].append(number)
        at += 1
    if progress:
        stuck = _first_without_way(quiet, [world.acknowledged for world in worlds])
        if stuck is not None:
            return result("no way to an answer", stuck)
        stuck = _first_without_way(quiet, [not _hangs(world) for world in worlds]) if hangs else None
        if stuck is not None:
            return result("an LSO stands still", stuck)
    return result()


def _first_without_way(edges: "tuple[array[int], array[int]]", goals: list[bool]) -> int | None:
    """Find the first state from which no goal can be reached, backwards from the goals."""
    before: list[list[int]] = [[] for _ in goals]
    for source, target in zip(*edges, strict=True):
        before[target].append(source)
    reached = bytearray(goals)
    waiting = [number for number, goal in enumerate(goals) if goal]
    while waiting:
        for source in before[waiting.pop()]:
            if not reached[source]:
                reached[source] = 1
                waiting.append(source)
    stuck = reached.find(0)
    return None if stuck < 0 else stuck
