"""Counts of records by hour and partition."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark.tables import hours

# With more partitions the counts are by topic, so that the driver's memory does not grow with the cluster.
PARTITIONS_MAX: Final = 500

NO_PARTITION: Final = -1
"""Stands for the partition in counts by topic."""


def record_counts(rows: DataFrame, *, partitions: bool) -> DataFrame:
    """Count records by hour of acceptance: deliveries.ROW → `hour string, topic string, partition int, records bigint`.

    Without `partitions` every row counts for NO_PARTITION.
    """
    partition = F.col("partition") if partitions else F.lit(NO_PARTITION)
    copies = rows.where("count > 0").select("accepted_hour", "topic", partition.alias("partition"), "count")
    summed = copies.groupBy(F.col("accepted_hour").alias("hour"), "topic", "partition")
    return summed.agg(F.sum("count").alias("records")).withColumn("hour", hours.as_text(F.col("hour")))
