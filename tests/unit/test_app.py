"""The parts of one process together: what their coming up meets."""

import asyncio
import gc
from collections.abc import Iterator
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

import service.app
from service.app import Service
from service.errors import KafkaAway, KafkaRefuses
from service.schemas import Schemas
from service.settings import Settings
from service.shared import Rules, SettingsError
from service.telemetry import Telemetry


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """Coming up sets Python's collector for the life of a process."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


async def test_what_nobody_foresaw_does_not_end_the_start_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.app, "AGAIN_S", 0.001)
    given_up: list[SettingsError] = []
    rules = Rules()
    whole = Service(Settings(), rules, Schemas(rules), Telemetry(), given_up.append)
    whole.topics.ensure = AsyncMock(side_effect=[KafkaAway("no broker"), TypeError("odd"), None])  # type: ignore[method-assign]
    whole.keys.check = AsyncMock()  # type: ignore[method-assign]
    whole.pool.keep = AsyncMock()  # type: ignore[method-assign]
    try:
        with capture_logs() as logged:
            await whole._bring_up()
        assert [(line["why"], line["exc_info"] is not None) for line in logged] == [("no broker", False), ("odd", True)]
        whole.pool.keep.assert_awaited_once()
        assert given_up == []
    finally:
        await whole.stop()


async def test_a_login_that_kafka_refuses_ends_the_start() -> None:
    given_up: list[SettingsError] = []
    rules = Rules()
    whole = Service(Settings(), rules, Schemas(rules), Telemetry(), given_up.append)
    whole.topics.ensure = AsyncMock(side_effect=KafkaRefuses("set the password"))  # type: ignore[method-assign]
    try:
        async with asyncio.timeout(5.0):
            await whole._bring_up()
    finally:
        await whole.stop()
    assert [str(error) for error in given_up] == ["set the password"]
