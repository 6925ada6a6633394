"""The comparison of one sink with the lake in a run: which hours are due, and the verdict about each of their events.

An event is expected in a sink if Kafka has a record of it that consumers can read: a lost event is not missing there.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SinkRule
from spark import rule_table
from spark.engine import frames
from spark.reading import mirror_logs
from spark.reading.decode import EVENT
from spark.reading.intervals import Interval, merged, without
from spark.reading.run_plan import RETENTION, RunContext
from spark.reading.sinks import SinkReader
from spark.rule_table import COMPACTED
from spark.rules import mirrors, sink_verdicts
from spark.rules.sink_verdicts import (
    COUNTS_OF_SINK,
    EXTRA,
    GAP,
    LATE,
    MISSING,
    TWICE,
    UNPROVABLE,
    UNREADABLE,
    WAS_MISSING,
    SinkState,
)
from spark.settings import HOUR_MS
from spark.tables import deliveries, hours, schemas
from spark.tables.lake import Lake

TABLE: Final = "sinks"

# More spans of time are read as one, which is a shorter condition.
MANY_INTERVALS: Final = 100

SCOPE: Final = "sink"
"""The scope of a finding about a sink: the hour of the sink."""


class _Evidence(NamedTuple):
    """What a run knows besides the rows: times in ms. From `complete_since_ms` to before `decided_until_ms` the run
    knows each event of a sink's topics. What was in the sink at `seen_ms` has been read: a table is read after the
    freeze, and of a mirror a run with --max-records may read a part."""

    run: int
    seen_ms: int
    max_settle_ms: int
    complete_since_ms: int
    decided_until_ms: int


def topics_of(rule: SinkRule, context: RunContext) -> list[str]:
    """Return the topics of a sink that a run has audited, without the quarantine topics: these have refused events."""
    quarantine = context.settings.rules.quarantine_topics
    return [name for name in mirrors.topics_of(rule, context.plan) if name not in quarantine]


def _is_expected_record() -> Column:
    """Return `is_expected` of a deliveries.ROW."""
    is_event = F.col("kind") == EVENT
    return is_event & sink_verdicts.is_expected(F.col("count"), deliveries.claimed(), F.col("has_fencepost_header"))


class Comparison:
    """The comparison of one sink in a run."""

    def __init__(
        self, lake: Lake, context: RunContext, rule: SinkRule, state: SinkState, mirror: mirrors.MirrorState
    ) -> None:
        self.lake = lake
        self.spark = lake.spark
        self.rule = rule
        self.reader = SinkReader(lake.spark, rule)
        self.state = state
        self.mirror = mirror
        plan, self.settings = context.plan, context.settings
        self.frozen_ms = plan.frozen_ms
        self.definition = sink_verdicts.definition(rule, self.settings)
        max_settle_ms = self.settings.max_settle_ms
        self.evidence = _Evidence(
            plan.run,
            mirror_logs.seen_until_ms(mirror.logs, plan.frozen_ms) if rule.is_mirror else plan.frozen_ms,
            max_settle_ms,
            sink_verdicts.complete_since_ms(plan, hours.ms_of(context.kept_from) if context.kept_from else 0),
            sink_verdicts.decided_until_ms(rule, plan, max_settle_ms),
        )
        self.topics = topics_of(rule, context)
        self.complete_since = mirror_logs.complete_since(rule, mirror.logs, self.topics)
        self.compacted = mirror_logs.compacted_of(rule, mirror.logs, self.topics)
        self.first_ms = max(context.window_from, -(-rule.since_ms // HOUR_MS) * HOUR_MS)
        self.released = sink_verdicts.released(rule, plan, context.last_plan, state.released, context.window_from)
        self.all_rows = lake.read_cached("deliveries").where(F.col("kind") == EVENT)
        self.stored = lake.read_cached(TABLE).where(F.col("sink") == rule.name)

    def carry_out(self, newest: Mapping[str, int]) -> tuple[DataFrame, str]:
        """Compare the hours that are due. Raises Unreadable.

        Returns new rows of the table `sinks`, and the SQL condition of the rows that these replace.
        """
        due = self._due(newest)
        if not due:
            return self._own_row(), self._condition()
        intervals = merged(map(self._interval_of, due))
        read = self._read(intervals)
        records = self._records(due)
        with ExitStack() as cache:
            judged = frames.cached(self._judged(records, read), cache)
            anywhere = self._second_look(judged, read, intervals)
            if anywhere is not None:
                judged = frames.cached(self._judged(records, read, anywhere), cache)
            unknown = self._unknown(read, due) if self.rule.exclusive else None
            counts = self._counts(judged, unknown, read, due)
            rows = [self._own_row(), self._hours(counts)]
            if _has_any(counts, MISSING, TWICE, LATE):
                looked_up = read if anywhere is None else anywhere
                rows.append(frames.checkpointed(self._findings(judged, records, looked_up)))
            if _has_any(counts, UNPROVABLE):
                rows.append(frames.checkpointed(self._gaps(judged)))
            if unknown is not None and _has_any(counts, EXTRA):
                rows.append(self._findings_of_unknown(unknown))
        return reduce(DataFrame.unionByName, rows), self._condition(due)

    def unread(self, *, is_unreadable: bool) -> tuple[DataFrame, str]:
        """Return rows and condition, as `carry_out` does, for a sink that was not read: only its own row is replaced.

        That row keeps what the last run that has read the sink stored. What open transactions hid until this run is
        added to it. `is_unreadable`: the sink cannot be read, which is a finding without an hour.
        """
        own = self._own_row().withColumns(
            {
                "run": F.lit(self.state.run).cast("bigint"),
                "read_ms": F.lit(self.state.read_ms).cast("bigint"),
                "definition": F.lit(self.state.definition),
                "last_ms": F.lit(self.state.decided_ms).cast("bigint"),
            }
        )
        return (own.unionByName(self._unread_gap()) if is_unreadable else own), self._condition()

    def _read(self, intervals: Sequence[Interval]) -> DataFrame:
        """Read the rows (sinks.ROW) of the sink in these intervals. Raises Unreadable."""
        if self.rule.is_mirror:
            return mirrors.read(self.lake, self.rule, intervals)
        return self.reader.read(intervals)

    def _condition(self, due: Iterable[str] = ()) -> str:
        """Return the SQL condition of the replaced rows of the table `sinks`: those without an hour, and of hours."""
        return f"(sink = '{self.rule.name}' AND (accepted_hour IS NULL OR {hours.sql(due)}))"

    def _due(self, newest: Mapping[str, int]) -> set[str]:
        """Return the hours to compare, none before the window or the sink's beginning."""
        first = hours.text_of(self.first_ms)
        possible: list[str] = []
        if self.rule.exclusive:
            possible = [hours.text_of(ms) for ms in range(self.first_ms, self.evidence.seen_ms, HOUR_MS)]
        again = self.settings.options.recheck_sinks or self.mirror.reset_run > self.state.run
        if self.rule.is_mirror:
            of_mirror = mirrors.newest_hours(self.lake, self.rule, self.state.run)
            newest = {hour: max(newest.get(hour, 0), of_mirror.get(hour, 0)) for hour in {*newest, *of_mirror}}
        due = sink_verdicts.due_hours(newest, self.state, self.definition, possible, again=again)
        return {hour for hour in due if hour >= first}

    def _interval_of(self, hour: str) -> Interval:
        """Return the times (ms) that rows of the events of an hour may have."""
        start, margin_ms = hours.ms_of(hour), 1000 * self.rule.margin_s
        return start - margin_ms, start + HOUR_MS + margin_ms

    def _in_topics(self) -> Column:
        """Check whether a record is of the sink's topics (`topics_of`)."""
        return F.col("topic").isin(*self.topics)

    def _records(self, due: Iterable[str]) -> DataFrame:
        """Select the records (deliveries.ROW) of these hours that are expected in the sink, each with `due_ms`."""
        named_ms = F.coalesce(F.least("entry_seen_ms", "answer_seen_ms"), "last_ms")
        seen_ms = sink_verdicts.visible_ms(
            F.col("accepted_ms"), named_ms, self._released_ms(), self.evidence.max_settle_ms
        )
        records = self.all_rows.where(hours.within(due)).where(_is_expected_record() & self._in_topics())
        return records.withColumn("due_ms", seen_ms + 1000 * self.rule.late_s)

    def _released_ms(self) -> Column:
        """Return when an open transaction no longer hid a record; null if none hid it."""
        by_log: dict[str, list[dict[str, int]]] = {}
        for span in self.released:
            offsets = {"first": span.first, "end": span.end, "visible_ms": span.visible_ms}
            by_log.setdefault(f"{span.topic}:{span.partition}", []).append(offsets)
        if not by_log:
            return F.lit(None).cast("bigint")
        # JSON: a condition for each span would make an expression as deep as there are spans.
        span_type = "struct<first: bigint, `end`: bigint, visible_ms: bigint>"
        of_logs = F.from_json(F.lit(json.dumps(by_log)), f"map<string, array<{span_type}>>")
        of_log = F.try_element_at(of_logs, F.concat_ws(":", "topic", "partition"))
        around = F.filter(of_log, lambda span: rule_table.is_within(F.col("offset"), span["first"], span["end"]))
        return F.array_max(F.transform(around, lambda span: span["visible_ms"]))

    def _judged(self, records: DataFrame, read: DataFrame, anywhere: DataFrame | None = None) -> DataFrame:
        """Judge each event of each hour by its rows in the sink within the margin around that hour.

        deliveries.ROW → `accepted_hour, id, topic, key, last_ms, due_ms, records, rows, arrived_ms, was_missing,
        category`. An event without such rows is judged by the rows with its id (with its coordinates) in `anywhere`, if
        `anywhere` is given.
        """
        events = records.groupBy("accepted_hour", "id").agg(
            F.min("topic").alias("topic"),
            F.min("key").alias("key"),
            F.max("last_ms").alias("last_ms"),
            F.min("accepted_ms").alias("accepted_ms"),
            F.max("due_ms").alias("due_ms"),
            F.count("*").alias("records"),
        )
        event = ["accepted_hour", "id"]
        joined = events.join(self._counted(records, read, near=True), event, "left")
        rows, arrived_ms = F.coalesce("rows", F.lit(0)), F.col("arrived_ms")
        if anywhere is not None:
            far = self._counted(records, anywhere, near=False)
            joined = joined.join(far.withColumnsRenamed({"rows": "far_rows", "arrived_ms": "far_ms"}), event, "left")
            is_near = rows > 0
            rows = F.when(is_near, rows).otherwise(F.coalesce("far_rows", F.lit(0)))
            arrived_ms = F.when(is_near, arrived_ms).otherwise(F.col("far_ms"))
        joined = joined.withColumns({"rows": rows, "arrived_ms": arrived_ms}).drop("far_rows", "far_ms")
        known = joined.join(self._known_missing(), event, "left")
        was_missing = F.coalesce("was_missing", F.lit(False))
        times = F.col("arrived_ms"), F.col("was_missing"), F.col("due_ms")
        category = sink_verdicts.category(F.col("rows"), *times, self._was_deleted(), self.evidence.seen_ms)
        return known.withColumn("was_missing", was_missing).withColumn("category", category)

    def _was_deleted(self) -> Column:
        """Check whether a mirror may have deleted the record of an event before a run has read it."""
        if not self.complete_since:
            return self._is_in_compacted()
        by_topic = F.from_json(F.lit(json.dumps(self.complete_since)), "map<string, bigint>")
        since_ms = F.try_element_at(by_topic, F.col("topic"))
        return F.coalesce(F.col("accepted_ms") < since_ms, F.lit(False)) | self._is_in_compacted()

    def _is_in_compacted(self) -> Column:
        """Check whether the mirror of an event's topic is compacted: it may have only the newest record of each key."""
        return F.col("topic").isin(self.compacted) if self.compacted else F.lit(False)

    def _counted(self, records: DataFrame, read: DataFrame, *, near: bool) -> DataFrame:
        """Count the rows of each event in the sink, and find when the first of them arrived.

        deliveries.ROW → `accepted_hour, id, rows, arrived_ms`. With `near`, only rows within the margin around the hour
        of an id count. Rows with coordinates count at any time, since coordinates name one record.
        """
        by = self._names()
        rows = read.where(_names_event(by)).select(*by, "event_ms", "arrived_ms")
        counted = F.count("*").alias("rows"), F.min("arrived_ms").alias("arrived_ms")
        if not self.rule.has_ids:
            return (
                records.select("accepted_hour", "id", *by).join(rows, by).groupBy("accepted_hour", "id").agg(*counted)
            )
        named = records.select("accepted_hour", "id").distinct().join(rows, "id")
        if near:
            hour_ms, margin_ms = F.unix_millis("accepted_hour"), 1000 * self.rule.margin_s
            is_near = (F.col("event_ms") >= hour_ms - margin_ms) & (F.col("event_ms") < hour_ms + HOUR_MS + margin_ms)
            named = named.where(is_near)
        return named.groupBy("accepted_hour", "id").agg(*counted)

    def _known_missing(self) -> DataFrame:
        """Select the events that were found missing before, or late: `accepted_hour, id, was_missing`.

        A process that was killed on the same run has read the sink after the freeze, too.
        """
        is_same_sink = F.col("definition").startswith(self.rule.definition)
        found = self.stored.where(is_same_sink & F.col("kind").isin(MISSING, LATE))
        was_missing = (F.col("kind") == MISSING) | (F.col("cause") == WAS_MISSING)
        return found.where(was_missing).select("accepted_hour", "id", F.lit(True).alias("was_missing")).distinct()

    def _second_look(self, judged: DataFrame, read: DataFrame, intervals: Sequence[Interval]) -> DataFrame | None:
        """Return the rows (sinks.ROW) at the times of all records of the missing ids; None if nothing is missing.

        A client may set the timestamp of a record, and an id that was written in two hours may have one row. `read` are
        the rows of the `intervals` that were read before.
        """
        # A new name of the column: Spark cannot join a checkpoint with the rows from which the checkpoint was made.
        is_missing = F.col("category") == MISSING
        missing = frames.checkpointed(judged.where(is_missing).select(F.col("id").alias("id")).distinct())
        if missing.isEmpty():
            return None
        ids = frames.broadcast_if_small(missing)
        of_ids = self._recent().join(ids, "id", "left_semi")
        times = F.explode(F.array("accepted_ms", "timestamp_ms", "record_accepted_ms")).alias("ms")
        hour = deliveries.hour_of(F.col("ms")).alias("accepted_hour")
        others = hours.of(of_ids.select(times).where("ms IS NOT NULL").select(hour))
        unread = without(map(self._interval_of, others), intervals)
        if len(unread) > MANY_INTERVALS:
            unread = without([(unread[0][0], unread[-1][1])], intervals)
        return read.unionByName(self._read(unread)) if unread else read

    def _recent(self) -> DataFrame:
        """Select the rows (deliveries.ROW) of the hours of the sink, and of the longest key retention before these."""
        return self.all_rows.where(hours.since(hours.text_of(self.first_ms - self.settings.longest_ttl_ms)))

    def _unknown(self, read: DataFrame, due: Iterable[str]) -> DataFrame:
        """Select the rows of events that are nowhere in the lake: `accepted_hour`, and sinks.ROW; checkpointed."""
        by, evidence = self._names(), self.evidence
        is_decided = sink_verdicts.is_unknown_decided(
            F.col("event_ms"), 1000 * self.rule.margin_s, evidence.complete_since_ms, evidence.decided_until_ms
        )
        of_hours = read.withColumn("accepted_hour", deliveries.hour_of(F.col("event_ms"))).where(hours.within(due))
        candidates = of_hours.where(is_decided & _names_event(by))
        near = self.all_rows.where(hours.within(self._near(due)))
        suspects = frames.checkpointed(candidates.join(near.select(*by), by, "left_anti"))
        if suspects.isEmpty():
            return suspects
        known = self.all_rows.select(*(F.col(name).alias(name) for name in by))
        found = known.join(frames.broadcast_if_small(suspects.select(*by).distinct()), by, "left_semi").distinct()
        return frames.checkpointed(suspects.join(found, by, "left_anti"))

    def _names(self) -> list[str]:
        """Return the columns that name the event of a row."""
        return ["id"] if self.rule.has_ids else ["topic", "partition", "offset"]

    def _near(self, due: Iterable[str]) -> set[str]:
        """Return the hours of the events whose rows may have a time in one of these hours."""
        around = (range(first, end, HOUR_MS) for first, end in map(self._interval_of, due))
        return {hours.text_of(ms) for starts in around for ms in (*starts, starts.stop - 1)}

    def _counts(
        self, judged: DataFrame, unknown: DataFrame | None, read: DataFrame, due: Iterable[str]
    ) -> dict[str, dict[str, int]]:
        """Count the events and rows (COUNTS_OF_SINK) of each hour that is due."""
        counts: dict[str, dict[str, int]] = {text: dict.fromkeys(COUNTS_OF_SINK, 0) for text in due}
        hour = hours.as_text(F.col("accepted_hour")).alias("hour")
        for row in judged.groupBy("accepted_hour", "category").count().select(hour, "category", "count").collect():
            counts[row["hour"]][row["category"]] += row["count"]
            counts[row["hour"]]["expected"] += row["count"]
        if unknown is not None:
            events = F.count_distinct(*self._names()).alias("events")
            for row in unknown.groupBy("accepted_hour").agg(events).select(hour, "events").collect():
                counts[row["hour"]][EXTRA] += row["events"]
        nameless = read.where(~_names_event(self._names()))
        of_hours = nameless.withColumn("accepted_hour", deliveries.hour_of(F.col("event_ms")))
        for row in of_hours.groupBy("accepted_hour").count().select(hour, "count").collect():
            if row["hour"] in counts:
                counts[row["hour"]]["unidentified"] += row["count"]
        return counts

    def _hours(self, counts: Mapping[str, Mapping[str, int]]) -> DataFrame:
        """Return the row of the table `sinks` of each hour."""
        rows = [
            {"hour_s": hours.ms_of(text) // 1000, **of_hour, "is_closed": self._closes(text, of_hour)}
            for text, of_hour in counts.items()
        ]
        names = ", ".join(f"{name} bigint" for name in COUNTS_OF_SINK)
        made = frames.rows_of(self.spark, f"hour_s bigint, is_closed boolean, {names}", rows)
        columns = {name: F.col(name) for name in ("is_closed", *COUNTS_OF_SINK)}
        return self._as_rows(made, columns | {"accepted_hour": F.timestamp_seconds("hour_s")})

    def _closes(self, hour: str, counts: Mapping[str, int]) -> bool:
        evidence = self.evidence
        return sink_verdicts.closes(
            hours.ms_of(hour), counts, self.rule, evidence.max_settle_ms, evidence.seen_ms, evidence.decided_until_ms
        )

    def _own_row(self) -> DataFrame:
        """Return the row of the sink itself: read by this run."""
        spans = json.dumps([list(span) for span in self.released])
        decided = F.lit(self.evidence.decided_until_ms)
        own = {"released": F.lit(spans), "is_closed": F.lit(False), "last_ms": decided}
        return self._as_rows(self.spark.range(1), own)

    def _unread_gap(self) -> DataFrame:
        """Return the finding about a sink that this run could not read: a row of `sinks`. It counts no event."""
        columns = {"kind": F.lit(GAP), "cause": F.lit(UNREADABLE), "last_ms": F.lit(self.frozen_ms)}
        return self._as_rows(self.spark.range(1), columns | {"count": F.lit(0), "events": F.lit(0)})

    def _findings(self, judged: DataFrame, records: DataFrame, read: DataFrame) -> DataFrame:
        """Return the findings about expected events, with the coordinates of their records: rows of `sinks`."""
        found = self._with_all_records(judged.where(F.col("category").isin(MISSING, TWICE, LATE)))
        of_found = records.join(found.select("accepted_hour", "id"), ["accepted_hour", "id"], "left_semi")
        coordinate = F.struct(
            "topic",
            "partition",
            "offset",
            F.col("timestamp_ms").alias("timestamp"),
            *rule_table.PRODUCER,
            F.lit(None).cast("string").alias("cause"),
        )
        listed = of_found.groupBy("accepted_hour", "id").agg(F.array_sort(F.collect_list(coordinate)).alias("listed"))
        described = found.join(listed, ["accepted_hour", "id"])
        if self.rule.is_mirror:
            ids = found.select("id").distinct()
            in_mirror = read.join(ids, "id", "left_semi").groupBy("id").agg(_records_of_mirror())
            described = described.join(in_mirror, "id", "left")
        columns = {name: F.col(name) for name in ("accepted_hour", "id", "key", "topic", "last_ms")}
        verdict = F.col("category"), F.col("rows"), F.col("records"), F.col("was_missing")
        return self._as_rows(
            described,
            {
                **columns,
                "cause": sink_verdicts.cause(*verdict),
                "kind": F.col("category"),
                "count": F.when(F.col("category") == TWICE, F.col("rows")).otherwise(F.lit(1)),
                "events": F.lit(1),
                "coordinates": F.slice("listed", 1, deliveries.COORDINATES_MAX),
                **self._sink_coordinates(),
                "sink_ms": F.when(F.col("category") == MISSING, F.lit(self.evidence.seen_ms)).otherwise(
                    F.col("arrived_ms")
                ),
            },
        )

    def _sink_coordinates(self) -> dict[str, Column]:
        """Return the column of a finding with the records of its event in a mirror."""
        return {"sink_coordinates": F.coalesce("sink_coordinates", F.array())} if self.rule.is_mirror else {}

    def _gaps(self, judged: DataFrame) -> DataFrame:
        """Return the findings about events that a mirror may have had and deleted, by topic: rows of `sinks`."""
        grouped = judged.where(F.col("category") == UNPROVABLE).groupBy("accepted_hour", "topic")
        counted = grouped.agg(F.count("*").alias("count"), F.max("last_ms").alias("last_ms"))
        columns = {name: F.col(name) for name in counted.columns}
        cause = F.when(self._is_in_compacted(), COMPACTED).otherwise(RETENTION)
        return self._as_rows(counted, {**columns, "kind": F.lit(GAP), "cause": cause, "events": F.col("count")})

    def _with_all_records(self, found: DataFrame) -> DataFrame:
        """Let `records` of events with several rows count their records of all hours.

        A row within the margin around one hour may be of a record of another hour.
        """
        twice = found.where(F.col("category") == TWICE).select("id").distinct()
        of_sink = self._recent().where(_is_expected_record() & self._in_topics())
        totals = of_sink.join(twice, "id", "left_semi").groupBy("id").agg(F.count("*").alias("all_records"))
        return found.join(totals, "id", "left").withColumn("records", F.greatest("records", "all_records"))

    def _findings_of_unknown(self, unknown: DataFrame) -> DataFrame:
        """Return the findings about rows of unknown events: by id, or by partition if rows name coordinates."""
        names: tuple[str, ...]
        common: tuple[Column, ...] = (F.max("event_ms").alias("last_ms"), F.min("arrived_ms").alias("sink_ms"))
        if self.rule.is_mirror:
            common = (*common, _records_of_mirror())
        if self.rule.has_ids:
            grouped = unknown.groupBy("accepted_hour", "id").agg(F.count("*").alias("count"), *common)
            names, events = ("id", "count"), F.lit(1)
        else:
            grouped = unknown.groupBy("accepted_hour", "topic", "partition").agg(
                F.count_distinct("offset").alias("events"),
                F.count("*").alias("count"),
                F.min("offset").alias("first_offset"),
                F.max("offset").alias("last_offset"),
                *common,
            )
            names, events = ("topic", "partition", "count", "first_offset", "last_offset"), F.col("events")
        of_group = {name: F.col(name) for name in ("accepted_hour", "last_ms", "sink_ms", *names)}
        of_group |= self._sink_coordinates()
        return self._as_rows(grouped, {**of_group, "kind": F.lit(EXTRA), "events": events})

    def _as_rows(self, rows: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
        """Select the columns of the table `sinks`; those that are not given are null, or an empty array."""
        default = {
            "sink": F.lit(self.rule.name),
            "scope": F.lit(SCOPE),
            "run": F.lit(self.evidence.run),
            "read_ms": F.lit(self.evidence.seen_ms or None),
            "definition": F.lit(self.definition),
            "coordinates": F.array(),
            "sink_coordinates": F.array(),
        }
        return frames.typed(rows, schemas.SINK, {**default, **columns})


def _has_any(counts: Mapping[str, Mapping[str, int]], *names: str) -> bool:
    """Check whether any hour has such a count."""
    return any(of_hour[name] for of_hour in counts.values() for name in names)


def _records_of_mirror() -> Column:
    """List the records (sinks.ROW) of an event in a mirror, at most deliveries.COORDINATES_MAX, in their order."""
    coordinate = F.struct("topic", "partition", "offset", F.col("timestamp_ms").alias("timestamp"))
    listed = F.array_sort(F.collect_list(coordinate))
    return F.slice(listed, 1, deliveries.COORDINATES_MAX).alias("sink_coordinates")


def _names_event(by: Sequence[str]) -> Column:
    """Check whether a row of a sink names an event."""
    return reduce(Column.__and__, (F.col(name).isNotNull() for name in by))
