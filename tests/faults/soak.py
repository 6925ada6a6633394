"""The soak: faults drawn from a seed, several at a time, under load; then the checker's verdict.

`python -m tests.faults soak --seed N --minutes M` plays legs of some minutes, each in a new namespace on the same
cluster, so that a failing leg is short. Faults, pauses and clients depend on the seed; the timing of the machine does
not, so a failure may need several tries to occur again. The faults of a failed leg are shrunk, by playing again, to the
fewest that still make it fail, and printed. `results/soak.md` is written after each leg that passes.
"""

import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

from deploy.stack import StackError
from tests.faults.checker import Verdict
from tests.faults.cluster import Cluster
from tests.faults.injectors import INJECTORS, Injector, load_injectors
from tests.faults.results import RESULTS, machine, table
from tests.faults.shrink import OutOfTime, shrink
from tests.faults.world import NotRecovered, World

BOUND_S: Final = 60.0
GROUP: Final = 7  # the most faults between two moments without any
PAUSE_S: Final = (1.5, 5.0)
AFTERWARDS: Final = 20  # events acknowledged after the last fault
CHECK_S: Final = 3600.0  # the parts of the checker have bounds of their own


@dataclass(frozen=True)
class Planned:
    """A fault of a leg, with a seed of its own.

    Faults of one group that concern the same part come one after the other, others at the same time.
    """

    group: int
    name: str
    seed: str
    pause_s: float  # after the fault

    def __str__(self) -> str:
        return f"{self.name} (group {self.group}, seed {self.seed!r})"


@dataclass
class Leg:
    """The result of a leg; `wrong` is empty if all is well."""

    played: list[Planned] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    recoveries: list[tuple[tuple[str, ...], float]] = field(default_factory=list)  # the faults of a group, seconds
    verdict: Verdict = field(default_factory=Verdict)
    requests: int = 0
    longest_s: float = 0.0
    hanging: int = 0
    took_s: float = 0.0


@dataclass(frozen=True)
class Options:
    """The options of a leg."""

    services: int = 3
    odd: bool = False  # whether one process has a network and a clock of its own
    pair: bool = True
    proxied: bool = True
    keys_per_s: float = 150.0
    clients: int = 16
    mutants: tuple[str, ...] = ()
    audit: bool = False


def plan(seed: str, injectors: Sequence[Injector]) -> Iterator[Planned]:
    """Draw faults without end."""
    rng = random.Random(seed)
    weights = [each.weight for each in injectors]
    group = 0
    while True:
        group += 1
        drawn = rng.choices(injectors, weights, k=rng.randint(1, GROUP))
        pause_s = rng.uniform(*PAUSE_S)
        for number, each in enumerate(drawn):
            yield Planned(group, each.name, f"{seed}/{group}/{number}", pause_s)


