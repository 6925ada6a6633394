"""The door to the JVM that Spark runs in: untyped, and narrow for that."""

from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

__all__ = ["Py4JError", "Py4JJavaError", "gateway", "is_deterministic", "jvm", "nested", "reason"]


def jvm(spark: SparkSession) -> Any:
    """The JVM's packages by name."""
    return spark._jvm


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
