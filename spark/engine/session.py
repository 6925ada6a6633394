"""The Spark session of a run: with Delta and Kafka on its class path, and sized for one machine or a cluster."""

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from spark.engine import class_data, jars
from spark.engine.jvm import keep_classes

APP: Final = "fencepost-audit"
# About 100 MB of exchanged rows for the reduction, and of the hash tables that the join builds from these rows.
RECORDS_A_PARTITION: Final = 400_000
# Up to this many records Spark takes longer to compile a plan, and to plan it again by its statistics, than to
# interpret it.
INTERPRETED_RECORDS: Final = 50_000
# From so many of them on Spark takes longer to interpret the expressions of a plan than to compile these one by one.
COMPILED_EXPRESSIONS_RECORDS: Final = 20_000
# Not beside this module: manifests of Kubernetes name the path.
LOGGING: Final = Path(__file__).parents[1] / "log4j2.properties"

_ALWAYS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Hours are computed and formatted in UTC on every machine.
    "spark.sql.session.timeZone": "UTC",
    # An `--identity` expression that fails on a record gives null, and does not fail the run.
    "spark.sql.ansi.enabled": "false",
    "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
    # With this on, each call that builds a column also sends its Python line to the JVM, in four more calls.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # With this on, each call that builds a column takes a stack trace, which goes with its expression to each task.
    "spark.sql.dataFrameQueryContext.enabled": "false",
    # This rule adds a filter before each explode, which parses the JSON of each record five times.
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.InferFiltersFromGenerate",
    # The source of a MERGE is deterministic (frozen offsets, total order) and checkpointed already.
    "spark.databricks.delta.merge.materializeSource": "none",
    # Nothing reads the files that Delta lists in its checksum of each version too. The list takes a query a commit.
    "spark.databricks.delta.allFilesInCrc.enabled": "false",
    # Delta's own log store for S3 does not prevent that two processes commit the same version.
    jars.LOG_STORE_SETTING: jars.LOG_STORE_CLASS,
}

# On one machine: no web server, few partitions, a snapshot of a small table in one task.
_LOCAL: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark keeps the plans of past queries for its web server, also without one; by default of 1,000 of each.
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.sql.ui.retainedExecutions": "20",
    # Spark describes each plan for its web server, also without one; by default each operator with all its fields.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.shuffle.partitions": "4",
    "spark.default.parallelism": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.memory": "3g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Spark creates this folder even if no table uses it; by default in the working directory.
    "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "fencepost-spark-warehouse"),
}

_EXPRESSIONS: Final = "spark.sql.codegen.factoryMode"