def play(
    folder: Path,
    cluster: Cluster,
    faults: Iterable[Planned],
    seconds: float,
    seed: str,
    options: Options,
    say: Callable[[str], None] = lambda _: None,
) -> Leg:
    """Play faults until they or the time have ended, and run the checker."""
    begun = time.monotonic()
    leg = Leg()
    with World(folder, cluster, pair=options.pair, proxied=options.proxied, mutants=options.mutants) as world:
        try:
            start(world, options)
            world.start_load(seed, clients=options.clients, keys_per_s=options.keys_per_s)
            until = time.monotonic() + seconds
            for _, together in groupby(faults, lambda fault: fault.group):
                if time.monotonic() > until:
                    break
                group = list(together)
                leg.played += group
                _inject(world, group)
                names = tuple(fault.name for fault in group)
                leg.recoveries.append((names, world.recovery_s(BOUND_S)))
                say(f"  {leg.recoveries[-1][1]:5.1f} s after {' + '.join(names)}")
                time.sleep(group[0].pause_s)
            world.wait_acked(AFTERWARDS)
        except (NotRecovered, AssertionError, StackError, TimeoutError) as error:
            leg.hanging += isinstance(error, NotRecovered)
            world.tell_waits()
            leg.wrong.append(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        if world.load is not None:
            try:
                world.heal()
            except StackError as error:
                leg.wrong.append(f"did not heal: {error}")
            load = world.load
            load.stop()
            leg.requests, leg.longest_s = load.attempts, load.longest_s
            leg.hanging += len(load.hanging)
            leg.wrong += load.mistakes + load.hanging
            leg.verdict = world.check(audit=options.audit, timeout_s=CHECK_S)
        leg.wrong += [f"{kind}: {text}" for kind, text in leg.verdict.violations] + world.bugs()
    leg.took_s = time.monotonic() - begun
    return leg


def start(world: World, options: Options) -> None:
    """Start the processes of a leg."""
    world.start_services(options.services - options.odd)
    if options.odd:
        world.start_odd_service()


def _inject(world: World, group: Sequence[Planned]) -> None:
    """Play the faults of a group, each part in a thread of its own; raises the first failure."""
    failed: list[BaseException] = []
    parts: dict[str, list[Planned]] = defaultdict(list)
    for fault in group:
        parts[INJECTORS[fault.name].part].append(fault)

    def one_after_the_other(faults: Sequence[Planned]) -> None:
        for fault in faults:
            try:
                INJECTORS[fault.name].inject(world, random.Random(fault.seed))
            except BaseException as error:
                error.add_note(f"in {fault}")
                failed.append(error)
                return

    threads = [threading.Thread(target=one_after_the_other, args=(each,), name=part) for part, each in parts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


# ---------------------------------------------------------------------------------------------------- a whole run


def run(
    seed: int,
    minutes: float,
    say: Callable[[str], None],
    options: Options,
    *,
    leg_minutes: float = 10.0,
    shrink_minutes: float = 20.0,
    brokers: int = 3,
    only: Sequence[str] = (),
) -> tuple[list[Leg], list[Planned]]:
    """Play legs until the time is over or one fails; shrink the faults of a failed leg."""
    known = load_injectors()
    legs: list[Leg] = []
    folder = Path(tempfile.mkdtemp(prefix="fencepost-soak-"))
    with Cluster(folder / "cluster", brokers) as cluster:
        usable = _usable(folder / "look", cluster, [known[name] for name in only or known], options)
        left_s = minutes * 60
        while left_s > 0:
            name = f"{seed}/{len(legs)}"
            here = folder / f"leg-{len(legs)}"
            leg = play(here, cluster, plan(name, usable), min(left_s, leg_minutes * 60), name, options, say)
            legs.append(leg)
            left_s -= leg_minutes * 60
            say(_line(name, leg))
            if leg.wrong:
                say("\n".join(f"    {text}" for text in leg.wrong[:30]) + f"\n    see {here}")
                return legs, _fewest(folder, cluster, leg, name, say, options, shrink_minutes)
            shutil.rmtree(here, ignore_errors=True)
            write(seed, min(minutes, len(legs) * leg_minutes), legs, options)
    shutil.rmtree(folder, ignore_errors=True)
    return legs, []


def _usable(folder: Path, cluster: Cluster, injectors: Sequence[Injector], options: Options) -> list[Injector]:
    with World(folder, cluster, pair=options.pair, proxied=options.proxied) as world:
        start(world, options)
        return [each for each in injectors if each.available(world)]


def _fewest(
    folder: Path, cluster: Cluster, leg: Leg, seed: str, say: Callable[[str], None], options: Options, minutes: float
) -> list[Planned]:
    deadline = time.monotonic() + minutes * 60
    tries = 0

    def fails(faults: Sequence[Planned]) -> bool:
        nonlocal tries
        if time.monotonic() > deadline:
            raise OutOfTime
        tries += 1
        here = folder / f"try-{tries}"
        again = play(here, cluster, faults, leg.took_s, seed, options)
        word = "still fails" if again.wrong else "passes"
        say(f"  {word:<12}with {len(faults)}: {[str(each) for each in faults][:6]}")
        if not again.wrong:
            shutil.rmtree(here, ignore_errors=True)
        return bool(again.wrong)

    fewest = shrink(leg.played, fails)
    say(f"the fewest faults that still make it fail ({tries} tries):")
    say("\n".join(f"    {fault}" for fault in fewest) or "    none: it fails without any")
    return fewest


def _line(name: str, leg: Leg) -> str:
    recovery = _quantiles([seconds for _, seconds in leg.recoveries])
    verdict = leg.verdict
    word = "FAILED" if leg.wrong else "ok"
    return (
        f"{word:<7}leg {name}: {verdict.acknowledged} of {verdict.keys} keys acknowledged, {len(leg.played)} faults, "
        f"{verdict.lost} lost, {verdict.duplicates} duplicates, {leg.hanging} hanging; resumed after {recovery}; "
        f"longest wait {leg.longest_s:.1f} s ({leg.took_s:.0f} s)"
    )


def _quantiles(values: Sequence[float]) -> str:
    return f"p50 {statistics.median(values):.1f} s, max {max(values):.1f} s" if values else "-"


def write(seed: int, minutes: float, legs: Sequence[Leg], options: Options) -> None:
    """Write results/soak.md."""
    recoveries = [each for leg in legs for each in leg.recoveries]
    verdicts = [leg.verdict for leg in legs]
    figures = {
        "seed": f"{seed}",
        "minutes": f"{minutes:g}, in {len(legs)} leg(s)",
        "keys": f"{sum(verdict.keys for verdict in verdicts):,}",
        "acknowledged": f"{sum(verdict.acknowledged for verdict in verdicts):,}",
        "given up in doubt by their client": f"{sum(verdict.doubtful for verdict in verdicts):,}",
        "requests": f"{sum(leg.requests for leg in legs):,}",
        "faults": f"{sum(len(leg.played) for leg in legs):,}",
        "lost": f"{sum(verdict.lost for verdict in verdicts)}",
        "duplicates": f"{sum(verdict.duplicates for verdict in verdicts)}",
        "hanging": f"{sum(leg.hanging for leg in legs)}",
        "violations of any kind": f"{sum(len(leg.wrong) for leg in legs)}",
        "acknowledgements resumed after": _quantiles([seconds for _, seconds in recoveries]),
        "longest wait for an acknowledgement": f"{max(leg.longest_s for leg in legs):.1f} s",
        "reconciliation job": "agreed with the checker in every leg" if options.audit else "not run",
        "measured": machine(),
    }
    kinds = Counter(fault.name for leg in legs for fault in leg.played)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak.md").write_text(
        "# The soak\n\n`python -m tests.faults soak --seed "
        f"{seed} --minutes {minutes:g}`: three brokers, a Redis pair, {options.services} processes of the service; "
        "every key posted again after each leg.\n\n"
        + table(("figure", "value"), {name: [value] for name, value in figures.items()})
        + "\n"
        + table(
            ("fault", "times", "acknowledgements resumed after"),
            {
                name: [str(count), _quantiles([seconds for names, seconds in recoveries if name in names])]
                for name, count in sorted(kinds.items())
            },
        )
    )
