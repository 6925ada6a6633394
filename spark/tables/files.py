"""Files beside the tables, through Hadoop's file systems: wherever Spark can write. Those in a local folder also
without Spark."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from spark.engine.jvm import gateway, hadoop_configuration, jvm, nested

CHUNK_CHARS: Final = 1 << 20
CREATES_IN_CLOSE: Final = "fs.option.create.in.close"
"""The capability of a file system whose files exist only when they are whole."""


_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://)?")


def local_folder(url: str) -> Path | None:
    """Return the folder of a path or a `file:` URL, None for any other URL: Hadoop's default file system must be the
    local one."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url)
    rest = url[scheme.end() :]
    return Path(rest) if scheme[1] == "file" and rest.startswith("/") else None


def may_be_elsewhere(environ: Mapping[str, str]) -> bool:
    """Check for an environment in which Spark runs already, or has a default file system that may not be the local
    one."""
    return any(environ.get(name) for name in ("PYSPARK_GATEWAY_PORT", "HADOOP_CONF_DIR"))


def read_local(folder: Path, name: str) -> str | None:
    """Read a small UTF-8 file, as `read` does."""
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def write_local(folder: Path, name: str, parts: Iterable[str]) -> None:
    """Write a UTF-8 file atomically, as `write` does."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{name}.new"
    with fresh.open("w", encoding="utf-8", newline="") as stream:
        stream.writelines(parts)
    fresh.replace(folder / name)


def local(spark: SparkSession, root: str) -> str | None:
    """Return the local path of `root`, None if `root` is on another file system."""
    path, system = _open(spark, root)
    uri = system.makeQualified(path).toUri()
    return str(uri.getPath()) if uri.getScheme() == "file" else None


def qualified(spark: SparkSession, where: str) -> str:
    """Return a folder or URL with the scheme of its file system, as an absolute path."""
    path, system = _open(spark, where)
    return str(system.makeQualified(path).toString())


def read(spark: SparkSession, folder: str, name: str) -> str | None:
    """Read a small UTF-8 file; None if it does not exist."""
    path, system = _open(spark, f"{folder}/{name}")
    if not system.exists(path):
        return None
    stream = system.open(path)
    try:
        return bytes(stream.readAllBytes()).decode()
    finally:
        stream.close()


def write(spark: SparkSession, folder: str, name: str, parts: Iterable[str]) -> None:
    """Write a UTF-8 file atomically.

    A file system that creates files in `close` does so by itself, as S3 does. In others the file is written to a
    temporary name in the folder, and renamed.
    """
    hadoop = jvm(spark).org.apache.hadoop.fs
    path, system = _open(spark, folder)
    system.setWriteChecksum(False)
    system.mkdirs(path)
    final = hadoop.Path(path, name)
    if system.hasPathCapability(path, CREATES_IN_CLOSE):
        _write_object(system.create(final, True), parts)
        return
    fresh = hadoop.Path(path, f".{name}.new")
    stream = system.create(fresh, True)
    try:
        _write_parts(stream, parts)
    finally:
        stream.close()
    context = hadoop.FileContext.getFileContext(system.getUri(), hadoop_configuration(spark))
    option = nested(spark, "org.apache.hadoop.fs.Options", "Rename")
    overwrite = gateway(spark).new_array(option, 1)
    overwrite[0] = option.OVERWRITE
    context.rename(system.makeQualified(fresh), system.makeQualified(final), overwrite)


def _write_object(stream: Any, parts: Iterable[str]) -> None:
    """Write the parts and create the object; after an error create none."""
    try:
        _write_parts(stream, parts)
    except BaseException:
        stream.abort()
        raise
    stream.close()


def _write_parts(stream: Any, parts: Iterable[str]) -> None:
    """Write the parts in chunks, since each call goes from Python to the JVM."""
    chunk: list[str] = []
    size = 0
    for part in parts:
        chunk.append(part)
        size += len(part)
        if size >= CHUNK_CHARS:
            stream.write("".join(chunk).encode())
            chunk, size = [], 0
    stream.write("".join(chunk).encode())


def _open(spark: SparkSession, where: str) -> tuple[Any, Any]:
    """Return Hadoop's path and file system of a folder or URL."""
    path = jvm(spark).org.apache.hadoop.fs.Path(where)
    return path, path.getFileSystem(hadoop_configuration(spark))
