"""Access to the JVM that Spark runs in. Only this module uses the private attributes of PySpark that lead there."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from py4j.java_gateway import JavaClass, JavaPackage  # type: ignore[import-untyped]
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "Py4JError",
    "Py4JJavaError",
    "Snapshot",
    "checkpointed_ids",
    "drop_checkpointed",
    "dump_classes",
    "gateway",
    "hadoop_configuration",
    "is_deterministic",
    "is_stopped",
    "jvm",
    "keep_classes",
    "nested",
    "parse_expression",
    "reason",
    "snapshot_of",
    "table_property",
    "transaction_number",
    "version_of",
]


def jvm(spark: SparkSession) -> Any:
    """Return the JVM's packages, as attributes by name."""
    return spark._jvm


class _KeptClass(JavaClass):  # type: ignore[misc]
    """A Java class whose static methods are looked up in the JVM once, and not for each call."""

    def __getattr__(self, name: str) -> Any:
        member = super().__getattr__(name)
        setattr(self, name, member)
        return member


class _KeptPackage(JavaPackage):  # type: ignore[misc]
    """A Java package whose packages and classes are looked up in the JVM once, its known packages never."""

    def __getattr__(self, name: str) -> Any:
        fqn = f"{self._fqn}.{name}"
        if fqn in _PACKAGES:
            member: Any = _KeptPackage(fqn, self._gateway_client, self._jvm_id)
        else:
            member = super().__getattr__(name)
        setattr(self, name, member)
        return member


# What PySpark looks up for each column and each table.
_CLASSES: Final = ("functions", "org.apache.spark.sql.functions", "PythonUtils", "PythonSQLUtils")
# The packages, with those that they lie in, of all classes that PySpark and this job name in full.
_PACKAGES: Final = frozenset(
    fqn[:end]
    for fqn in (
        "io.delta.tables.",
        "java.io.",
        "java.lang.",
        "java.time.",
        "java.util.concurrent.",
        "org.apache.hadoop.fs.",
        "org.apache.kafka.clients.admin.",
        "org.apache.kafka.clients.consumer.",
        "org.apache.kafka.common.",
        "org.apache.spark.api.java.",
        "org.apache.spark.api.python.",
        "org.apache.spark.sql.api.python.",
        "org.apache.spark.sql.classic.",
        "scala.",
    )
    for end, character in enumerate(fqn)
    if character == "."
)


def keep_classes(spark: SparkSession) -> None:
    """Keep what Spark's view of the JVM answers for the names that PySpark looks up for each column.

    For each name py4j asks the JVM, which searches all jars in each imported package, and all jars for a package, which
    is no class. No name gets another meaning: each keeps the class or package that the view has found.
    """
    view, client = jvm(spark), gateway(spark)._gateway_client
    for name in _CLASSES:
        setattr(view, name, _KeptClass(getattr(view, name)._fqn, client))
    for name in _PACKAGES:
        if "." not in name:
            setattr(view, name, _KeptPackage(name, client, view._id))


def gateway(spark: SparkSession) -> Any:
    """Return py4j's gateway, which creates Java arrays."""
    return spark.sparkContext._gateway


def hadoop_configuration(spark: SparkSession) -> Any:
    """Return Hadoop's configuration, by which Spark opens file systems."""
    return spark.sparkContext._jsc.hadoopConfiguration()


def nested(spark: SparkSession, outer: str, name: str) -> Any:
    """Return a nested Java class; py4j finds such a class only by its binary name."""
    return getattr(jvm(spark), f"{outer}${name}")


def reason(error: Py4JJavaError) -> str:
    """Return the message of the innermost cause, on one line."""
    cause = error.java_exception
    while cause.getCause() is not None:
        cause = cause.getCause()
    return str(cause.toString()).replace("\n", " ")


def is_deterministic(rows: DataFrame) -> bool:
    """Check whether every expression of a frame is deterministic."""
    return bool(rows._jdf.queryExecution().analyzed().deterministic())


def parse_expression(spark: SparkSession, text: str) -> None:
    """Parse an expression of Spark SQL, whose columns need not exist; raises ParseException.

    Spark logs an error for each expression that it fails to resolve.
    """
    spark._jsparkSession.sessionState().sqlParser().parseExpression(text)


