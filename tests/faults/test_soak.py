"""Tests a short soak, and that the soak finds a broken service and shrinks the failure to its cause."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from tests.faults.injectors import INJECTORS, Injector, load_injectors
from tests.faults.matrix import Clusters
from tests.faults.shrink import shrink
from tests.faults.soak import Options, Planned, plan, play
from tests.faults.world import World

FAULTS = 6
ENOUGH_S = 200.0  # ends with the faults
ALONE = Options(services=2, pair=False, proxied=False, keys_per_s=60.0)


def test_the_same_seed_draws_the_same_faults() -> None:
    known = list(load_injectors().values())
    drawn = list(islice(plan("1/0", known), 200))
    assert drawn == list(islice(plan("1/0", known), 200))
    assert drawn != list(islice(plan("2/0", known), 200))
    assert {fault.name for fault in drawn} == set(load_injectors())
    assert len({fault.seed for fault in drawn}) == 200
    assert any(one.group == other.group for one, other in pairwise(drawn))


def test_a_slice_of_the_soak_leaves_every_event_there_once(clusters: Clusters, tmp_path: Path) -> None:
    names = ("service-killed", "service-paused", "redis-flushed", "redis-restarted-empty", "transactional-ids-stolen")
    drawn = islice(plan("slice", [load_injectors()[name] for name in names]), FAULTS)
    faults = [replace(fault, pause_s=0.2) for fault in drawn]
    leg = play(tmp_path, clusters.get(1, {}), faults, ENOUGH_S, "slice", ALONE)
    assert leg.wrong == []
    assert leg.played == faults
    assert leg.verdict.acknowledged > 100


def test_a_fault_that_never_ends_is_a_verdict(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leg is checked anyway, and can be shrunk."""

    def never(world: World, rng: random.Random) -> None:
        Future[None]().result(0.1)

    monkeypatch.setitem(INJECTORS, "never-ends", Injector("never-ends", "client", never))
    alone = replace(ALONE, services=1)
    leg = play(tmp_path, clusters.get(1, {}), [Planned(1, "never-ends", "1", 0.1)], ENOUGH_S, "never", alone)
    (wrong,) = leg.wrong
    assert wrong.startswith("TimeoutError:")
    assert "never-ends" in wrong
    assert leg.verdict.acknowledged > 0


def test_a_service_that_forgets_is_caught_and_the_cause_is_found(clusters: Clusters, tmp_path: Path) -> None:
    """The store recovery of this service replays no ledger. Of two faults only the flush shows that."""
    names = ("redis-flushed", "transactional-ids-stolen")
    faults = [Planned(group, name, f"broken/{group}", 0.1) for group, name in enumerate(names)]
    broken = replace(ALONE, services=1, mutants=("store_is_not_replayed",))
    tries = 0

    def fails(some: Sequence[Planned]) -> bool:
        nonlocal tries
        tries += 1
        leg = play(tmp_path / f"try-{tries}", clusters.get(1, {}), some, ENOUGH_S, "broken", broken)
        return any(text.startswith(("once:", "again:")) for text in leg.wrong)

    assert fails(faults)
    assert [fault.name for fault in shrink(faults, fails)] == ["redis-flushed"]
