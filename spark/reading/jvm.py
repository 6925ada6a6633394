"""The door to the JVM that Spark runs in: untyped, and narrow for that."""

from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

__all__ = ["Py4JError", "Py4JJavaError", "gateway", "is_deterministic", "jvm", "nested", "reason", "remember_methods"]


def jvm(spark: SparkSession) -> Any:
    """The JVM's packages by name."""
    return spark._jvm


class _Remembering:
    """A Java class whose static methods are looked up once each."""

    def __init__(self, java_class: Any) -> None:
        self._java_class = java_class

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._java_class, name)
        setattr(self, name, method)
        return method


def remember_methods(spark: SparkSession) -> None:
    """PySpark looks up the class and the method, by reflection in the JVM, each time that an expression is made."""
    view = jvm(spark)
    for name in ("functions", "org.apache.spark.sql.functions", "PythonUtils"):
        if not isinstance(known := getattr(view, name), _Remembering):
            setattr(view, name, _Remembering(known))


def gateway(spark: SparkSession) -> Any:
    """py4j's gateway, which makes arrays."""
    return spark.sparkContext._gateway


def nested(spark: SparkSession, outer: str, name: str) -> Any:
    """A nested Java class: py4j finds it only by its binary name."""
    return getattr(jvm(spark), f"{outer}${name}")


def reason(error: Py4JJavaError) -> str:
    """The innermost cause's own words, on one line."""
    cause = error.java_exception
    while cause.getCause() is not None:
        cause = cause.getCause()
    return str(cause.toString()).replace("\n", " ")


def is_deterministic(rows: DataFrame) -> bool:
    """Whether rows are the same each time that they are made."""
    return bool(rows._jdf.queryExecution().analyzed().deterministic())
