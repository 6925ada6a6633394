"""Free TCP ports on the loopback interface."""

import random
import socket

# Below the range from which Linux takes the ports of outgoing connections (32768 and up): a port found here is not
# taken by somebody's client between the look and the use.
_FIRST, _LAST = 15_000, 31_999
_TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port nobody listens on, at random, so that two stacks that start together do not meet.

    Raises:
        RuntimeError: nearly every port is taken.
    """
    for _ in range(_TRIES):
        port = random.randint(_FIRST, _LAST)  # not a secret
        if is_free(port):
            return port
    raise RuntimeError(f"no free port found between {_FIRST} and {_LAST}")


def port_or_free(wanted: int) -> int:
    """`wanted` where it is free, else another one."""
    return wanted if is_free(wanted) else free_port()
