"""The most telling rows of the matrix; `python -m tests.faults matrix` plays all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.matrix import Clusters, load_rows, play

CHOSEN = [name for name, row in load_rows().items() if row.in_run]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    with Clusters(tmp_path_factory.mktemp("clusters")) as clusters:
        yield clusters


@pytest.mark.parametrize("name", CHOSEN)
def test_row(name: str, clusters: Clusters, tmp_path: Path) -> None:
    row = load_rows()[name]
    outcome = play(row, tmp_path, clusters.get(row.brokers, row.kafka))
    if outcome.wrong:
        clusters.drop()
    assert outcome.wrong == []
    assert outcome.verdict.acknowledged > 0
