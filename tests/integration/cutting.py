"""An HTTP proxy that cuts its clients' connections: amid a request, behind a request, or instead of an answer."""

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal, Self

from tests.faults.relay import stop_serving

# What happens to a request: nothing; half of it reaches the service; all of it does; all of it does, and its answer is
# dropped. But for "nothing", the client's connection is reset without a byte of an answer.
Fault = Literal["nothing", "amid", "behind", "unanswered"]

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)


class CuttingProxy:
    """Forwards requests and answers with a Content-Length, each as a whole, to a service on this machine."""

    def __init__(self, target: int, choose: Callable[[int], Fault]) -> None:
        """Prepare a proxy to the port `target`; `choose` gets the number of a request in its connection, from 0."""
        self._target = target
        self._choose = choose
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.faults: Counter[Fault] = Counter()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await stop_serving(self._server)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task made here: asyncio's own for a coroutine logs an error when it is cancelled.
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service, onward = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            for number in itertools.count():
                request = await _message(reader)
                fault = self._choose(number)
                self.faults[fault] += 1
                onward.write(request[: len(request) // 2] if fault == "amid" else request)
                await onward.drain()
                if fault in ("amid", "behind"):
                    return
                answer = await _message(service)
                if fault == "unanswered":
                    return
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):  # one of both sides has closed its connection
            pass
        finally:
            writer.transport.abort()
            onward.close()  # sends what was written first: it has reached the service


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Read a whole message. Raises IncompleteReadError at the end of a connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    assert length is not None, head
    return head + await reader.readexactly(int(length[1]))
