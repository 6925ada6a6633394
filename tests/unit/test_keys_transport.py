"""What is told of a Redis that is silent, in the log and by /readyz: an error without words has a name at least."""

import asyncio
import socket
from typing import Any

import pytest

from service.errors import StoreAway, StoreUnanswered
from service.keys import RedisKeys
from service.telemetry import Telemetry


class Mute:
    """A connection that takes what is sent, and has no answer."""

    is_connected = True

    async def can_read(self) -> bool:
        return False

    async def send_command(self, *command: Any, check_health: bool) -> None: ...

    async def read_response(self) -> None:
        await asyncio.sleep(60)

    async def disconnect(self, nowait: bool = False) -> None: ...


def keys_at(port: int) -> RedisKeys:
    return RedisKeys(
        f"redis://127.0.0.1:{port}/0",
        "test",
        retention_ms=60_000,
        least_left_ms=0,
        lease_ttl_ms=300,
        timeout_s=0.05,
        telemetry=Telemetry(),
    )


async def test_a_server_that_takes_connections_and_is_silent_is_told_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts; nobody reads
        keys = keys_at(server.getsockname()[1])
        with pytest.raises(StoreAway, match=r"^Redis does not answer: \w+"):
            await keys.who()


async def test_a_server_that_falls_silent_is_told_of() -> None:
    keys: Any = keys_at(1)
    keys._idle.append(Mute())
    with pytest.raises(StoreUnanswered, match=r"^Redis did not answer: \w+"):
        await keys.who()
