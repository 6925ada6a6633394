"""Views: a topic as a Delta table with each id once, to be read instead of the topic.

The view has the first copy of each id in this order: copies in the ledger first, then by timestamp (clamped to
plausible times), partition and offset. The content depends only on what was read so far, not on the number of runs: if
a copy is read later that comes before the present one (its ledger entry followed, or an open transaction blocked its
partition), the row is replaced. A row is also replaced by the next copy, or deleted, if its record was truncated, or if
its id has changed (cross_hour.copies_of_other_ids). Records without id are left out; the audit counts them.

A run updates each view in one idempotent Delta commit. The update reads the topic's new records, the rows of
`deliveries` that changed since the last update, and the narrow columns of the view.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from spark import rule_table
from spark.engine import frames
from spark.errors import CannotRun
from spark.reading import decode, run_plan, source, wire_expressions
from spark.reading.decode import EVENT, clamped
from spark.reading.kafka_admin import KafkaAdmin, TopicPartition
from spark.reading.run_plan import DATA, Log, Plan
from spark.reading.source import Span
from spark.tables import lake_version, lock
from spark.tables.deliveries import in_spans, is_of_earlier_topic
from spark.tables.lake import Lake

TABLE: Final = "views"
"""The table of the topics that have a view."""

LISTED: Final = {"topic": "string", "run": "bigint"}
"""The columns of that table: the topic, and the last finished run when the view was created."""

FOLDER: Final = "view"
"""The folder of the views in the lake."""

RESERVED: Final = ("_delta_log", "_samples")
"""Names of folders that Delta takes for parts of a table, and never for a table: topics with these have no view."""

COLUMNS: Final = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key: string, value: binary>>",
    "id": "binary",
    "accepted_at": "timestamp",
    "in_ledger": "boolean",
}
"""Name and type of a view's columns. `accepted_at` is from Fencepost's header, without that header the timestamp;
`in_ledger`: the ledger names this very record."""

_ORDER: Final = ("ledger_rank", *(name for name in rule_table.ORDER if name != "topic"))
_NEW, _BETTER, _ENTERED, _GONE = "new", "better", "entered", "gone"
"""Changes of an id in a view: its first copy; a copy that comes before the present copy, or another record at the same
offset; a ledger entry for the present copy; no copy any more."""


@dataclass(frozen=True, slots=True)
class TopicLogs:
    """What a view is updated from: the offsets to `read`, what the logs have now (`present`), the offsets that were
    truncated since the last update (`vanished`), each by partition, and the ids of the present topics by name."""

    read: Mapping[TopicPartition, Span]
    present: Mapping[TopicPartition, Span]
    vanished: Mapping[TopicPartition, Span] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """A registered view: a table in the lake."""

    lake: Lake
    shared: SharedSettings
    topic: str

    @property
    def name(self) -> str:
        """The table's folder in the lake."""
        return _table(self.topic)

    def rows(self) -> DataFrame:
        """Read the current rows (COLUMNS); no rows if the table does not exist."""
        if self.lake.exists(self.name):
            return self.lake.spark.read.format("delta").load(self.lake.path(self.name))
        return frames.rows_of(self.lake.spark, frames.ddl(COLUMNS), [])

    def advance(self, deliveries: DataFrame, last_run: int, logs: TopicLogs, run: int) -> None:
        """Update by the rows of `deliveries` written since the run `last_run`, and by the records that are read, in a
        commit of the run `run`."""
        touched, rows = deliveries.where(F.col("run") > last_run), self.rows()
        stale = self._stale(deliveries, touched, logs) if self.lake.exists(self.name) else None
        if stale is not None:
            # As if the view did not have these ids: their first copies may be rows that no run has touched since.
            touched = touched.unionByName(deliveries.join(frames.broadcast_if_small(stale), "id", "left_semi"))
            rows = rows.join(stale, "id", "left_anti")
        changes = _changes(_candidates(touched, self.topic), rows).persist()
        found = {row["change"] for row in changes.select("change").distinct().collect()}
        if not found and stale is None:
            changes.unpersist()
            return
        wanted = changes.where(F.col("change") != _ENTERED)
        earlier = _earlier_spans(wanted, logs)
        spark = self.lake.spark
        records = source.read(spark, self.shared, logs.read).unionByName(source.read(spark, self.shared, earlier))
        filled = _with_records(changes, records)
        if found == {_NEW} and stale is None:
            fresh = filled.select(*COLUMNS).hint("rebalance")
            self.lake.append(self.name, fresh, run)
        else:
            self.merge(filled, stale, run)
        changes.unpersist()

    def _stale(self, deliveries: DataFrame, touched: DataFrame, logs: TopicLogs) -> DataFrame | None:
        """Find the ids whose row in the view has no record any more: → `id`; None if there are none.

        The record was truncated (`vanished`), or `touched` rows say that it has another id now.
        """
        vanished, topic_ids = logs.vanished, logs.topic_ids
        view = self.rows().select("id", "topic", "partition", "offset")
        found = []
        if vanished:
            gone = frames.checkpointed(view.where(in_spans(vanished)))
            kept = _copies(deliveries, self.topic).where(in_spans(vanished) & is_of_earlier_topic(topic_ids))
            kept = kept.join(frames.broadcast_if_small(gone.select("id")), "id", "left_semi")
            found.append(gone.join(kept, ["id", "partition", "offset"], "left_anti").select("id"))
        renamed = _copies(touched, self.topic).where(_is_renamed()).select("partition", "offset")
        if not renamed.isEmpty():
            moved = frames.checkpointed(view.join(renamed, ["partition", "offset"], "left_semi"))
            ids = frames.broadcast_if_small(moved.select("id"))
            copies = _copies(deliveries, self.topic).join(ids, "id", "left_semi")
            # A recreated topic may have had another record there, which keeps its id.
            found.append(moved.join(copies, ["id", "partition", "offset"], "left_anti").select("id"))
        if not found:
            return None
        stale = frames.checkpointed(reduce(DataFrame.unionByName, found).distinct())
        return None if stale.isEmpty() else stale

    def merge(self, filled: DataFrame, stale: DataFrame | None, run: int) -> None:
        """Merge changes with their records into the table, and delete `stale` ids without a record; once for the
        run."""
        columns = {name: f"new.{name}" for name in COLUMNS}
        rows = frames.checkpointed(filled)
        if stale is not None:
            gone = stale.join(rows.select("id"), "id", "left_anti").withColumn("change", F.lit(_GONE))
            rows = frames.checkpointed(rows.unionByName(gone, allowMissingColumns=True))
        with self.lake.begin_commit(self.name, run) as table:
            (
                table.alias("old")
                .merge(rows.alias("new"), "old.id = new.id")
                .whenMatchedUpdate(f"new.change = '{_ENTERED}'", {"in_ledger": "new.in_ledger"})
                .whenMatchedDelete(f"new.change = '{_GONE}'")
                # The new row of a stale id is matched too.
                .whenMatchedUpdate(set=dict(columns))
                .whenNotMatchedInsert(f"new.change = '{_NEW}'", dict(columns))
                .execute()
            )


