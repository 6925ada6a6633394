"""Reads the records of a run from Kafka; those of ledger and journal once, for the plan and for the merge."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from spark.engine import session
from spark.reading import decode, run_plan, source
from spark.reading.kafka_admin import TopicPartition
from spark.reading.planning import NamedTopics
from spark.reading.run_plan import LEDGER, REQUESTS, Log
from spark.settings import Settings
from spark.tables import deliveries
from spark.tables.lake import Lake

Spans = dict[TopicPartition, source.Span]

# A ledger record has an entry for each event of a group of requests, a record of the journal their answers. Estimated
# for a first run, which has not yet selected the topics whose records would tell.
CLAIMS_A_RECORD: Final = 20


class RecordReader:
    """Reads the records of one run. Few are read in few tasks, and Spark interprets the plans over them."""

    def __init__(self, lake: Lake, settings: Settings) -> None:
        self._spark = lake.spark
        self._lake = lake
        self._settings = settings
        # Whether Spark interprets plans now; None if that is not yet decided.
        self._interprets: bool | None = None
        # The claims that were read for the plan (deliveries.summarize), with their spans.
        self._claims: tuple[tuple[Spans, Spans], DataFrame] | None = None

    def expect(self, unread: int) -> None:
        """Let Spark interpret the run's plans, until the lake or the records to read are found to be large."""
        interprets = unread <= session.INTERPRETED_RECORDS and self._lake.is_small("deliveries")
        # Not changed back: the number of shuffle partitions is never lowered during a run.
        if self._interprets is None or (self._interprets and not interprets):
            self._interprets = interprets
            session.interpret(self._spark, interprets=interprets)

    def copies(self, spans: Spans, frozen_ms: int) -> DataFrame:
        """Read and decode the records of data topics in these spans: → decode.COPIES."""
        return decode.copies(self._records(spans), frozen_ms, self._settings.options.identity)

    def claims(self, spans: tuple[Spans, Spans], frozen_ms: int) -> DataFrame:
        """Return the claims of ledger and journal in their spans, aggregated (deliveries.summarize); read again only if
        the plan has looked at other spans."""
        if self._claims is not None and self._claims[0] == spans:
            return self._claims[1]
        return deliveries.summarize(self._decoded_claims(spans, frozen_ms))

    def named_topics(self, frozen_ms: int, *, is_first_run: bool) -> NamedTopics:
        """Return how a plan finds the topics that ledger and journal name; the claims that it reads for that are kept
        for the merge."""
        return NamedTopics(partial(self._discover, frozen_ms, is_first_run), self._topics_in_lake)

    def release_claims(self) -> None:
        """Drop the claims that were read for the plan from the cache."""
        if self._claims is not None:
            self._claims[1].unpersist()

    def _discover(self, frozen_ms: int, is_first_run: bool, logs: Sequence[Log], names: Sequence[str]) -> set[str]:
        """Return those of the topics of these names that ledger or journal name in these logs."""
        spans = run_plan.spans_of(logs, LEDGER), run_plan.spans_of(logs, REQUESTS)
        if not any(first < end for of_role in spans for first, end in of_role.values()):
            return set()
        unread = sum(log.end - log.start for log in logs) * (CLAIMS_A_RECORD if is_first_run else 1)
        unread = min(unread, self._settings.options.max_records or unread)
        self.expect(unread)
        parts = session.size_for(self._spark, unread)
        with session.compiling(self._spark, unread):
            claims = deliveries.summarize(self._decoded_claims(spans, frozen_ms), parts)
            claims.persist(StorageLevel.MEMORY_AND_DISK)
            self.release_claims()
            self._claims = spans, claims
            return _topics(claims.where(deliveries.WRITTEN)) & set(names)

    def _topics_in_lake(self) -> set[str]:
        """Return the topics that ledger or journal name, from what earlier runs have merged."""
        return _topics(self._lake.read_cached("deliveries").where(deliveries.WRITTEN))

    def _decoded_claims(self, spans: tuple[Spans, Spans], frozen_ms: int) -> DataFrame:
        """Read the claims (decode.CLAIMS) of ledger and journal in their spans."""
        ledger, answers = (self._records(of_role, headers=False) for of_role in spans)
        return decode.ledger(ledger, frozen_ms).unionByName(decode.answers(answers, frozen_ms))

    def _records(self, spans: Spans, *, headers: bool = True) -> DataFrame:
        """Read the records of these spans (source.SCHEMA); few records in few tasks, not in one for each partition, and
        many in at least as many tasks as there are cores, also those of one partition."""
        offsets = sum(end - first for first, end in spans.values())
        tasks = None if self._interprets else session.tasks_for(self._spark, offsets)
        records = source.read(self._spark, self._settings.shared, spans, headers=headers, tasks=tasks)
        return records.coalesce(self._spark.sparkContext.defaultParallelism) if self._interprets else records


def _topics(rows: DataFrame) -> set[str]:
    """Collect the distinct topics of rows."""
    return {row["topic"] for row in rows.select("topic").distinct().collect()}
