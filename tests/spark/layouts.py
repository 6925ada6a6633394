"""Lakes in the layouts of earlier releases, made from lakes of this one."""

import json
import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from spark.rules import hourly
from spark.steps import finished_runs
from spark.tables import lake_version, schemas
from spark.tables.lake import Lake


def without_version(spark: SparkSession, root: Path) -> None:
    """Turn a lake into one of the last release that stored no version: the sums by hour are in the summary of a run."""
    lake = Lake(spark, str(root))
    last = finished_runs.last_finished_run(lake)
    assert last is not None
    sums = {name: last[name] for name in hourly.STORED}
    rows = [row.asDict() for row in lake.read("runs").drop("counted_run").collect()]
    for row in rows:
        row["summary"] = json.dumps(json.loads(row["summary"]) | (sums if row["run"] == last["run"] else {}))
    columns = ", ".join(f"{name} {data_type}" for name, data_type in schemas.RUN.items() if name != "counted_run")
    earlier = spark.createDataFrame(rows, columns).write.format("delta").mode("overwrite")
    earlier.option("overwriteSchema", True).save(lake.path("runs"))
    for name in ("hourly_balance", "hourly_records"):
        shutil.rmtree(root / name)
    (root / lake_version.FILE).unlink()
