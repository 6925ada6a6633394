"""The most telling rows of the matrix; `python -m tests.faults matrix` plays all of them.

The rows' run of the job, in a JVM of its own, is left to that command and to `TEST_LONG=1`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.faults.matrix import Clusters, load_rows, play

# Those on three brokers first: what comes after this module wants one.
CHOSEN = sorted((name for name, row in load_rows().items() if row.in_run), key=lambda name: -load_rows()[name].brokers)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_of_the_matrix_leaves_every_event_there_once(name: str, clusters: Clusters, tmp_path: Path) -> None:
    row = load_rows()[name]
    row = replace(row, audit=row.audit and LONG)
    outcome = play(row, tmp_path, clusters.get(row.brokers, row.kafka))
    if outcome.wrong:
        clusters.drop()
    assert outcome.wrong == []
    assert outcome.verdict.acknowledged > 0