INTERPRETED: Final = {
    "spark.sql.codegen.wholeStage": "false",
    _EXPRESSIONS: "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}
"""Settings for plans over few records: without code generation, adaptive planning and parallel tasks."""

UTC: Final = "-Duser.timezone=UTC"
"""JDBC drivers convert a time without zone in the zone of the JVM: in another zone an hour of spring is moved."""

# A short run spends most of its time in the JIT compiler: with ten times the default thresholds, C2 compiles only hot
# methods, which saves processor time in short runs and costs none in long ones. Two cores need no G1.
JAVA_OPTIONS: Final = (
    f"{UTC} -XX:+UseParallelGC -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)

# A small run ends before the code of C2 has paid for its compilation. Without C2 the JVM has a small code cache by
# default, and sweeps it all the time when it is nearly full. It also begins with a small heap and a small space for
# classes, and collects the whole heap each time that one of them grows. With one thread the collector costs less.
SMALL_RUN_JAVA_OPTIONS: Final = (
    f"{UTC} -XX:+UseSerialGC -Xms1g -XX:MetaspaceSize=256m -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
)


def open_session(
    environ: Mapping[str, str] | None = None,
    java_options: str = JAVA_OPTIONS,
    urls: Sequence[str] = (),
    sharing: Callable[[Mapping[str, str]], str] = class_data.options,
) -> SparkSession:
    """Create the session of this process; `urls` are those of lake, report and sinks.

    Under spark-submit, master, sizes and jars are those of the submission. Otherwise the master is `local[*]`, with the
    jars of the lock, and those for S3 if a URL needs them (CannotRun if one is missing), in a JVM with `java_options`.
    With a local master the JVM has the options of `sharing` too, a function of the environment.
    """
    environ = os.environ if environ is None else environ
    builder = SparkSession.builder.appName(APP)
    for name, value in _ALWAYS.items():
        builder = builder.config(name, value)
    if "PYSPARK_GATEWAY_PORT" not in environ:
        master = environ.get("FENCEPOST_SPARK_MASTER", "local[*]")
        s3 = jars.find_s3(environ) if jars.needs_s3(urls) else []
        if _is_local(master):
            # Driver and executor are one JVM, and the jars lie on its class path: `spark.jars` would copy them.
            paths = [*class_data.class_path(environ), *s3]
            builder = builder.config("spark.driver.extraClassPath", os.pathsep.join(map(str, paths)))
            java_options = f"{java_options} {sharing(environ)}"
        else:
            builder = builder.config("spark.jars", ",".join(map(str, [*jars.find(environ), *s3])))
        options = f"{java_options} -Dlog4j2.configurationFile={LOGGING.as_uri()}"
        builder = builder.master(master).config("spark.driver.extraJavaOptions", options)
        builder = builder.config("spark.executor.extraJavaOptions", UTC)
        for name, value in _LOCAL.items():
            builder = builder.config(name, value)
    spark = builder.getOrCreate()
    keep_classes(spark)
    return spark


def _is_local(master: str) -> bool:
    """Check whether driver and executor are one JVM."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def interpret(spark: SparkSession, *, interprets: bool) -> None:
    """Let Spark interpret its next plans, or (not `interprets`) compile them, as when the session was opened."""
    opened = spark.sparkContext.getConf()
    _set(spark, {name: value if interprets else opened.get(name) for name, value in INTERPRETED.items()})


@contextmanager
def settings(spark: SparkSession, values: Mapping[str, str | None]) -> Iterator[None]:
    """Set settings of the session, and restore their former values at the end of the context; None unsets one."""
    with restored(spark, values):
        _set(spark, values)
        yield


@contextmanager
def compiling(spark: SparkSession, records: int) -> Iterator[None]:
    """Let Spark compile the single expressions of plans over so many records in the context, if they are not few, also
    where Spark interprets the plans themselves."""
    few = records < COMPILED_EXPRESSIONS_RECORDS or spark.conf.get(_EXPRESSIONS) != INTERPRETED[_EXPRESSIONS]
    with settings(spark, {} if few else {_EXPRESSIONS: None}):
        yield


@contextmanager
def restored(spark: SparkSession, names: Iterable[str] = INTERPRETED) -> Iterator[None]:
    """Restore settings of the session at the end of the context; by default those of `interpret` and `size_for`."""
    before = {name: spark.conf.get(name, None) for name in names}
    try:
        yield
    finally:
        _set(spark, before)


def _set(spark: SparkSession, values: Mapping[str, str | None]) -> None:
    """Set settings of the session; None unsets one."""
    for name, value in values.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)


def tasks_for(spark: SparkSession, records: int) -> int:
    """Return how many tasks are to read so many records: one for each core, or more, as many records each as a shuffle
    partition has."""
    return max(spark.sparkContext.defaultParallelism, -(-records // RECORDS_A_PARTITION))


def size_for(spark: SparkSession, records: int) -> int:
    """Set the number of shuffle partitions so that one fits into a task's memory, and return that number.

    `records` are the records to exchange. The number is never lowered, except by `restored`.
    """
    name = "spark.sql.shuffle.partitions"
    parts = max(int(spark.conf.get(name) or 0), -(-records // RECORDS_A_PARTITION))
    spark.conf.set(name, str(parts))
    return parts
