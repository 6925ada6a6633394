"""Plays the most important rows of the matrix; `python -m tests.faults matrix` plays all.

Rows with three brokers, and a row's run of the job in a JVM of its own, run only with that command and with
`TEST_LONG=1`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.faults.matrix import Clusters, load_rows, play

ROWS = {name: row for name, row in load_rows().items() if row.in_run}
# Three brokers take as long to start as all other rows together. The next module wants a single one.
CHOSEN = [
    *(pytest.param(name, marks=pytest.mark.long) for name, row in ROWS.items() if row.brokers > 1),
    *(name for name, row in ROWS.items() if row.brokers == 1),
]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_of_the_matrix_leaves_every_event_there_once(name: str, clusters: Clusters, tmp_path: Path) -> None:
    row = replace(ROWS[name], audit=ROWS[name].audit and LONG)
    outcome = play(row, tmp_path, clusters.get(row.brokers, row.kafka))
    if outcome.wrong:
        clusters.drop()
    assert outcome.wrong == []
    assert outcome.verdict.acknowledged > 0
