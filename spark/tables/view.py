"""A topic as a Delta table with each id once: what to read instead of the topic.

Of an id's copies the first one in this order stands: those in the ledger first, then by timestamp (drawn in to what can
be meant), partition and offset. The table is what that order makes of everything that was read so far, as if it had
been made anew: where a copy is found later that comes before the one that stands (a ledger entry that came after its
record, a partition that an open transaction held up), it takes its place. Records without id are left out: the audit
counts them.

A run brings each view from the run before to its own plan, in one Delta commit that counts once. It reads the topic's
new records, the rows of `deliveries` that were touched since, and of the view itself the narrow columns.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from spark.errors import CannotRun
from spark.reading import decode, source, wire_expressions
from spark.reading.decode import EVENT, drawn_in
from spark.reading.kafka_admin import Broker, TopicPartition
from spark.reading.planning import DATA, Log, Plan
from spark.reading.source import Span
from spark.tables import lock
from spark.tables.lake import Lake

TABLE: Final = "views"
"""The table that says which topics have a view; those lie beside it, in a folder of their own."""

FOLDER: Final = "view"

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
"""Name and type of a view's columns. `accepted_at` is that of Fencepost's header, without it the timestamp;
`in_ledger`: whether the ledger names this very record."""

_ORDER: Final = ("late", "timestamp", "partition", "offset")
_NEW, _BETTER, _ENTERED = "new", "better", "entered"


@dataclass(frozen=True)
class View:
    """One registered view: a table below the lake."""

    lake: Lake
    shared: SharedSettings
    topic: str

    @property
    def name(self) -> str:
        """The table's folder in the lake."""
        return _table(self.topic)

    def rows(self) -> DataFrame:
        """COLUMNS as they are now; none where it was never written to."""
        if self.lake.exists(self.name):
            return self.lake.spark.read.format("delta").load(self.lake.path(self.name))
        return wire_expressions.rows_of(
            self.lake.spark, ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items()), []
        )

    def advance(
        self, touched: DataFrame, spans: dict[TopicPartition, Span], starts: dict[TopicPartition, int], run: int
    ) -> None:
        """Bring it to a run: `touched` rows of `deliveries`, records in `spans`, of logs that begin at `starts`."""
        changes = _changes(_candidates(touched, self.topic), self.rows()).persist()
        kinds = {row["change"] for row in changes.select("change").distinct().collect()}
        if not kinds:
            changes.unpersist()
            return
        wanted = changes.where(F.col("change") != _ENTERED)
        again = _earlier(wanted, spans, starts)
        spark = self.lake.spark
        records = source.read(spark, self.shared, spans).unionByName(source.read(spark, self.shared, again))
        filled = _filled(changes, records)
        if kinds == {_NEW}:
            fresh = filled.select(*COLUMNS).hint("rebalance")
            self.lake.append(self.name, fresh, run)
        else:
            self._merge(filled, run)
        changes.unpersist()

    def _merge(self, filled: DataFrame, run: int) -> None:
        columns = {name: f"new.{name}" for name in COLUMNS}
        rows = filled.localCheckpoint()
        with self.lake.once(run):
            (
                DeltaTable.forPath(self.lake.spark, self.lake.path(self.name))
                .alias("there")
                .merge(rows.alias("new"), "there.id = new.id")
                .whenMatchedUpdate(f"new.change = '{_ENTERED}'", {"in_ledger": "new.in_ledger"})
                .whenMatchedUpdate(f"new.change = '{_BETTER}'", dict(columns))
                .whenNotMatchedInsert(f"new.change = '{_NEW}'", dict(columns))
                .execute()
            )


