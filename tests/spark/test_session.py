"""Tests the settings of the session that the job opens."""

from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from spark.reading import decode, source


@pytest.mark.parametrize("decoded", [decode.ledger, decode.answers])
def test_the_json_of_a_record_is_parsed_once(
    spark: SparkSession, decoded: Callable[[DataFrame, int], DataFrame]
) -> None:
    """Otherwise Spark would parse each record once more, to check whether it gives any rows."""
    kinds = StructType.fromDDL(source.SCHEMA)
    assert isinstance(kinds, StructType)
    records = spark.range(3).select(
        *(
            F.col("id").cast("string").cast(field.dataType).alias(field.name)
            if field.name != "headers"
            else F.lit(None).cast(field.dataType).alias("headers")
            for field in kinds
        )
    )
    plan = decoded(records, 0)._jdf.queryExecution().executedPlan().toString()
    assert plan.count("from_json") == 1, plan
