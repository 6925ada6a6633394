"""One invocation of the command `repair`, and what it returns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from pyspark.sql import SparkSession

from service.contract import SharedSettings
from spark.reading.kafka_admin import KafkaAdmin
from spark.reading.run_plan import Plan
from spark.repair.copier import Copier
from spark.repair.entries import Entry
from spark.repair.plans import RepairPlans
from spark.settings import RepairOptions
from spark.step_timer import OnProgress
from spark.tables.lake import Lake


@dataclass(frozen=True, slots=True)
class Invocation:
    """What all parts of the command work with. `audited` is the plan of the last finished run of the audit, `plans`
    stores those of repairs; `now_ms` is the clock."""

    lake: Lake
    shared: SharedSettings
    options: RepairOptions
    audited: Plan
    plans: RepairPlans
    on_progress: OnProgress
    now_ms: Callable[[], int]

    @property
    def spark(self) -> SparkSession:
        return self.lake.spark

    @property
    def into(self) -> str:
        """The topic that gets records (--into); empty without one."""
        return self.options.into

    @contextmanager
    def kafka(self) -> Iterator[KafkaAdmin]:
        """Open a connection for requests to Kafka until the context ends."""
        with closing(KafkaAdmin(self.spark, self.shared)) as admin:
            yield admin

    @contextmanager
    def copier(self) -> Iterator[Copier]:
        """Open a copier into `into` until the context ends, which fences an earlier one; CannotRun without the
        permission."""
        with closing(Copier(self.spark, self.shared, self.into)) as into:
            into.init()
            yield into


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a repair has planned and done: the plan's number, its entries, and lines for the terminal.

    `is_left`: something is left to do for an operator.
    """

    plan: int
    entries: Sequence[Entry]
    lines: Sequence[str]
    is_left: bool
