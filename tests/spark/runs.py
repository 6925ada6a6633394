"""Runs of the job in this process, on a Spark session that is opened once."""

import dataclasses
import json
import uuid
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession

from deploy import places
from service.contract import Rules, SharedSettings
from spark import job
from spark.engine import session
from spark.engine.session import INTERPRETED, open_session
from spark.report.document import Report
from spark.settings import Options, Settings
from spark.tables import lake
from spark.without_spark import before_spark, idle
from tests.spark.history import History

# The session runs the job some dozens of times: the optimising compiler is worth its time with a higher threshold than
# the default. A larger code cache, because a full one is swept all the time.
JAVA_OPTIONS: Final = (
    "-XX:+UseParallelGC -XX:ReservedCodeCacheSize=512m -XX:Tier4InvocationThreshold=15000 "
    "-XX:Tier4MinInvocationThreshold=2000 -XX:Tier4CompileThreshold=45000 -XX:Tier4BackEdgeThreshold=120000"
)

# For a session that runs the job some times: the optimising compiler saves its own time only in one of dozens.
BRIEF_JAVA_OPTIONS: Final = "-XX:+UseParallelGC -XX:ReservedCodeCacheSize=256m -XX:TieredStopAtLevel=1"


def session_for_tests(java_options: str = JAVA_OPTIONS) -> SparkSession:
    """Open the session as the job does, for plans that run once or twice."""
    with warnings.catch_warnings():
        # other tests need pandas; the job does not use it
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
        session = open_session({"FENCEPOST_JARS": str(places.jars("spark"))}, java_options)
        session.range(1).toDF("n").count()
        session.createDataFrame([(1,)], "n int").count()
    return session


def interpreted(spark: SparkSession) -> AbstractContextManager[None]:
    """Let Spark interpret expressions in the context, as in most tests."""
    return session.settings(spark, INTERPRETED)


@contextmanager
def as_large(spark: SparkSession) -> Iterator[None]:
    """Let runs in the context do as over many records: compile their plans, and read large tables for each query."""
    opened = spark.sparkContext.getConf()
    with (
        session.settings(spark, {name: opened.get(name) for name in INTERPRETED}),
        patch.object(session, "INTERPRETED_RECORDS", -1),
        patch.object(lake, "SMALL_BYTES", -1),
    ):
        yield


class Cut(Exception):
    """Ends a run as if the process had been killed."""


@contextmanager
def cut(
    monkeypatch: pytest.MonkeyPatch, owner: Any, step: str, *, after: bool, only: str | None = None
) -> Iterator[None]:
    """End a run before or after a step; `only` is the table of the step."""
    whole = getattr(owner, step)

    def broken(self: Any, *arguments: Any, **options: Any) -> Any:
        if only is not None and arguments[0] != only:
            return whole(self, *arguments, **options)
        if after:
            whole(self, *arguments, **options)
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, broken)
        with pytest.raises(Cut):
            yield


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run in this process."""

    made: Report
    lake: Path
    report: Path

    @property
    def document(self) -> dict[str, Any]:
        return dict(self.made.document)

    def findings(self, *topics: str) -> set[tuple[str, str | None, str | None]]:
        """Return kind, cause and key (or partition) of each finding; if topics are given, of these only."""
        return {
            (one["kind"], one["cause"], one["key"] if one["id"] else f"{one['topic']}[{one['partition']}]")
            for one in self.document["findings"]
            if not topics or one["topic"] in topics
        }

    def balance(self, *topics: str) -> Counter[str]:
        """Return the sums of these topics in the report."""
        total: Counter[str] = Counter()
        for counts in self.document["topics"]:
            if counts["topic"] in topics:
                total.update({name: count for name, count in counts.items() if name != "topic"})
        return total

    def written(self) -> str:
        """Return findings and balance of report.json, as text."""
        document = json.loads((self.report / "report.json").read_text())
        return json.dumps([document["findings"], document["balance"], document["causes"]])


def run(
    spark: SparkSession, history: History, root: Path, now_ms: int, *, lake: str = "lake", rules: str = "", **given: Any
) -> Ran:
    """Run the job at this time, with its lake below `root`; `given`: options of the command line, key retention,
    silences, webhook.

    `rules` is the path of a TOML file.
    """
    settings = settings_of(history, root, lake, rules, given)
    made = job.run(spark, settings, lambda line: None, now_ms)
    return Ran(made, root / lake, Path(settings.options.report))


def run_idle(
    history: History, root: Path, now_ms: int, *, lake: str = "lake", rules: str = "", **given: Any
) -> Ran | None:
    """Run the job as `run` does, without Spark; None if the run needs Spark."""
    settings = settings_of(history, root, lake, rules, given)
    known = before_spark.known(settings, {})
    made = None if known is None else idle.run(known, lambda line: None, now_ms)
    return None if made is None else Ran(made, root / lake, Path(settings.options.report))


def settings_of(history: History, root: Path, lake: str, rules: str, given: dict[str, Any]) -> Settings:
    """Return the settings of a run with its lake below `root`, and a report of its own."""
    settings_given = {name: given.pop(name) for name in ("silences", "webhook") if name in given}
    shared_given = {name: given.pop(name) for name in ("key_ttl_s",) if name in given}
    report = root / f"report-{uuid.uuid4().hex[:8]}"
    # Few tests need the topic of findings.
    options = Options(lake=str(root / lake), report=str(report), **({"publish": False} | given))
    shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace, rules=rules, **shared_given)
    return Settings(shared=shared, options=options, rules=Rules.read(rules), **settings_given)
