"""Fixtures of the client's tests: the clock, and the kind of the client."""

from typing import Any

import pytest

from tests.unit.fencepost.clients import Asyncio, Threads, patched
from tests.unit.fencepost.fakes import FakeTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return patched(monkeypatch)


@pytest.fixture(params=[Threads, Asyncio])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param
