"""One Spark session for all tests of the job, and runs of it within."""

import dataclasses
import json
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from pyspark.sql import SparkSession

from deploy.local import places
from deploy.local.stack import Kafka
from service.shared import Rules, SharedSettings
from spark import job
from spark.session import open_session
from spark.settings import Options, Settings
from tests.spark.history import History


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that the job itself would open."""
    with warnings.catch_warnings():
        # pandas is here for other tests' sake; the job does not use it.
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
        # Tests run each plan once or twice: without the optimising compiler they take half the processor time.
        java_options = "-XX:+UseParallelGC -XX:TieredStopAtLevel=1"
        session = open_session({"FENCEPOST_JARS": str(places.jars("spark"))}, java_options)
        session.range(1).toDF("n").count()
        session.createDataFrame([(1,)], "n int").count()
    yield session
    session.stop()


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run that was carried out in this process."""

    outcome: job.Outcome
    lake: Path
    report: Path

    @property
    def document(self) -> dict[str, Any]:
        return self.outcome.document

    def findings(self) -> set[tuple[str, str | None, str | None]]:
        """Kind, cause and key (or partition) of each finding."""
        return {
            (one["kind"], one["cause"], one["key"] if one["id"] else f"{one['topic']}[{one['partition']}]")
            for one in self.document["findings"]
        }

    def written(self) -> str:
        """The findings and the balance of report.json, as text."""
        document = json.loads((self.report / "report.json").read_text())
        return json.dumps([document["findings"], document["balance"], document["causes"]])


class Audit(Protocol):
    """Runs the job on a history; each of its histories has a lake of its own."""

    def __call__(self, history: History, *, later_s: float = 0, lake: str = "lake", **options: Any) -> Ran: ...


@pytest.fixture(scope="session")
def audit(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """`later_s` sets the job's clock ahead, so that a grace passes without waiting for it."""
    folder = tmp_path_factory.mktemp("audit")

    def carry_out(history: History, *, later_s: float = 0, lake: str = "lake", **given: Any) -> Ran:
        rules = given.pop("rules", "")
        shared_given = {name: given.pop(name) for name in ("key_ttl_s",) if name in given}
        root = folder / history.namespace
        report = root / f"report-{uuid.uuid4().hex[:8]}"
        options = Options(lake=str(root / lake), report=str(report), **given)
        shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace, rules=rules, **shared_given)
        settings = Settings(shared=shared, options=options, rules=Rules.read(rules))
        now_ms = int((time.time() + later_s) * 1000)
        outcome = job.run(spark, settings, lambda line: None, now_ms)
        return Ran(outcome, root / lake, report)

    return carry_out


@pytest.fixture
def history(kafka: Kafka, namespace: str) -> History:
    """An empty history on the tests' broker."""
    return History(kafka.bootstrap, namespace)
