"""Free TCP ports on the loopback interface, each promised to one stack at a time."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# Below the range from which Linux takes the ports of outgoing connections (32768 and up): a port found here is not
# taken by somebody's client between the look and the use.
_FIRST, _LAST = 15_000, 31_999
_TRIES = 200

# A port is looked for seconds before a broker listens on it. Until this process ends, a locked file says that it is
# spoken for, or two stacks that start together would find the same one free, and one would use the other's broker.
# Port to file descriptor: the kernel closes them, and so ends the promises, when the process ends.
_promised: dict[int, int] = {}


def free_port() -> int:
    """A port nobody listens on or was promised; it stays promised to this process.

    Raises:
        RuntimeError: nearly every port is taken.
    """
    for _ in range(_TRIES):
        port = random.randint(_FIRST, _LAST)  # two stacks seldom try the same ones
        if port not in _promised and _take(port):
            return port
    raise RuntimeError(f"no free port found between {_FIRST} and {_LAST}")


def port_or_free(wanted: int) -> int:
    """`wanted` where it is free, else another one."""
    return wanted if _take(wanted) else free_port()


def _take(port: int) -> bool:
    """Have the port promised to this process, if it can be."""
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
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
