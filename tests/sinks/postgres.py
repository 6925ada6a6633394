"""A PostgreSQL of its own: its programs are an archive of 10 MB, fetched by name and checksum into the cache."""

import os
import platform
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

import psycopg

from deploy import places
from deploy.console import StackError, call
from deploy.install import jars
from deploy.stack.ports import free_port
from deploy.stack.process import Process

LOCK: Final = Path(__file__).with_name("postgres.lock")
USER: Final = "auditor"
DATABASE: Final = "postgres"
_START_S: Final = 60.0
# PostgreSQL refuses to run as root. This user and group, which own nothing, are on every Linux ("nobody").
_NOBODY: Final = 65534


class Postgres(Process):
    """One server with an empty database, in a folder of its own that ends with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("postgres", folder)
        self.port = free_port()
        self.password = "a secret of 'its' own"
        # The user that runs the server cannot enter pytest's folders.
        self._root = Path(tempfile.mkdtemp(prefix="fencepost-postgres-"))

    @property
    def jdbc_url(self) -> str:
        return f"jdbc:postgresql://127.0.0.1:{self.port}/{DATABASE}"

    @property
    def dsn(self) -> str:
        return psycopg.conninfo.make_conninfo(
            host="127.0.0.1", port=self.port, user=USER, password=self.password, dbname=DATABASE
        )

    @property
    def variables(self) -> dict[str, str]:
        """The variables of libpq by which a program finds the server."""
        names = {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGDATABASE": DATABASE}
        return {**names, "PGUSER": USER, "PGPASSWORD": self.password}

    def start(self) -> None:
        """Unpack the programs, create the database, start the server, and wait until it answers. Raises StackError."""
        if not (self._root / "data").exists():
            self._create()
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "shared_buffers": "16MB",
            "max_connections": "50",
            "fsync": "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command: list[str | Path] = [self._root / "bin" / "postgres", "-D", self._root / "data", "-p", str(self.port)]
        self.spawn([*_as_nobody(), *command, *options], env=places.hermetic_environment(), cwd=self._root)
        self.wait_until(self._answers, _START_S)

    def stop(self, timeout_s: float = 15.0) -> None:
        super().stop(timeout_s)
        shutil.rmtree(self._root, ignore_errors=True)

    def connect(self) -> "psycopg.Connection[Any]":
        return psycopg.connect(self.dsn, autocommit=True)

    def _create(self) -> None:
        _unpack(self._root)
        secret = self._root / "password"
        secret.write_text(self.password)
        if os.geteuid() == 0:
            for path in (self._root, *self._root.rglob("*")):
                os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
        command: list[str | Path] = [self._root / "bin" / "initdb", "-D", self._root / "data", "-U", USER]
        command += ["--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync", "--encoding=UTF8", "--locale=C"]
        environment = places.hermetic_environment()
        call([*_as_nobody(), *command], timeout_s=_START_S, folder=self._root, environment=environment)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


def _as_nobody() -> list[str]:
    """Return what runs a command as another user than root, and ends it with this process."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--pdeathsig=KILL"]


def _unpack(folder: Path) -> None:
    """Fetch the programs for this machine unless they are in the cache, and unpack them. Raises StackError."""
    machine = {"x86_64": "amd64", "aarch64": "arm64v8"}.get(platform.machine(), platform.machine())
    locked = [jar for jar in jars.read_lock("postgres", LOCK) if jar.artifact.endswith(f"-linux-{machine}")]
    if not locked:
        raise StackError(f"{LOCK} has no PostgreSQL for {platform.machine()}")
    jars.ensure(locked)
    with zipfile.ZipFile(locked[0].path) as jar:
        (packed,) = (name for name in jar.namelist() if name.endswith(".txz"))
        with jar.open(packed) as stream, tarfile.open(fileobj=stream, mode="r|xz") as content:
            content.extractall(folder, filter="data")
    folder.chmod(0o755)
