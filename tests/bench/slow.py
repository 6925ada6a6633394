"""Measures 1,000 slow connections beside good clients: the latency of the others, and the memory of the process.

A quarter of them sends the head of a request, and a quarter a body, each a byte a second. A quarter reads the results
of a stream, 500 bytes a second, into small buffers, so that the service holds the rest. A quarter is idle after a
request. A connection that the service ends is replaced at once: that happens to each head and body after 20 s, so that
a round is longer. The good clients are those of `attacker`. In each round they run alone first, and then beside the
slow connections.
"""

import os
import resource
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench import held
from tests.bench.attacker import CONNECTIONS, HELD, WAIT_MS
from tests.bench.rows import Goal, NotRealWork, Row, ratios
from tests.bench.stage import Stage, Target, memory_bytes

SLOW: Final = 1_000
FILES: Final = 4_096  # that each process may open; the service refuses connections past three quarters of them
PAUSE_S: Final = 1.0  # of each connection between two steps
STEPS: Final = 20  # shares of the connections, which take their steps one after the other
SETTLE_S: Final = 1.0
ANSWER_S: Final = 30.0
SLOWER: Final = Goal(most=1.33)

_HEAD: Final = b"POST %b HTTP/1.1\r\nHost: slow\r\nContent-Type: %b\r\n"
# Of lines that are no events: each result has some 150 bytes, and costs little.
_LINES: Final = b"?\n" * 1_000


@dataclass(frozen=True)
class Kind:
    """What a slow connection sends at its start, and in each second: the bytes that it sends, or how many it reads."""

    of: str
    begin: bytes
    sends: bytes = b""
    reads: int = 0
    is_answered: bool = False  # the answer to what it sends at its start begins at once


KINDS: Final = (
    Kind("heads", _HEAD % (b"/events", b"application/json") + b"X-Slow: ", sends=b"a"),
    Kind(
        "bodies",
        _HEAD % (b"/events", b"application/json") + b"Idempotency-Key: slow\r\nContent-Length: 1000000\r\n\r\n",
        sends=b" ",
    ),
    Kind(
        "readers",
        _HEAD % (b"/events/batch", b"application/x-ndjson")
        + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(_LINES), _LINES),
        reads=500,
        is_answered=True,
    ),
    Kind("idle", b"GET /livez HTTP/1.1\r\nHost: slow\r\n\r\n", is_answered=True),
)


class _Connection:
    """One slow connection."""

    def __init__(self, port: int, kind: Kind) -> None:
        self.kind = kind
        self._socket = socket.socket()
        self._socket.settimeout(ANSWER_S)
        if kind.reads:  # small segments keep the kernel's buffers small, also those of the service
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        self._socket.connect(("127.0.0.1", port))
        self._socket.sendall(kind.begin)

    def check_answer(self) -> None:
        """Wait for the answer, if there is to be one. Raises NotRealWork if it is no success."""
        if not self.kind.is_answered:
            return
        head = self._socket.recv(12, socket.MSG_PEEK)
        if not head.startswith(b"HTTP/1.1 2"):
            raise NotRealWork(f"{self.kind.of}: {head!r}")
        if not self.kind.reads:
            self._socket.recv(65_536)

    def step(self) -> bool:
        """Send or read the bytes of one second; returns whether the connection goes on."""
        self._socket.settimeout(0.0)
        try:
            if self.kind.sends:
                self._socket.sendall(self.kind.sends)
            found = self._socket.recv(self.kind.reads or 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(found and self.kind.reads)  # others get nothing but a refusal

    def close(self) -> None:
        self._socket.close()


class _SlowConnections:
    """All slow connections, which a thread keeps going."""

    def __init__(self, target: Target) -> None:
        self.ended = 0  # by the service
        self._target = target
        self._connections: list[_Connection] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_SlowConnections":
        self._connections = [self._open(KINDS[number % len(KINDS)]) for number in range(SLOW)]
        for connection in self._connections:
            connection.check_answer()
        time.sleep(SETTLE_S)  # the last results of the readers are made
        self._thread.start()
        return self

    def _open(self, kind: Kind) -> _Connection:
        return _Connection(self._target.service.port, kind)

    def _run(self) -> None:
        # Real clients have CPUs of their own: on this machine their thread gives way to the service and the good ones.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        first = 0
        while not self._stop.wait(PAUSE_S / STEPS):
            for place in range(first, len(self._connections), STEPS):
                if not self._connections[place].step():
                    self.ended += 1
                    self._connections[place].close()
                    self._connections[place] = self._open(self._connections[place].kind)
            first = (first + 1) % STEPS

    def check(self) -> None:
        """Check that the service has all connections open. Raises NotRealWork."""
        files = len(list(Path(f"/proc/{self._target.service.pid}/fd").iterdir()))
        if not self._thread.is_alive() or files < SLOW:
            raise NotRealWork(f"the service has {files} files open, not the {SLOW} slow connections")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=ANSWER_S)
        for connection in self._connections:
            connection.close()


def measure(stage: Stage) -> list[Row]:
    """Measure all rounds. Raises NotRealWork if this process may not open as many files."""
    seconds, rounds = stage.pick(2, 25), stage.pick(1, 3, 5)
    _allow_files()
    alone: list[float] = []
    beside: list[float] = []
    held_ms: list[float] = []
    growth: list[float] = []
    ended: list[float] = []
    with stage.target(module="tests.bench.held") as target:
        if stage.depth != "quick":
            stage.warm_up(target, 3, CONNECTIONS)
        for _ in range(rounds):
            target.settle()
            alone.append(target.load(seconds, CONNECTIONS, delay=WAIT_MS).p99_ms)
            before = memory_bytes(target.service.pid)
            with _SlowConnections(target) as slow:
                started = time.monotonic()
                beside.append(target.load(seconds, CONNECTIONS, delay=WAIT_MS).p99_ms)
                held_ms.append(held.longest_ms(target.service.log, started, time.monotonic()))
                growth.append((memory_bytes(target.service.pid) - before) / 1e6)
                slow.check()
                ended.append(slow.ended / seconds)
        target.check()
    return [
        Row(
            f"good clients' p99 beside {SLOW:,} slow connections, over that without", "x", ratios(beside, alone), SLOWER
        ),
        Row("good clients' p99", "ms", beside),
        Row("good clients' p99 without slow connections", "ms", alone),
        Row("the loop was held, at most", "ms", held_ms, HELD),
        Row("memory of the slow connections", "MB", growth),
        Row("slow connections that the service ended", "/s", ended),
    ]


def _allow_files() -> None:
    """Let this process, and those that it starts, open FILES files. Raises NotRealWork if the system forbids that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return
    if hard != resource.RLIM_INFINITY and hard < FILES:
        raise NotRealWork(f"this process may open {hard} files: allow {FILES} (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