def register(spark: SparkSession, shared: SharedSettings, root: str, topic: str) -> int:
    """Create a topic's view from all that the last run has read, and return its number of rows.

    Every later run updates the view, and makes it if this process ends before it has. CannotRun if no finished run has
    audited the topic, or if Delta reserves the topic's name.
    """
    if topic in RESERVED:
        raise CannotRun(f"a view has the name of its topic, and Delta reserves {topic!r}: this topic has no view")
    with lock.held(spark, root) as check_held:
        lake = Lake(spark, root, check_held)
        lake_version.check(lake)
        view = View(lake, shared, topic)
        last_run = lake.read("runs").agg(F.max("run").alias("run")).collect()[0]["run"]
        rows = lake.read("progress").where(F.col("run") == last_run).collect() if last_run is not None else []
        plan = Plan.from_rows(row.asDict(recursive=True) for row in rows)
        if plan is None or topic not in plan.topics:
            raise CannotRun(
                f"no finished run on --lake {root} has audited topic {topic!r}: "
                "run python -m spark first, with --topics if neither the ledger nor the rules name it"
            )
        if topic not in registered(lake):
            # Before the rows: a run that does not know of the view would leave its records out.
            row = {"topic": topic, "run": plan.run}
            lake.append_unnumbered(TABLE, frames.rows_of(spark, frames.ddl(LISTED), [row]))
        if not lake.exists(view.name):
            logs = [log for log in plan.of(DATA) if log.topic == topic]
            with closing(KafkaAdmin(spark, shared)) as admin:
                present = _present(admin, logs)
            planned = {log.topic_partition: (0, log.end) for log in logs}
            logs_now = TopicLogs(_present_parts(planned, present), present)
            view.advance(lake.read("deliveries"), 0, logs_now, plan.run)
        return view.rows().count()


