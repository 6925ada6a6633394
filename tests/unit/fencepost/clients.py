"""Clients with a faked service and clock: those for threads and those for asyncio, by the same calls."""

import asyncio
from typing import Any

import httpx
import pytest

from service.fencepost.client import AsyncClient, Client, Event, Offsets, Result, SendError, Written, WrittenBatch
from tests.unit.fencepost.fakes import FakeTime

URL = "http://fencepost.test"


def patched(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr("service.fencepost.client.client.time", clock)
    monkeypatch.setattr("service.fencepost.client.answers.time", clock)
    monkeypatch.setattr("service.fencepost.client.spool.time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.asyncio_sleep)
    return clock


def transport(fake: Any) -> httpx.MockTransport:
    return httpx.MockTransport(fake)


class Threads:
    """A client, by the calls that a test makes of either."""

    def __init__(self, fake: Any, **options: Any) -> None:
        self.fake, self.options = fake, options

    def send_many(self, *events: Event) -> list[Result]:
        with Client(URL, transport=transport(self.fake), **self.options) as client:
            return client.send_many(events)

    def send(self, event: Event) -> Written:
        with Client(URL, transport=transport(self.fake), **self.options) as client:
            return client.send(event)

    def send_atomic(self, key: str, *events: Event, offsets: Offsets | None = None) -> WrittenBatch:
        with Client(URL, transport=transport(self.fake), **self.options) as client:
            return client.send_atomic(key, events, offsets)

    def resume(self) -> list[Result]:
        with Client(URL, transport=transport(self.fake), **self.options) as client:
            return list(client.resume())


class Asyncio(Threads):
    """The same calls, of the client for asyncio."""

    def send_many(self, *events: Event) -> list[Result]:
        async def run() -> list[Result]:
            async with AsyncClient(URL, transport=transport(self.fake), **self.options) as client:
                return await client.send_many(events)

        return asyncio.run(run())

    def send_atomic(self, key: str, *events: Event, offsets: Offsets | None = None) -> WrittenBatch:
        async def run() -> WrittenBatch:
            async with AsyncClient(URL, transport=transport(self.fake), **self.options) as client:
                return await client.send_atomic(key, events, offsets)

        return asyncio.run(run())

    def send(self, event: Event) -> Written:
        async def run() -> Written:
            async with AsyncClient(URL, transport=transport(self.fake), **self.options) as client:
                return await client.send(event)

        return asyncio.run(run())

    def resume(self) -> list[Result]:
        async def run() -> list[Result]:
            async with AsyncClient(URL, transport=transport(self.fake), **self.options) as client:
                return [result async for result in client.resume()]

        return asyncio.run(run())


def raised(result: Result | None) -> SendError:
    assert isinstance(result, SendError)
    return result
