"""A TCP relay whose target can change, as that of a virtual IP or a DNS name at a failover."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final, Self

from deploy.stack import free_port

_CALL_S: Final = 5.0
_CHUNK_BYTES: Final = 65_536
# Turns of the loop from an accepted connection to the callback of its server: asyncio's task, its transport.
_ACCEPT_PASSES: Final = 3


async def stop_serving(server: asyncio.Server) -> None:
    """Close a server, after the callback of each connection that it has accepted.

    `Server.close` alone fails for connections that were just accepted, and leaves their sockets open.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening)
    for _ in range(_ACCEPT_PASSES):
        await asyncio.sleep(0)
    server.close()


class Relay:
    """Forwards TCP from its own port to `target`, in a thread, so that tests may block."""

    def __init__(
        self, target: int, *, host: str = "127.0.0.1", port: int | None = None, target_host: str = "127.0.0.1"
    ) -> None:
        """Prepare a relay.

        Args:
            target: the first target port.
            host: the address to listen on.
            port: the port to listen on; default: a free one.
            target_host: the host of all targets.
        """
        self.host = host
        self.port = port or free_port()
        self._target = target
        self._target_host = target_host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"relay-{self.port}", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows: asyncio.Event = asyncio.Event()
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    def lead_to(self, target: int) -> None:
        """Change the target port: open connections are cut, and held bytes are lost."""
        self._do(self._lead_to(target))

    def hold(self) -> None:
        """Hold all bytes from now on, without cutting connections."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def let_go(self) -> None:
        """End a `hold`."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    async def _open(self) -> None:
        self._flows.set()
        self._server = await asyncio.start_server(self._accept, self.host, self.port)

    async def _lead_to(self, target: int) -> None:
        self._target = target
        self._cut()
        self._flows.set()

    async def _close(self) -> None:
        if self._server is not None:
            await stop_serving(self._server)
        self._cut()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task made here: asyncio's own for a coroutine logs an error when it is cancelled.
        self._writers.add(writer)
        task = self._loop.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward = await asyncio.open_connection(self._target_host, self._target)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(onward)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, onward))
                group.create_task(self._pump(onward_reader, writer))
        finally:
            self._writers -= {writer, onward}
            writer.transport.abort()
            onward.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until either end closes; then close the other."""
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