def register(spark: SparkSession, shared: SharedSettings, root: str, topic: str) -> int:
    """Make a topic's view from all that the last run knows; each run from now on keeps it current. Its number of rows.

    CannotRun where no finished run has audited the topic.
    """
    with lock.held(spark, root):
        lake = Lake(spark, root)
        lake.check_version()
        view = View(lake, shared, topic)
        last = lake.read("runs").agg(F.max("run").alias("run")).collect()[0]["run"]
        rows = lake.read("progress").where(F.col("run") == last).collect() if last is not None else []
        plan = Plan.from_rows(row.asDict(recursive=True) for row in rows)
        if plan is None or topic not in plan.topics:
            raise CannotRun(
                f"no finished run on --lake {root} has audited topic {topic!r}: "
                "run python -m spark first, with --topics if neither the ledger nor the rules name it"
            )
        if topic not in registered(lake):
            logs = [log for log in plan.of(DATA) if log.topic == topic]
            with closing(Broker(spark, shared)) as broker:
                starts = _starts(broker, logs)
            spans = {
                log.topic_partition: (starts[log.topic_partition], log.end)
                for log in logs
                if log.topic_partition in starts
            }
            view.advance(lake.read("deliveries"), spans, starts, plan.run)
            lake.add(
                TABLE, wire_expressions.rows_of(spark, "topic string, run bigint", [{"topic": topic, "run": plan.run}])
            )
        return view.rows().count()


def registered(lake: Lake) -> list[str]:
    """The topics that have a view."""
    if not lake.exists(TABLE):
        return []
    return sorted(row["topic"] for row in lake.read(TABLE).select("topic").distinct().collect())


def tables(lake: Lake) -> list[str]:
    """The tables of all views, and the one that names them."""
    return [TABLE, *map(_table, registered(lake))]


def _table(topic: str) -> str:
    return f"{FOLDER}/{topic}"


def update(lake: Lake, shared: SharedSettings, plan: Plan, last: Plan | None) -> None:
    """Bring every view to the plan of a run whose `deliveries` are merged, from that of the `last` one."""
    topics = set(registered(lake)) & set(plan.topics)
    if not topics:
        return
    deliveries = lake.read("deliveries")
    brought = _brought(lake, topics, plan, last)
    with closing(Broker(lake.spark, shared)) as broker:
        starts = _starts(broker, [log for log in plan.of(DATA) if log.topic in topics])
    for topic in sorted(topics):
        # What went away since the plan was made is gone for the view; the audit has read it.
        spans = {
            place: (max(start, starts[place]), end)
            for place, (start, end) in plan.spans(DATA).items()
            if place[0] == topic and place in starts
        }
        ours = {place: start for place, start in starts.items() if place[0] == topic}
        touched = deliveries.where(F.col("run") > brought.get(topic, 0))
        View(lake, shared, topic).advance(touched, spans, ours, plan.run)


def _brought(lake: Lake, topics: set[str], plan: Plan, last: Plan | None) -> dict[str, int]:
    """Up to which run the views of these topics were brought: the last one that audited them.

    Runs of other topics read the whole ledger all the same. None for those of which the lake has forgotten it.
    """
    found = dict.fromkeys(topics & set(last.topics), last.run) if last is not None else {}
    if left := sorted(topics - found.keys()):
        theirs = F.col("audited") & (F.col("role") == DATA) & F.col("topic").isin(left)
        runs = lake.read("progress").where((F.col("run") < plan.run) & theirs).groupBy("topic").agg(F.max("run"))
        found |= {row[0]: row[1] for row in runs.collect()}
    return found


def _starts(broker: Broker, logs: Iterable[Log]) -> dict[TopicPartition, int]:
    """Where these logs begin now; without those of topics that are gone, or made anew since."""
    logs = list(logs)
    topic_ids = {name: topic.topic_id for name, topic in broker.describe(sorted({log.topic for log in logs})).items()}
    places = [log.topic_partition for log in logs if topic_ids.get(log.topic) == log.topic_id]
    return {place: ends.log_start for place, ends in broker.ends(places).items()} if places else {}


