"""Makes the bed of the tests of recovery."""

import pytest

from tests.unit.slots.bed import Bed


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)
