"""Apicurio Registry with Confluent's API: `python -m tests.registry` fetches it and tests on it.

It keeps its schemas in memory. `./tests/run` leaves it out: its archive has 150 MB, and its JVM takes most of a minute.
"""

import os
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import httpx

from deploy import places
from deploy.console import StackError
from deploy.install import jars, java
from deploy.stack.ports import free_port
from deploy.stack.process import Process

LOCK: Final = Path(__file__).with_name("apicurio.lock")
WHY_NOT: Final = (
    "it needs Apicurio Registry, an archive of 150 MB: python -m tests.registry fetches it and runs this test"
)
TESTS: Final = ("tests/contract/test_registry.py", "tests/integration/test_registry.py")
JAVA: Final = 21
_START_S: Final = 120.0


def is_wanted() -> bool:
    """Check whether this run is to use the real registry."""
    return bool(os.environ.get("TEST_REGISTRY"))


class Apicurio(Process):
    """One registry, whose schemas end with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("apicurio", folder)
        self.port = free_port()

    @property
    def url(self) -> str:
        """The address of Confluent's API, version 7."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def start(self) -> None:
        """Start the registry, and wait until it answers. Raises StackError."""
        options = [f"-Dquarkus.http.port={self.port}", "-Dquarkus.http.host=127.0.0.1", "-XX:TieredStopAtLevel=1"]
        program = unpacked() / "quarkus-run.jar"
        home = java.find(JAVA)
        if home is None:
            raise StackError(
                f"Apicurio Registry needs Java {JAVA} or newer: install one, or set JAVA_HOME to its folder"
            )
        command: list[str | Path] = [home / "bin" / "java", "-Xmx512m", *options, "-jar", program]
        self.spawn(command, env=places.hermetic_environment())
        self.wait_until(self._answers, _START_S)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/schemas/types", timeout=2.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def unpacked() -> Path:
    """Fetch the program unless it is in the cache, and return the folder in which it is unpacked."""
    (archive,) = jars.read_lock("registry", LOCK)
    jars.ensure([archive])
    target = archive.path.with_name(archive.sha256)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder, tarfile.open(archive.path) as content:
            whole = Path(folder) / "whole"
            content.extractall(whole, filter="data")
            whole.rename(target)
    return target
