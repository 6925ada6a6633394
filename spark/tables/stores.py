"""The file systems on which a lake is safe: of two concurrent commits to a Delta table only one can win there.

Delta commits a version by writing a file of its log that must not exist yet. If the file system cannot do that in one
step, two runs both commit the same version, and the commit of one is lost; a lock of the runs does not prevent that,
because a suspended run may write when its lock has expired. Source: Delta's requirements on storage
(`io.delta.storage.LogStore`), and the log stores that `DelegatingLogStore` chooses by the scheme.
"""

from typing import Any, Final

from pyspark.sql import SparkSession

from spark.engine import jars
from spark.engine.jvm import Py4JError, Py4JJavaError, hadoop_configuration, jvm, reason
from spark.errors import CannotRun

SAFE: Final = (
    "file",  # the lock on the lake's file `_lock` keeps out all other processes
    "hdfs",  # a rename fails if the target exists
    "viewfs",  # as safe as what it mounts
    "abfs",  # a rename fails if the target exists (in an account with a hierarchical namespace)
    "abfss",
    "gs",  # a PUT has the condition that the object has no generation yet
    "s3a",  # a PUT has the condition that there is no object (`ConditionalPutLogStore`)
)
"""The schemes of these file systems, each with what makes a commit one step."""

PROBE: Final = "_conditional_put"
"""The object by which a run proves that a server keeps the condition of a PUT."""


def check(spark: SparkSession, root: str) -> None:
    """Check that the lake at `root` is on such a file system; CannotRun otherwise.

    Only on S3 the file system is opened: many servers with S3's protocol ignore the condition of a PUT.
    """
    scheme = scheme_of(spark, root)
    if scheme not in SAFE:
        *others, last = (f"{name}:" for name in SAFE)
        raise CannotRun(
            f"--lake {root}: two runs could commit the same version of a table on {scheme}:, and one of them would be "
            f"lost; set a folder, or a URL that begins with {', '.join(others)} or {last}"
        )
    if scheme == "s3a":
        _check_conditional_put(spark, root)


def scheme_of(spark: SparkSession, root: str) -> str:
    """Return the scheme of a folder or URL; for a folder, that of Hadoop's default file system."""
    hadoop = jvm(spark).org.apache.hadoop.fs
    uri = hadoop.Path(root).toUri()
    if uri.getScheme() is None:
        uri = hadoop.FileSystem.getDefaultUri(hadoop_configuration(spark))
    return str(uri.getScheme()).lower()


def _check_conditional_put(spark: SparkSession, root: str) -> None:
    """Check that Delta commits to S3 by the log store with conditional PUTs, and that the server refuses the second PUT
    of one object."""
    if spark.sparkContext.getConf().get(jars.LOG_STORE_SETTING) != jars.LOG_STORE_CLASS:
        raise CannotRun(f"--lake {root}: set {jars.LOG_STORE_SETTING}={jars.LOG_STORE_CLASS}, or leave it unset")
    configuration = hadoop_configuration(spark)
    try:
        store = getattr(jvm(spark).fencepost, jars.LOG_STORE_CLASS.rpartition(".")[2])(configuration)
    except (Py4JError, TypeError) as error:
        raise CannotRun(
            f"--lake {root}: Spark's class path lacks the jars for S3; python -m deploy.install.s3 fetches them into "
            f"{jars.folder()}, with spark-submit name them in --jars"
        ) from error
    path = jvm(spark).org.apache.hadoop.fs.Path(root, PROBE)
    try:
        if _put(spark, store, path) and _put(spark, store, path):
            raise CannotRun(
                f"--lake {root}: the server ignores If-None-Match of a PUT, so that two runs could commit the same "
                "version of a table; set a URL of a server with conditional writes, as Amazon S3 has them"
            )
    except Py4JJavaError as error:
        raise CannotRun(f"--lake {root}: {reason(error)}") from error


def _put(spark: SparkSession, store: Any, path: Any) -> bool:
    """Write the object of the probe on the condition that it is not there; False if it was."""
    lines = jvm(spark).java.util.Collections.singletonList("").iterator()
    try:
        store.write(path, lines, False, hadoop_configuration(spark))
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() == "java.nio.file.FileAlreadyExistsException":
            return False
        raise
    return True
