"""The HTTP server of `python -m service`: where it listens, and how it stops."""

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

import structlog
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.server import ServerState

from service.core.supervision import supervise
from service.http.request import UNREAD_MAX_S, StopSignal
from service.http.tls import HANDSHAKE_S, ServerTls

log = structlog.get_logger(__name__)

# The time after a SIGTERM in which each response ends its connection, before idle connections are closed.
LINGER_S: Final = 1.0
_C_INT_BYTES: Final = 4


class LingeringServer(uvicorn.Server):
    """After the first SIGTERM, end each connection with its next response for LINGER_S, then stop as uvicorn does.

    Requests that could go on for ever end at once. `stopping` is set for both.

    uvicorn closes idle connections at once, and a client that is sending a request cannot know whether the service has
    read the request.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _is_lingering = False

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: StopSignal,
        tls: ServerTls | None = None,
        beside: Sequence[uvicorn.Config] = (),
    ) -> None:
        """`tls` is that of the address of `config`; None for plain HTTP.

        `beside` are further addresses, each with an app and with connections of its own, and no lifespan.
        """
        super().__init__(config)
        self._stopping = stopping
        self._tls = tls
        self._watching: asyncio.Task[None] | None = None  # the files of `tls`
        self._beside = [(each, ServerState()) for each in beside]
        self.unbound: uvicorn.Config | None = None  # the one whose address cannot be had

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then listen. Raises SystemExit where an address cannot be had."""
        await super().startup(sockets=[])
        self.started = False
        for config, state in ((self.config, self.server_state), *self._beside):
            try:
                self.servers.append(await self._listen(config, state, self._tls if config is self.config else None))
            except OSError as error:
                self.unbound = config
                log.error("cannot listen", host=config.host, port=config.port, why=str(error))
                await self.lifespan.shutdown()
                sys.exit(STARTUP_FAILURE)
        if self._tls is not None:
            self._watching = supervise("http-tls", self._tls.watch, self._tls.telemetry)
        self.started = True

    async def _listen(self, config: uvicorn.Config, state: ServerState, tls: ServerTls | None) -> Any:
        """Listen at the address of a configuration. Raises OSError."""
        if not config.loaded:
            config.load()
        kind: Any = config.http_protocol_class

        def connection() -> asyncio.Protocol:
            made: asyncio.Protocol = kind(config=config, server_state=state, app_state=self.lifespan.state)
            return made

        secure: dict[str, Any] = {}
        if tls is not None:
            # A connection is closed once its client has read what was written, for which it has this long.
            secure = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": UNREAD_MAX_S}
        return await asyncio.get_running_loop().create_server(
            connection, host=config.host, port=config.port, backlog=config.backlog, **secure
        )

    async def on_tick(self, counter: int) -> bool:
        """Keep the Date of all connections, which uvicorn sets each second."""
        is_over = await super().on_tick(counter)
        for _, state in self._beside:
            state.default_headers = self.server_state.default_headers
        return is_over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        ending = supervise("http-tls-end", self._end_silent, self._tls.telemetry) if self._tls is not None else None
        for _, state in self._beside:
            for connection in list(state.connections):
                connection.shutdown()
        try:
            await super().shutdown(sockets)
        finally:
            if ending is not None:
                ending.cancel()

    async def _end_silent(self) -> None:
        """End the connections whose client has received everything and does not answer the end of TLS, for ever.

        A client that reads nothing between two requests answers it with its next request at the earliest.
        """
        while True:
            await asyncio.sleep(LINGER_S)
            for connection in list(self.server_state.connections):
                with contextlib.suppress(OSError):  # the system does not tell
                    if connection.transport.is_closing() and not _unacknowledged(connection.transport):
                        connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._is_lingering:
            super().handle_exit(sig, frame)
            return
        self._is_lingering = True
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, super().handle_exit, sig, frame)


def _unacknowledged(transport: Any) -> int:
    """Count the bytes that were sent and that the client's kernel has not acknowledged.

    While the transport itself holds bytes back, there are some: the kernel has taken no more. Of a transport that has
    ended there are none.
    """
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    count = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_C_INT_BYTES))
    return int.from_bytes(count, sys.byteorder)
