"""What Spark has read of the tables of a lake, by the metrics of its scans."""

from collections import Counter
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession


def reads(spark: SparkSession, lake: Path, table: str = "deliveries") -> Counter[str]:
    """Sum up Spark's metrics of every scan of a table in a lake so far: files, and their bytes."""
    context: Any = spark.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()
    store: Any = spark._jsparkSession.sharedState().statusStore()
    found: Counter[str] = Counter()
    executions = store.executionsList()
    for n in range(executions.size()):
        number = executions.apply(n).executionId()
        values = store.executionMetrics(number)
        nodes = store.planGraph(number).allNodes()
        for m in range(nodes.size()):
            node = nodes.apply(m)
            if node.name().startswith("Scan parquet") and f"{lake}/{table}" in node.desc():
                for k in range(node.metrics().size()):
                    metric = node.metrics().apply(k)
                    value = values.get(metric.accumulatorId())
                    if metric.name() in ("number of files read", "size of files read") and value.isDefined():
                        found[metric.name()] += _metric_value(value.get())
    return found


def _metric_value(text: str) -> int:
    """Parse a metric of Spark, with its thousands separators and unit."""
    number, _, unit = text.replace(",", "").partition(" ")
    return round(float(number) * {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit])
