"""Reserves free TCP ports on the loopback interface, each for one stack at a time."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# Below Linux's range for outgoing connections (32768 and up), so that no client takes a port between check and use.
_FIRST, _LAST = 15_000, 31_999
_TRIES = 200

# A port is reserved by a locked file, seconds before a broker listens on it: otherwise two stacks that start together
# could choose the same port, and one would use the other's broker. Maps ports to file descriptors, which the kernel
# closes, and so unlocks, when the process ends.
_promised: dict[int, int] = {}


def free_port(distance: int = 0) -> int:
    """Reserve a free port for this process, until it ends.

    Args:
        distance: where this is positive, the port that lies so far above is free and reserved too, for a server that
            derives a second port from its own (the bus of a Redis in cluster mode: 10,000).

    Raises:
        RuntimeError: nearly every port is taken.
    """
    for _ in range(_TRIES):
        port = random.randint(_FIRST, _LAST - distance)  # so that two stacks rarely try the same port
        if all(number not in _promised and _take(number) for number in {port, port + distance}):
            return port
    raise RuntimeError(f"no free port found between {_FIRST} and {_LAST}")


def port_or_free(wanted: int) -> int:
    """Reserve the port `wanted` if it is free, else another one."""
    return wanted if _take(wanted) else free_port()


def _take(port: int) -> bool:
    """Reserve a port for this process; False if the port is in use or reserved."""
    if not _is_free(port):
        return False
    folder = Path(tempfile.gettempdir()) / f"fencepost-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / str(port), os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _promised[port] = descriptor
    return True


def _is_free(port: int) -> bool:
    """Check whether a server can listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