class Snapshot(NamedTuple):
    """The size in bytes of a version of a Delta table, and its number of files."""

    size: int
    files: int


def snapshot_of(rows: DataFrame) -> Snapshot:
    """Return size and files of the Delta table that a frame reads unchanged.

    The log is listed once more. Delta's checksum file of the version has both; without that file Delta runs queries.
    """
    snapshot = _snapshot(rows)
    checksum = snapshot.checksumOpt()
    if checksum.isDefined():
        return Snapshot(int(checksum.get().tableSizeBytes()), int(checksum.get().numFiles()))
    return Snapshot(int(snapshot.sizeInBytes()), int(snapshot.numOfFiles()))


def transaction_number(rows: DataFrame, application: str) -> int | None:
    """Return the `txnVersion` of an application's last commit to the Delta table that a frame reads unchanged.

    As `snapshot_of`, by the checksum file if that has the numbers.
    """
    snapshot = _snapshot(rows)
    checksum = snapshot.checksumOpt()
    if checksum.isEmpty() or checksum.get().setTransactions().isEmpty():
        number = snapshot.transactions().get(application)
        return int(number.get()) if number.isDefined() else None
    found = checksum.get().setTransactions().get()
    transactions = (found.apply(nth) for nth in range(found.size()))
    return next((int(one.version()) for one in transactions if one.appId() == application), None)


def version_of(rows: DataFrame) -> int:
    """Return the newest version of the Delta table that a frame reads unchanged; lists the log, runs no query."""
    return int(_snapshot(rows).version())


def table_property(rows: DataFrame, name: str) -> str | None:
    """Return a property of the Delta table that a frame reads unchanged; None if the table does not set it."""
    value = _snapshot(rows).metadata().configuration().get(name)
    return str(value.get()) if value.isDefined() else None


def is_stopped(spark: SparkSession) -> bool:
    """Check whether Spark has been stopped: no query of this process can succeed any more."""
    return bool(spark.sparkContext._jsc.sc().isStopped())


def dump_classes(spark: SparkSession, path: str) -> None:
    """Let the JVM write the archive of the classes that it has loaded, as `jcmd VM.cds dynamic_dump` does; it was
    started with -XX:+RecordDynamicDumpInfo. Raises Py4JError if it cannot."""
    packages = jvm(spark)
    java_class = packages.java.lang.Class

    def array(name: str, items: Sequence[Any]) -> Any:
        made = gateway(spark).new_array(getattr(packages.java.lang, name), len(items))
        for nth, item in enumerate(items):
            made[nth] = item
        return made

    strings = "[Ljava.lang.String;"
    types = ("javax.management.ObjectName", "java.lang.String", "[Ljava.lang.Object;", strings)
    # The class of the server is of a package that is not exported: py4j does not find its methods.
    server = packages.java.lang.management.ManagementFactory.getPlatformMBeanServer()
    connection = java_class.forName("javax.management.MBeanServerConnection")
    invoke = connection.getMethod("invoke", array("Class", [java_class.forName(name) for name in types]))
    commands = packages.javax.management.ObjectName("com.sun.management:type=DiagnosticCommand")
    given = array("Object", [array("String", ["dynamic_dump", path])])
    invoke.invoke(server, array("Object", [commands, "vmCds", given, array("String", [strings])]))


def checkpointed_ids(spark: SparkSession) -> set[int]:
    """Return the ids of the locally checkpointed data that Spark keeps (`DataFrame.localCheckpoint`)."""
    return {int(id) for id, kept in spark.sparkContext._jsc.getPersistentRDDs().items() if kept.isCheckpointed()}


def drop_checkpointed(spark: SparkSession, ids: set[int]) -> None:
    """Drop locally checkpointed data, which no query may need any more.

    Spark drops such data by itself once the JVM has collected the last reference to it, which may be much later.
    """
    kept = spark.sparkContext._jsc.getPersistentRDDs()
    for id in ids:
        if (data := kept.get(id)) is not None:
            data.unpersist(False)


def _snapshot(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed().relation().location().getSnapshot()
