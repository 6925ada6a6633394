"""The file systems on which a lake is safe: of two concurrent commits to a Delta table only one can win there.

Delta commits a version by writing a file of its log that must not exist yet. If the file system cannot do that in one
step, two runs both commit the same version, and the commit of one is lost; a lock of the runs does not prevent that,
because a suspended run may write when its lock has expired. Source: Delta's requirements on storage
(`io.delta.storage.LogStore`), and the log stores that `DelegatingLogStore` chooses by the scheme.
"""

from typing import Final

from pyspark.sql import SparkSession

from spark.errors import CannotRun
from spark.reading.jvm import hadoop_configuration, jvm

SAFE: Final = (
    "file",  # the lock on the lake's file `_lock` keeps out all other processes
    "hdfs",  # a rename fails if the target exists
    "viewfs",  # as safe as what it mounts
    "abfs",  # a rename fails if the target exists (in an account with a hierarchical namespace)
    "abfss",
    "gs",  # a PUT has the condition that the object has no generation yet
)
"""The schemes of these file systems, each with what makes a commit one step."""


def check(spark: SparkSession, root: str) -> None:
    """Check that the lake at `root` is on such a file system; CannotRun otherwise. Opens no file system."""
    scheme = scheme_of(spark, root)
    if scheme not in SAFE:
        *others, last = (f"{name}:" for name in SAFE)
        raise CannotRun(
            f"--lake {root}: two runs could commit the same version of a table on {scheme}:, and one of them would be "
            f"lost; set a folder, or a URL that begins with {', '.join(others)} or {last}"
        )


def scheme_of(spark: SparkSession, root: str) -> str:
    """Return the scheme of a folder or URL; for a folder, that of Hadoop's default file system."""
    hadoop = jvm(spark).org.apache.hadoop.fs
    uri = hadoop.Path(root).toUri()
    if uri.getScheme() is None:
        uri = hadoop.FileSystem.getDefaultUri(hadoop_configuration(spark))
    return str(uri.getScheme()).lower()
