"""`python -m tests.spark.generated`: runs the job on histories with known faults, and checks jobs with broken rules.

--seeds N     the histories of the seeds 0 to N-1, three runs of each: recall and precision by kind and cause
--mutants     each mutant of tests/spark/mutants.py against a table of cases, which must detect it
"""

import argparse
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from spark.errors import CannotRun
from spark.reading.kafka_admin import KafkaAdmin, TopicPartition
from spark.tables import view
from tests.spark import checks
from tests.spark.mutants import MUTANTS, Mutant, active
from tests.spark.oracle import STAGES, Score, compare, compare_stuck
from tests.spark.runs import Ran, interpreted, run, session_for_tests
from tests.spark.script import FROZEN_MS
from tests.spark.times import HOUR_MS
from tests.spark.world import World

# Seeds that share a namespace, and so the runs: most of a run's time does not depend on its records.
TOGETHER: Final = 10

# A transaction of a history stays open over its first run.
OPEN_MS: Final = 4 * HOUR_MS


# The stage before which a run with other options is interrupted.
CUT_STAGE: Final = 2


class _Cut(Exception):
    """Ends a run as if the process had been killed."""


class Trial:
    """The histories of some seeds, and the runs of the job on these, in order.

    `timeout_ms`: the transaction timeout of the open transactions. `more_runs`: besides a run a stage, one that is
    interrupted, and one without the pass over ids.
    """

    def __init__(
        self,
        spark: SparkSession,
        bootstrap: str,
        root: Path,
        seeds: Sequence[int],
        timeout_ms: int,
        *,
        more_runs: bool = True,
    ) -> None:
        self._spark = spark
        self._world = World(bootstrap, f"world-{uuid.uuid4().hex[:12]}", seeds, timeout_ms)
        self._root = root / self._world.history.namespace
        self._root.mkdir()
        self._rules = self._root / "rules.toml"
        self._stage = 0
        self._more_runs = more_runs

    def next(self) -> Score:
        """Write the next stage, run the job, and compare its report with what was planted."""
        self._stage += 1
        self._world.write(self._stage)
        self._rules.write_text(self._world.rules(self._stage))
        if self._lake("whole").exists():
            shutil.copytree(self._lake("whole"), self._lake(f"before-{self._stage}"))
        if self._more_runs and self._stage == CUT_STAGE:
            # A run with other options is interrupted after its merge: the findings must be the same.
            with patch.object(view, "update", side_effect=_Cut), suppress(_Cut):
                self._run("whole", topics=(f"{self._world.history.namespace}-*.orders",), grace_s=1, window_h=24)
        score = self._run("whole")
        if self._more_runs and self._stage == STAGES:
            score.add(self._without_ids_pass())
        return score

    def _without_ids_pass(self) -> Score:
        """Run the job on all records without the pass over ids."""
        ran = self._ran("narrow", skip_ids=True)
        return compare_stuck(self._world.plants(), self._stage, ran.document)

    def detects(self, mutant: Mutant) -> bool:
        """Check whether the run of this stage, with the mutant in the job, differs from what was planted."""
        lake = f"mutant-{uuid.uuid4().hex[:8]}"
        if self._lake(f"before-{self._stage}").exists():
            shutil.copytree(self._lake(f"before-{self._stage}"), self._lake(lake))
        try:
            with active(mutant):
                return not self._run(lake).perfect
        except (CannotRun, Py4JJavaError):  # reading deleted records fails the run
            return True
        finally:
            shutil.rmtree(self._lake(lake), ignore_errors=True)

    def _lake(self, name: str) -> Path:
        return self._root / name

    def _ran(self, lake: str, **options: Any) -> Ran:
        now_ms = FROZEN_MS[self._stage - 1]
        with _diverging(self._world.diverged(self._stage)):
            return run(
                self._spark, self._world.history, self._root, now_ms, lake=lake, rules=str(self._rules), **options
            )

    def _run(self, lake: str, **options: Any) -> Score:
        ran = self._ran(lake, **options)
        return compare(self._world.plants(), self._stage, ran.document, ran.made.status)


@contextmanager
def _diverging(where: Mapping[TopicPartition, int]) -> Iterator[None]:
    """Patch `KafkaAdmin.diverged`: these logs diverge from these offsets on, besides the broker's own answer.

    Only for its first call, which is that of the run's plan: later the run asks whether its own reads diverged.
    """
    whole, before_the_run = KafkaAdmin.diverged, dict(where)

    def diverged(self: KafkaAdmin, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]:
        found = {**whole(self, positions), **before_the_run}
        before_the_run.clear()
        return found

    setattr(KafkaAdmin, "diverged", diverged)  # noqa: B010
    try:
        yield
    finally:
        setattr(KafkaAdmin, "diverged", whole)  # noqa: B010


def _seeds(spark: SparkSession, bootstrap: str, root: Path, count: int) -> bool:
    total = Score()
    for first in range(0, count, TOGETHER):
        started = time.monotonic()
        some = range(first, min(first + TOGETHER, count))
        trial = Trial(spark, bootstrap, root, some, OPEN_MS)
        for _ in range(STAGES):
            total.add(trial.next())
        print(f"seeds {some[0]} to {some[-1]}: {time.monotonic() - started:.0f} s", flush=True)
    print(total.table())
    for fault in total.faults[:50]:
        print(fault)
    print(f"{count} seeds: recall {total.recall:.3f}, precision {total.precision:.3f}, {len(total.faults)} faults")
    return total.perfect


def _mutants(spark: SparkSession, mutants: Sequence[Mutant]) -> bool:
    survived = []
    for name in checks.CHECKS:
        checks.CHECKS[name](spark)
    for mutant in mutants:
        detected = checks.detects(spark, mutant)
        print(f"{'detected' if detected else 'SURVIVED'}  {mutant.check}  {mutant}", flush=True)
        survived += [] if detected else [mutant]
    print(f"{len(mutants)} mutants, {len(survived)} survived")
    return not survived


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 if every report has what was planted, or every mutant is detected."""
    parser = argparse.ArgumentParser(prog="python -m tests.spark.generated")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", type=int, metavar="N", help="the histories of the seeds 0 to N-1")
    what.add_argument("--mutants", action="store_true", help="each broken rule against tables of cases")
    given = parser.parse_args(arguments)
    settings = {"transaction.max.timeout.ms": str(OPEN_MS)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        spark = session_for_tests()
        stack.callback(spark.stop)
        stack.enter_context(interpreted(spark))
        if given.mutants:
            return 0 if _mutants(spark, MUTANTS) else 1
        kafka = stack.enter_context(Kafka(Path(folder) / "kafka", settings=settings))
        return 0 if _seeds(spark, kafka.bootstrap, Path(folder), given.seeds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