def registered(lake: Lake) -> list[str]:
    """List the topics that have a view."""
    if not lake.exists(TABLE):
        return []
    return sorted(row["topic"] for row in lake.read(TABLE).select("topic").distinct().collect())


def of_topics(lake: Lake) -> list[str]:
    """List the tables of all views."""
    return list(map(_table, registered(lake)))


def tables(lake: Lake) -> list[str]:
    """List the tables of all views, and the table of their topics."""
    return [TABLE, *of_topics(lake)]


def _table(topic: str) -> str:
    return f"{FOLDER}/{topic}"


def update(lake: Lake, shared: SharedSettings, plan: Plan, last_plan: Plan | None) -> None:
    """Update every view to the plan of a run whose `deliveries` are merged; `last_plan` is the last
    finished run's plan.

    A view without a table (its topic had no event yet, or the folder was deleted) is made from all that was read.
    """
    topics = set(registered(lake)) & set(plan.topics)
    if not topics:
        return
    deliveries = lake.read("deliveries")
    last_runs = _last_runs(lake, topics, plan, last_plan)
    with closing(KafkaAdmin(lake.spark, shared)) as admin:
        present = _present(admin, [log for log in plan.of(DATA) if log.topic in topics])
    all_vanished = run_plan.vanished(plan, last_plan)
    for topic in sorted(topics):
        of_topic, vanished = (
            {partition: span for partition, span in spans.items() if partition[0] == topic}
            for spans in (present, all_vanished)
        )
        a_view, last_run, spans = View(lake, shared, topic), last_runs.get(topic, 0), plan.spans(DATA)
        if not lake.exists(a_view.name):
            last_run, spans = 0, {partition: (0, end) for partition, (_, end) in spans.items()}
        logs = TopicLogs(_present_parts(spans, of_topic), of_topic, vanished, plan.topic_ids)
        a_view.advance(deliveries, last_run, logs, plan.run)


def _last_runs(lake: Lake, topics: set[str], plan: Plan, last_plan: Plan | None) -> dict[str, int]:
    """Return the run that last updated the view of each topic: the last run that audited the topic.

    Later runs of other topics may have merged ledger entries of this one. A topic is left out if the lake has deleted
    the plan of that run.
    """
    found = dict.fromkeys(topics & set(last_plan.topics), last_plan.run) if last_plan is not None else {}
    if missing := sorted(topics - found.keys()):
        audited = F.col("audited") & (F.col("role") == DATA) & F.col("topic").isin(missing)
        # A run that was interrupted before its merge has a plan, and has updated no view.
        finished = lake.read("progress").join(lake.read("runs").select("run"), "run", "left_semi")
        runs = finished.where((F.col("run") < plan.run) & audited).groupBy("topic").agg(F.max("run"))
        found |= {row[0]: row[1] for row in runs.collect()}
    return found


def _present(admin: KafkaAdmin, logs: Iterable[Log]) -> dict[TopicPartition, Span]:
    """List what these logs have now, up to the last stable offset, without topics deleted or recreated since."""
    logs = list(logs)
    topic_ids = {name: topic.topic_id for name, topic in admin.describe(sorted({log.topic for log in logs})).items()}
    same = [log.topic_partition for log in logs if topic_ids.get(log.topic) == log.topic_id]
    found = admin.ends(same) if same else {}
    return {partition: (ends.log_start, ends.last_stable) for partition, ends in found.items()}


def _present_parts(
    spans: Mapping[TopicPartition, Span], present: Mapping[TopicPartition, Span]
) -> dict[TopicPartition, Span]:
    """Return the parts of spans that are present.

    Records that were deleted or truncated since the plan was made are missing in the view only; the audit has read
    them.
    """
    return {
        partition: (max(first, present[partition][0]), min(end, present[partition][1]))
        for partition, (first, end) in spans.items()
        if partition in present
    }


def _copies(rows: DataFrame, topic: str) -> DataFrame:
    """Filter deliveries.ROW to the copies of events in the topic."""
    return rows.where((F.col("kind") == EVENT) & (F.col("topic") == topic) & (F.col("count") > 0))


def _is_renamed() -> Column:
    """Check whether a copy with only a key has another id than that of its key in the empty scope, which it had
    first."""
    first_id = wire_expressions.event_id(wire_expressions.as_binary(F.col("key")))
    return ~F.col("has_fencepost_header") & F.coalesce(F.col("id") != first_id, F.lit(False))


