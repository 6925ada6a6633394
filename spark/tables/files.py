"""Files beside the tables, through Hadoop's file systems: a folder, a bucket, whatever Spark can write to."""

from collections.abc import Iterable
from typing import Any, Final

from pyspark.sql import SparkSession

from spark.reading.jvm import gateway, jvm, nested

CHUNK_CHARS: Final = 1 << 20


def local(spark: SparkSession, root: str) -> str | None:
    """The path on this machine's disk that `root` names, None where it names another file system."""
    path, system = _open(spark, root)
    uri = system.makeQualified(path).toUri()
    return str(uri.getPath()) if uri.getScheme() == "file" else None


def write(spark: SparkSession, folder: str, name: str, parts: Iterable[str]) -> None:
    """Write a UTF-8 file whole or not at all: beside its place first, then moved there."""
    hadoop = jvm(spark).org.apache.hadoop.fs
    path, system = _open(spark, folder)
    system.setWriteChecksum(False)
    system.mkdirs(path)
    fresh = hadoop.Path(path, f".{name}.new")
    there = hadoop.Path(path, name)
    stream = system.create(fresh, True)
    try:
        held: list[str] = []
        size = 0
        for part in parts:
            held.append(part)
            size += len(part)
            if size >= CHUNK_CHARS:
                stream.write("".join(held).encode())
                held, size = [], 0
        stream.write("".join(held).encode())
    finally:
        stream.close()
    context = hadoop.FileContext.getFileContext(system.getUri(), spark.sparkContext._jsc.hadoopConfiguration())
    option = nested(spark, "org.apache.hadoop.fs.Options", "Rename")
    overwrite = gateway(spark).new_array(option, 1)
    overwrite[0] = option.OVERWRITE
    context.rename(system.makeQualified(fresh), system.makeQualified(there), overwrite)


def _open(spark: SparkSession, where: str) -> tuple[Any, Any]:
    """Hadoop's path and file system of a folder or URL."""
    path = jvm(spark).org.apache.hadoop.fs.Path(where)
    return path, path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
