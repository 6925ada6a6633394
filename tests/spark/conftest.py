"""One Spark session for all tests of the job, and fixtures that run the job in it."""

import os
import time
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from tests.conftest import FIRST_PROCESS
from tests.spark.history import History
from tests.spark.runs import BRIEF_JAVA_OPTIONS, JAVA_OPTIONS, interpreted, run, session_for_tests
from tests.spark.runs import Ran as Ran


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that the job opens, with Spark's interpreter; `as_large` restores the job's settings.

    Of several processes the first one runs most of the tests with Spark (tests/conftest.py), the helper a part.
    """
    helps = os.environ.get("PYTEST_XDIST_WORKER", FIRST_PROCESS) != FIRST_PROCESS
    session = session_for_tests(BRIEF_JAVA_OPTIONS if helps else JAVA_OPTIONS)
    with interpreted(session):
        yield session
    session.stop()


class Audit(Protocol):
    """Runs the job on a history; each history has a lake of its own."""

    def __call__(
        self, history: History, *, later_s: float = 0, now_ms: int | None = None, lake: str = "lake", **options: Any
    ) -> Ran: ...


@pytest.fixture(scope="session")
def audit(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """Return the function that runs the job. `later_s` sets its clock ahead, so that a grace needs no waiting; `now_ms`
    sets the clock."""
    folder = tmp_path_factory.mktemp("audit")

    def carry_out(
        history: History, *, later_s: float = 0, now_ms: int | None = None, lake: str = "lake", **given: Any
    ) -> Ran:
        clock_ms = int((time.time() + later_s) * 1000) if now_ms is None else now_ms
        return run(spark, history, folder / history.namespace, clock_ms, lake=lake, **given)

    return carry_out


@pytest.fixture
def history(kafka: Kafka, namespace: str) -> History:
    """An empty history on the tests' broker."""
    return History(kafka.bootstrap, namespace)
