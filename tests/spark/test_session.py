"""Tests the settings of the session that the job opens."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from py4j.protocol import REFLECTION_COMMAND_NAME  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from deploy.install import java
from spark.engine import jars, session
from spark.engine.jvm import gateway, jvm, keep_classes
from spark.reading import decode, source
from spark.tables.lake import Lake


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


@pytest.fixture
def commands(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that py4j sends to the JVM."""
    sent: list[str] = []
    client = gateway(spark)._gateway_client
    send = client.send_command

    def record(command: str, *arguments: Any, **more: Any) -> str:
        sent.append(command)
        return str(send(command, *arguments, **more))

    monkeypatch.setattr(client, "send_command", record)
    return sent


def test_a_column_is_made_without_looking_its_functions_up(commands: list[str]) -> None:
    """For each look-up of a name the JVM searches all its jars."""

    def column() -> None:
        F.transform(F.array(F.lower(F.col("text")), F.lit("a")), F.upper)

    column()
    commands.clear()
    column()
    assert len(commands) > 5
    assert not [command for command in commands if command.startswith(REFLECTION_COMMAND_NAME)]


def test_a_package_is_never_looked_up_and_a_class_once(spark: SparkSession, commands: list[str]) -> None:
    """To find that a name is no class the JVM searches all its jars."""
    keep_classes(spark)
    commands.clear()
    for _ in range(2):
        assert jvm(spark).java.util.concurrent.TimeUnit.MILLISECONDS is not None
        assert jvm(spark).org.apache.kafka.common.TopicPartition("t", 7).partition() == 7
    looked_up = [command.split("\n")[2] for command in commands if command.startswith(f"{REFLECTION_COMMAND_NAME}u")]
    assert looked_up == ["java.util.concurrent.TimeUnit", "org.apache.kafka.common.TopicPartition"]


@pytest.mark.parametrize(
    ("master", "is_local"),
    [("local", True), ("local[*]", True), ("local-cluster[2,1,1024]", False), ("spark://there:7077", False)],
)
def test_the_jars_are_on_the_class_path_of_one_jvm_or_sent_to_the_executors(
    master: str, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = MagicMock()
    builder.appName.return_value = builder.config.return_value = builder.master.return_value = builder
    monkeypatch.setattr(session, "SparkSession", Mock(builder=builder))
    monkeypatch.setattr(session, "keep_classes", Mock())
    locked, s3 = jars.locked(), [*jars.locked(jars.S3_LOCK), jars.log_store()]
    monkeypatch.setattr(jars, "find", lambda environ: [Path("/j", name) for name in locked])
    monkeypatch.setattr(jars, "find_s3", lambda environ: [Path("/j", name) for name in s3])
    monkeypatch.setattr(jars, "of_spark", lambda: [Path("/spark/core.jar")])
    session.open_session(
        {"FENCEPOST_SPARK_MASTER": master}, urls=["s3a://bucket/lake"], sharing=lambda environ: "-Xshare:auto"
    )
    settings = dict(call.args for call in builder.config.call_args_list)
    assert ("-Xshare:auto" in settings["spark.driver.extraJavaOptions"]) == is_local
    if is_local:
        # An archive is of the classes in the first of these: those for S3 come after them.
        names = [Path(path).name for path in settings["spark.driver.extraClassPath"].split(os.pathsep)]
        assert names == [*locked, "core.jar", *s3]
        assert "spark.jars" not in settings
    else:
        assert settings["spark.jars"] == ",".join(f"/j/{name}" for name in (*locked, *s3))
        assert "spark.driver.extraClassPath" not in settings


@pytest.mark.parametrize("options", [session.JAVA_OPTIONS, session.SMALL_RUN_JAVA_OPTIONS])
def test_java_accepts_the_options_of_the_job(options: str) -> None:
    """The other tests have options of their own."""
    done = subprocess.run(
        [java.home() / "bin" / "java", *options.split(), "-XshowSettings:properties", "-version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TZ": "Europe/Berlin"},
    )
    assert done.returncode == 0, done.stderr
    assert "user.timezone = UTC" in done.stderr
    assert "warning" not in done.stderr.lower()


def test_plans_are_interpreted_or_compiled_until_the_settings_are_restored(spark: SparkSession) -> None:
    def plan() -> str:
        rows = spark.range(9).groupBy("id").count()
        return str(rows._jdf.queryExecution().executedPlan().toString())

    before = {name: spark.conf.get(name) for name in session.INTERPRETED}
    with session.restored(spark):
        session.interpret(spark, interprets=False)
        assert "AdaptiveSparkPlan" in plan()
        assert session.size_for(spark, 9 * session.RECORDS_A_PARTITION) == 9
        session.interpret(spark, interprets=True)
        assert "AdaptiveSparkPlan" not in plan()
        assert "*(" not in plan()
        assert {name: spark.conf.get(name) for name in session.INTERPRETED} == session.INTERPRETED
        few, mode = session.COMPILED_EXPRESSIONS_RECORDS - 1, "spark.sql.codegen.factoryMode"
        with session.compiling(spark, few):
            assert spark.conf.get(mode) == "NO_CODEGEN"
        with session.compiling(spark, few + 1):
            assert spark.conf.get(mode) == "FALLBACK"
            assert "*(" not in plan()
        assert spark.conf.get(mode) == "NO_CODEGEN"
        session.interpret(spark, interprets=False)
    assert {name: spark.conf.get(name) for name in session.INTERPRETED} == before


def test_settings_get_their_former_values_back(spark: SparkSession, tmp_path: Path) -> None:
    """Not those of Spark: spark-submit may have set others."""
    name = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
    opened = spark.conf.get(name)
    with session.settings(spark, {name: "77"}):
        Lake(spark, str(tmp_path)).vacuum(24, [])
        assert spark.conf.get(name) == "77"
        with session.settings(spark, {name: None}):
            assert spark.conf.get(name) == opened
        assert spark.conf.get(name) == "77"
    assert spark.conf.get(name) == opened
