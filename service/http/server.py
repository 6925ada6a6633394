"""The HTTP server of `python -m service`, and how it stops."""

import asyncio
import socket
from types import FrameType
from typing import Final

import uvicorn

from service.http.request import StopSignal

# The time after a SIGTERM in which each response ends its connection, before idle connections are closed.
LINGER_S: Final = 1.0


class LingeringServer(uvicorn.Server):
    """After the first SIGTERM, end each connection with its next response for LINGER_S, then stop as uvicorn does.

    Requests that could go on for ever end at once. `stopping` is set for both.

    uvicorn closes idle connections at once, and a client that is sending a request cannot know whether the service has
    read the request.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _is_lingering = False

    def __init__(self, config: uvicorn.Config, stopping: StopSignal) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._is_lingering:
            super().handle_exit(sig, frame)
            return
        self._is_lingering = True
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, super().handle_exit, sig, frame)
