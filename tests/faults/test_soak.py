"""A slice of the soak, and proof that it catches a broken service and shrinks what it caught to its cause."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.injectors import load_injectors
from tests.faults.shrink import shrink
from tests.faults.soak import Options, Planned, plan, play

SLICE_S = 10.0
ALONE = Options(services=2, pair=False, keys_per_s=60.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_the_seed_says_all() -> None:
    known = list(load_injectors().values())
    drawn = list(islice(plan("1/0", known), 200))
    assert drawn == list(islice(plan("1/0", known), 200))
    assert drawn != list(islice(plan("2/0", known), 200))
    assert {fault.name for fault in drawn} == set(load_injectors())
    assert len({fault.seed for fault in drawn}) == 200
    assert any(one.group == other.group for one, other in pairwise(drawn))


def test_a_slice(cluster: Cluster, tmp_path: Path) -> None:
    names = ("service-killed", "service-paused", "redis-flushed", "redis-restarted-empty", "transactional-ids-stolen")
    leg = play(tmp_path, cluster, plan("slice", [load_injectors()[name] for name in names]), SLICE_S, "slice", ALONE)
    assert leg.wrong == []
    assert len(leg.played) >= 3
    assert leg.verdict.acknowledged > 100


def test_a_service_that_forgets_is_caught_and_the_cause_is_found(cluster: Cluster, tmp_path: Path) -> None:
    """Its store recovery replays no ledger. Of two faults only the flush brings that out."""
    names = ("redis-flushed", "transactional-ids-stolen")
    faults = [Planned(group, name, f"broken/{group}", 0.1) for group, name in enumerate(names)]
    broken = Options(services=1, pair=False, mutants=("store_is_not_replayed",), keys_per_s=60.0)
    tries = 0

    def fails(some: Sequence[Planned]) -> bool:
        nonlocal tries
        tries += 1
        leg = play(tmp_path / f"try-{tries}", cluster, some, 60.0, "broken", broken)
        return any(text.startswith(("once:", "again:")) for text in leg.wrong)

    assert fails(faults)
    assert [fault.name for fault in shrink(faults, fails)] == ["redis-flushed"]