def _candidates(rows: DataFrame, topic: str) -> DataFrame:
    """state.ROW → `id, late, timestamp, partition, offset, accepted_at, has_fencepost_header, fingerprint,
    named_key`: the first copy in the
    topic of each id."""
    copies = rows.where((F.col("kind") == EVENT) & (F.col("topic") == topic) & (F.col("count") > 0))
    columns = {
        "late": F.when(F.col("entries_count") > 0, 0).otherwise(1),
        "timestamp": F.col("timestamp_ms"),
        # Without a header of ours it is the timestamp: the record's own, whatever the run made of it.
        "accepted_at": F.when(F.col("has_fencepost_header"), F.col("record_accepted_ms")),
        "named_key": F.col("key"),
    }
    names = (*_ORDER, "accepted_at", "has_fencepost_header", "fingerprint", "named_key")
    order = F.struct(*(columns.get(name, F.col(name)).alias(name) for name in names))
    return copies.groupBy("id").agg(F.min(order).alias("first")).select("id", "first.*")


def _changes(candidates: DataFrame, view: DataFrame) -> DataFrame:
    """Candidates that the view does not have like that, with `change`."""
    there = view.select(
        F.col("id").alias("there_id"),
        F.struct(
            F.when(F.col("in_ledger"), 0).otherwise(1).alias("late"),
            drawn_in(F.unix_millis("timestamp")).alias("timestamp"),
            "partition",
            "offset",
        ).alias("there"),
    )
    same = (F.col("there.partition") == F.col("partition")) & (F.col("there.offset") == F.col("offset"))
    change = (
        F.when(F.col("there_id").isNull(), _NEW)
        .when(same, F.when(F.col("there.late") != F.col("late"), _ENTERED))
        .when(F.struct(*_ORDER) < F.col("there"), _BETTER)
    )
    joined = candidates.join(there, F.col("id") == F.col("there_id"), "left").withColumn("change", change)
    return joined.where("change is not null").drop("there", "there_id")


def _earlier(
    wanted: DataFrame, spans: dict[TopicPartition, Span], starts: dict[TopicPartition, int]
) -> dict[TopicPartition, Span]:
    """Where wanted records lie that were read by an earlier run: few, and close to one another."""
    found: dict[TopicPartition, Span] = {}
    begins = {place[1]: spans.get(place, (start, start))[0] for place, start in starts.items()}
    below = (
        F.col("offset") < F.try_element_at(F.create_map(*_flat(begins)), F.col("partition")) if begins else F.lit(False)
    )
    rows = wanted.where(below).groupBy("partition").agg(F.min("offset").alias("first"), F.max("offset").alias("last"))
    for row in rows.collect():
        (place,) = [place for place in starts if place[1] == row["partition"]]
        if row["last"] >= starts[place]:
            found[place] = (max(row["first"], starts[place]), row["last"] + 1)
    return found


def _flat(begins: dict[int, int]) -> list[Column]:
    return [F.lit(one).cast(kind) for pair in begins.items() for one, kind in zip(pair, ("int", "bigint"), strict=True)]


def _filled(changes: DataFrame, records: DataFrame) -> DataFrame:
    """Changes with their records, in COLUMNS and `change`; one whose record is gone, or another by now, is left out."""
    where = ["partition", "offset"]
    wanted = changes.select(
        *where, "id", "late", "accepted_at", "change", "has_fencepost_header", "fingerprint", "named_key"
    )
    its = decode.is_of(F.col("id"), F.col("has_fencepost_header"), F.col("fingerprint"), F.col("named_key"))
    joined = wanted.join(decode.own(records), where, "left").where((F.col("change") == _ENTERED) | its)
    made = joined.withColumns(
        {
            "timestamp": F.timestamp_millis("timestamp_ms"),
            "accepted_at": F.timestamp_millis(F.coalesce("accepted_at", "timestamp_ms")),
            "in_ledger": F.col("late") == 0,
        }
    )
    return made.select(*(F.col(name).cast(kind) for name, kind in COLUMNS.items()), "change")
