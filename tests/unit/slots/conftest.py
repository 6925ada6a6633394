"""Makes the recovering of the tests of recovery."""

import pytest

from tests.unit.slots.recovering import Recovering


@pytest.fixture
def recovering(monkeypatch: pytest.MonkeyPatch) -> Recovering:
    return Recovering(monkeypatch)