def _candidates(rows: DataFrame, topic: str) -> DataFrame:
    """Select the first copy of each id in the topic.

    deliveries.ROW → `id, ledger_rank, timestamp, partition, offset, accepted_at, has_fencepost_header, fingerprint,
    known_key`.
    """
    copies = _copies(rows, topic)
    columns = {
        "ledger_rank": rule_table.rank(F.col("entries_count") > 0),
        "timestamp": F.col("timestamp_ms"),
        # Without Fencepost's header, `_with_records` takes the record's timestamp, not the clamped one.
        "accepted_at": F.when(F.col("has_fencepost_header"), F.col("record_accepted_ms")),
        "known_key": F.col("key"),
    }
    names = (*_ORDER, "accepted_at", "has_fencepost_header", "fingerprint", "known_key")
    order = F.struct(*(columns.get(name, F.col(name)).alias(name) for name in names))
    return copies.groupBy("id").agg(F.min(order).alias("first_copy")).select("id", "first_copy.*")


def _changes(candidates: DataFrame, view: DataFrame) -> DataFrame:
    """Select the candidates that differ from the view, with their `change`: _NEW, _BETTER or _ENTERED."""
    present = view.select(
        F.col("id").alias("present_id"),
        F.struct(
            rule_table.rank(F.col("in_ledger")).alias("ledger_rank"),
            clamped(F.unix_millis("timestamp")).alias("timestamp"),
            "partition",
            "offset",
        ).alias("present"),
    )
    same = (F.col("present.partition") == F.col("partition")) & (F.col("present.offset") == F.col("offset"))
    # A log that was recreated or truncated may have another record at the offset.
    same_record = F.col("present.timestamp") == F.col("timestamp")
    change = (
        F.when(F.col("present_id").isNull(), _NEW)
        .when(same & ~same_record, _BETTER)
        .when(same, F.when(F.col("present.ledger_rank") != F.col("ledger_rank"), _ENTERED))
        .when(F.struct(*_ORDER) < F.col("present"), _BETTER)
    )
    joined = candidates.join(present, F.col("id") == F.col("present_id"), "left").withColumn("change", change)
    return joined.where("change is not null").drop("present", "present_id")


def _earlier_spans(wanted: DataFrame, logs: TopicLogs) -> dict[TopicPartition, Span]:
    """Return the spans of wanted records that an earlier run read; these are few, and close to one another."""
    found: dict[TopicPartition, Span] = {}
    begins = {partition[1]: logs.read.get(partition, there)[0] for partition, there in logs.present.items()}
    below = (
        F.col("offset") < F.try_element_at(F.create_map(*_flat(begins)), F.col("partition")) if begins else F.lit(False)
    )
    rows = (
        wanted.where(below)
        .groupBy("partition")
        .agg(F.min("offset").alias("first_offset"), F.max("offset").alias("last_offset"))
    )
    for row in rows.collect():
        (partition,) = [partition for partition in logs.present if partition[1] == row["partition"]]
        found[partition] = (row["first_offset"], row["last_offset"] + 1)
    return _present_parts(found, logs.present)


def _flat(begins: dict[int, int]) -> list[Column]:
    """Return the keys and values of a map<int, bigint> in turn, as `F.create_map` takes them."""
    data_types = ("int", "bigint")
    return [F.lit(number).cast(to) for pair in begins.items() for number, to in zip(pair, data_types, strict=True)]


def _with_records(changes: DataFrame, records: DataFrame) -> DataFrame:
    """Join changes with their records, in COLUMNS and `change`, without changes whose record no longer exists."""
    coordinates = ["partition", "offset"]
    wanted = changes.select(
        *coordinates, "id", "ledger_rank", "accepted_at", "change", "has_fencepost_header", "fingerprint", "known_key"
    )
    is_its_record = decode.is_record_of(
        F.col("id"), F.col("has_fencepost_header"), F.col("fingerprint"), F.col("known_key")
    )
    joined = wanted.join(decode.with_own_identity(records), coordinates, "left").where(
        (F.col("change") == _ENTERED) | is_its_record
    )
    filled = joined.withColumns(
        {
            "timestamp": F.timestamp_millis("timestamp_ms"),
            "accepted_at": F.timestamp_millis(F.coalesce("accepted_at", "timestamp_ms")),
            "in_ledger": F.col("ledger_rank") == rule_table.IN_LEDGER,
        }
    )
    return filled.select(*(F.col(name).cast(data_type) for name, data_type in COLUMNS.items()), "change")
