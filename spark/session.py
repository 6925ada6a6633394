"""The Spark session of a run: Delta and Kafka on its class path, and sized for where it runs."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from spark import jars

APP: Final = "fencepost-audit"
# About 100 MB of what is exchanged for the state, and of the hash tables that it is put into.
RECORDS_A_PARTITION: Final = 400_000
LOGGING: Final = Path(__file__).with_name("log4j2.properties")

_ALWAYS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Hours are cut and printed in UTC wherever the job runs.
    "spark.sql.session.timeZone": "UTC",
    # What an expression of the user's cannot make anything of is nothing, not the end of the run.
    "spark.sql.ansi.enabled": "false",
    "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
    # Each call that makes a column would first tell Spark its line in Python, which is four calls more.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # It asks of each record, before it is taken apart, whether that gives any rows, and so parses its JSON five times.
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.InferFiltersFromGenerate",
    # What is merged is deterministic (frozen offsets, total order) and kept on disk already.
    "spark.databricks.delta.merge.materializeSource": "none",
}

# On one machine: no web server, few partitions, a snapshot of a small table in one task.
_LOCAL: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.default.parallelism": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.memory": "3g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Spark makes this folder although every table has a path of its own: not where the job was started.
    "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "fencepost-spark-warehouse"),
}

# A short run is mostly compiling: the optimising compiler waits for what is hot ten times as long as by default,
# which saves a third of a small run's processor time and costs a large one nothing. Two cores need no G1.
_JAVA: Final = (
    "-XX:+UseParallelGC -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)


def open_session(environ: Mapping[str, str] | None = None, java_options: str = _JAVA) -> SparkSession:
    """The session of this process.

    Under spark-submit, master, sizes and jars are what was submitted. Started by hand it is `local[*]` with the
    jars of the lock (CannotRun where one is missing), in a JVM with these options.
    """
    environ = os.environ if environ is None else environ
    builder = SparkSession.builder.appName(APP)
    for name, value in _ALWAYS.items():
        builder = builder.config(name, value)
    if "PYSPARK_GATEWAY_PORT" not in environ:
        paths = ",".join(str(path) for path in jars.find(environ))
        builder = builder.master(environ.get("FENCEPOST_SPARK_MASTER", "local[*]")).config("spark.jars", paths)
        options = f"{java_options} -Dlog4j2.configurationFile={LOGGING.as_uri()}"
        builder = builder.config("spark.driver.extraJavaOptions", options)
        for name, value in _LOCAL.items():
            builder = builder.config(name, value)
    return builder.getOrCreate()


def size_for(spark: SparkSession, records: int) -> int:
    """Cut what is exchanged into parts that fit into a task's memory, never into fewer than the session has.

    Answers into how many.
    """
    name = "spark.sql.shuffle.partitions"
    parts = max(int(spark.conf.get(name) or 0), -(-records // RECORDS_A_PARTITION))
    spark.conf.set(name, str(parts))
    return parts
