"""Runs one process of the service, `python -m service`, as an operator does."""

import http.client
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy import places
from deploy.stack.ports import free_port
from deploy.stack.process import Process

_PROBE_S = 2.0


class Service(Process):
    """A service process on the loopback interface. Port and instance name stay the same over kills and starts."""

    def __init__(
        self,
        folder: Path,
        *,
        kafka: str,
        redis: str,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        module: str = "service",
        argv_prefix: Sequence[str] = (),
        name: str = "service",
        project: Path = places.ROOT,
    ) -> None:
        """Prepare a process.

        Args:
            folder: for the log.
            kafka: bootstrap servers.
            redis: the store's URL.
            port: the port to listen on; default: a free one.
            env: settings (`FENCEPOST_...`) and other variables, which override those made from the other arguments.
            module: the module for `python -m`; a module of a test may inject faults and then run the service.
            argv_prefix: a command before the program, which executes it, e.g. `ip netns exec NAME`.
            name: the name of the log.
            project: the tree whose `service` runs; a tree other than this one runs it with its own `.venv`.
        """
        super().__init__(name, folder.absolute())
        self.port = port or free_port()
        self.module = module
        self.argv_prefix = list(argv_prefix)
        self.project = project
        self.env = {
            "FENCEPOST_KAFKA": kafka,
            "FENCEPOST_REDIS": redis,
            "FENCEPOST_HOST": "127.0.0.1",
            "FENCEPOST_PORT": str(self.port),
            "PYTHONUNBUFFERED": "1",  # the log must be complete when the process is killed
            **(env or {}),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, wait_ready: bool = True, timeout_s: float = 60.0) -> None:
        """Start the process, and wait until it is ready, if `wait_ready`.

        Raises:
            StackError: the process ended, or was not ready within `timeout_s`.
        """
        # In the root of the project, where Python finds `service` and the tests' modules.
        environment = {**places.hermetic_environment(), **self.env}
        own = self.project == places.ROOT
        python = sys.executable if own else self.project / ".venv" / "bin" / "python"
        self.spawn([*self.argv_prefix, python, "-m", self.module], env=environment, cwd=self.project)
        if wait_ready:
            self.wait_ready(timeout_s)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until `/readyz` answers 200.

        Raises:
            StackError: the process ended, or was not ready within `timeout_s`.
        """
        self.wait_until(self.ready, timeout_s)

    def ready(self) -> bool:
        """Check whether `/readyz` answers 200 now."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PROBE_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
