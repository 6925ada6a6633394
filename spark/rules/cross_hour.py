"""The pass over all ids, for findings over several hours.

Narrow columns are read of every hour that the lake keeps, all columns only of the ids with several rows.
"""

from collections.abc import Callable, Iterable
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from service.contract.wire.ids import ID_BYTES
from spark import rule_table
from spark.engine import frames
from spark.reading import wire_expressions
from spark.reading.decode import EVENT, hash_of
from spark.rules import findings, kinds
from spark.rules.classify import LogEvidence
from spark.tables import deliveries, hours

# Spans of hours by which files are pruned; with more spans nearly every hour is in one of them.
SPANS_MAX: Final = 10_000
# Each span of several hours is one condition, and Spark cannot compile many more than this in one expression.
LONGER_MAX: Final = 100


def repeated(rows: DataFrame) -> DataFrame:
    """Find the ids of events with several rows: deliveries.ROW → `id, first_hour timestamp, last_hour timestamp`."""
    return _multi_row(rows.where(F.col("kind") == EVENT), "id")


def _multi_row(rows: DataFrame, name: str) -> DataFrame:
    """Find the values of the column `name` that several rows share, with the first and last hour of these rows."""
    hour = F.col("accepted_hour")
    counted = rows.groupBy(name).agg(
        F.count("*").alias("rows"), F.min(hour).alias("first_hour"), F.max(hour).alias("last_hour")
    )
    return counted.where("rows > 1").select(name, "first_hour", "last_hour")


def hour_spans(multi_row_ids: DataFrame) -> list[tuple[str, str]]:
    """Collect the spans of hours (`yyyy-MM-dd HH:mm:ss`) of rows of `repeated` or `retried`, overlaps joined."""
    ends_as_text = [hours.as_text(F.col(end)).alias(end) for end in ("first_hour", "last_hour")]
    found = multi_row_ids.select(*ends_as_text).distinct().limit(SPANS_MAX).collect()
    if len(found) == SPANS_MAX:
        ends = multi_row_ids.agg(F.min("first_hour").alias("first_hour"), F.max("last_hour").alias("last_hour")).select(
            *ends_as_text
        )
        found = ends.collect()
    return _joined((row["first_hour"], row["last_hour"]) for row in found)


def rows_of(rows: DataFrame, multi_row_ids: DataFrame, spans: Iterable[tuple[str, str]]) -> DataFrame:
    """Return the deliveries.ROWs of these ids (from `repeated`), whose rows all lie in these spans."""
    events = rows.where((F.col("kind") == EVENT) & _within(spans))
    return events.join(multi_row_ids.select("id"), "id", "left_semi").select(*deliveries.ROW)


def _within(spans: Iterable[tuple[str, str]]) -> Column:
    """Return the condition that a row is in one of these spans, with literals, by which Delta prunes its files.

    Most spans are single hours, possibly thousands, and go into one IN list: a chain of ORs is too deep for Spark.
    """
    single: list[str] = []
    longer: list[str] = []
    for first_hour, last_hour in spans:
        if first_hour == last_hour:
            single.append(first_hour)
        else:
            longer.append(f"accepted_hour BETWEEN TIMESTAMP '{first_hour}' AND TIMESTAMP '{last_hour}'")
    return F.expr(" OR ".join([hours.sql(single), *longer]))


def _joined(spans: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join overlapping spans of hours; more than LONGER_MAX spans of several hours become one."""
    found: list[tuple[str, str]] = []
    for first_hour, last_hour in sorted(spans):
        if found and first_hour <= found[-1][1]:
            found[-1] = (found[-1][0], max(last_hour, found[-1][1]))
        else:
            found.append((first_hour, last_hour))
    longer = [span for span in found if span[0] < span[1]]
    return found if len(longer) <= LONGER_MAX else _joined([*found, (longer[0][0], longer[-1][1])])


def superseded(judged_per_id: DataFrame) -> DataFrame:
    """Revoke the findings of single hours about these ids: classified rows, one an id → schemas.FINDING, no kind."""
    columns = {name: F.col(name) for name in ("accepted_hour", "id", "topic", "last_ms")}
    return findings.as_findings(judged_per_id, findings.IDS, columns)


def copies_of_other_ids(rows: DataFrame, last_pass: int) -> DataFrame | None:
    """Find records with only a key that are copies of an event with another id.

    deliveries.ROW → `accepted_hour, id, topic, partition, offset, event_id`; None if no candidate was read since the
    run `last_pass`, the last one that compared ids (0: none has).
    A key alone identifies neither the caller nor the member of an atomic batch; the event with the same key and
    fingerprint in the same topic does. If an event with the record's present id (the key in the empty scope) matches,
    the record keeps that id.
    """
    events = rows.where((F.col("kind") == EVENT) & (F.col("count") > 0) & F.col("key").isNotNull())
    topics = _topics_with_new_candidates(events, last_pass)
    return _with_event_ids(events.where(F.col("topic").isin(topics))) if topics else None


def _is_bare() -> Column:
    """Check whether a deliveries.ROW with a key has no Fencepost header, and no claim."""
    return ~F.col("has_fencepost_header") & F.col("fingerprint").isNotNull() & ~deliveries.claimed()


def _topics_with_new_candidates(events: DataFrame, last_pass: int) -> list[str]:
    """Collect the topics with bare records and events, if either was read since the run `last_pass`."""
    new = F.col("run") > last_pass
    flags = {
        "bare": _is_bare(),
        "with_header": F.col("has_fencepost_header"),
        "new_bare": _is_bare() & new,
        "new_with_header": F.col("has_fencepost_header") & new,
    }
    by_topic = events.groupBy("topic").agg(*(F.max(flag).alias(name) for name, flag in flags.items())).collect()
    return [
        row["topic"]
        for row in by_topic
        if (row["new_bare"] and row["with_header"]) or (row["new_with_header"] and row["bare"])
    ]


def _with_event_ids(events: DataFrame) -> DataFrame:
    """Find the id of the first event with the key and fingerprint of each bare record, if it is another id.

    deliveries.ROW → `accepted_hour, id, topic, partition, offset, event_id`.
    """
    fingerprints = F.concat(
        F.array("fingerprint"), F.coalesce(deliveries.each_fingerprint(deliveries.possible_fingerprints()), F.array())
    )
    row_key = ("accepted_hour", "id", "topic", "partition", "offset")
    copies = events.where(_is_bare()).select(*row_key, "key", F.explode(fingerprints).alias("fingerprint"))
    with_header = events.where("has_fencepost_header").select(
        "topic", "key", "fingerprint", "accepted_ms", F.col("id").alias("event_id")
    )
    has_other_id = (F.col("event_id") != F.col("id")).alias("has_other_id")
    first_event = F.min(F.struct(has_other_id, "accepted_ms", "event_id")).alias("first_event")
    return (
        copies.join(with_header, ["topic", "key", "fingerprint"])
        .groupBy(*row_key)
        .agg(first_event)
        .where("first_event.has_other_id")
        .select(*row_key, "first_event.event_id")
    )


def settled_elsewhere(rows: DataFrame, run: int, *, truncated: bool = False) -> DataFrame | None:
    """Find ids answered 202 or 504 without an offset that other rows settle or free, or settle no more.

    deliveries.ROW → `accepted_hour, id, elsewhere, freed_ms`; None if each such answer is settled. An answer may count
    in another hour than the acceptance of its event, since a retry's request is received later. Once settled, an answer
    is not looked up again, unless this run has dropped a record of its id (`truncated`: some are no longer in their
    log). More than frames.BROADCAST_MAX unsettled answers, as of a caller that always sends `Prefer: respond-async`,
    are first compared with the rows of this run's hours, where nearly all are settled.
    """
    events = rows.where(F.col("kind") == EVENT)
    unsettled = _unsettled(events, run, truncated=truncated)
    newest, number = unsettled.agg(F.max("run"), F.count("*")).collect()[0]
    if newest is None:
        return None
    # Rows of any run may settle a new answer, or one whose settling record was dropped.
    candidates = events if truncated or newest == run else events.where(F.col("run") == run)
    doubts, settling = _doubts(unsettled), _settling(candidates, run)
    if number <= frames.BROADCAST_MAX:
        return _changed_doubts(_by_rows(F.broadcast(doubts), settling))
    of_run = unsettled.where(F.col("run") == run)
    in_hours = _settling(events.where(hours.within(hours.of(of_run))), run)
    settled = frames.checkpointed(_changed_doubts(_by_rows(_doubts(of_run), in_hours)).where("elsewhere"))
    rest = frames.checkpointed(doubts.join(settled.select("accepted_hour", "id"), ["accepted_hour", "id"], "left_anti"))
    return settled.unionByName(_changed_doubts(_by_rows(frames.broadcast_if_small(rest), settling)))


def _unsettled(events: DataFrame, run: int, *, truncated: bool) -> DataFrame:
    """Filter to the answers 202 and 504 that no row is known to settle: deliveries.ROW → deliveries.ROW.

    With those of the ids that had a record which this run has dropped, if logs were `truncated`.
    """
    in_doubt = events.where(deliveries.in_doubt())
    is_settled = F.coalesce("elsewhere", F.lit(False))
    unsettled = in_doubt.where(~is_settled)
    if not truncated:
        return unsettled
    dropped = _settling(events, run).where("dropped").select("id")
    return unsettled.unionByName(in_doubt.where(is_settled).join(dropped, "id", "left_semi").select(*events.columns))


_DOUBT: Final = ("accepted_hour", "id", "was_settled", "was_freed_ms", "in_doubt_ms")


def _doubts(in_doubt: DataFrame) -> DataFrame:
    """Gather answers 202 and 504 of an hour that no 503 frees: deliveries.ROW → _DOUBT, with what was known until
    now."""
    gathered = in_doubt.groupBy("accepted_hour", "id").agg(
        F.coalesce(F.max("elsewhere"), F.lit(False)).alias("was_settled"),
        F.max("freed_ms").alias("was_freed_ms"),
        F.max("in_doubt_ms").alias("in_doubt_ms"),
    )
    is_freed = rule_table.is_freed(F.col("was_freed_ms"), F.col("in_doubt_ms"))
    # New names of the columns: Spark cannot join a checkpoint with the rows from which the checkpoint was made.
    renewed = (F.col(name).alias(name) for name in _DOUBT)
    return gathered.where(F.col("was_settled") | ~is_freed).select(*renewed)


def _settling(events: DataFrame, run: int) -> DataFrame:
    """Find rows that may change a doubt: deliveries.ROW → `id, settles, dropped, other_freed_ms`.

    `dropped`: this run has dropped the row's record, and nothing else is known of the row's offset.
    """
    settles = rule_table.settles_doubt(F.col("has_fencepost_header"), F.col("entries_count"), F.col("answered_201"))
    return events.select(
        "id",
        settles.alias("settles"),
        (F.expr("offset IS NOT NULL AND count = 0") & ~settles & (F.col("run") == run)).alias("dropped"),
        F.col("freed_ms").alias("other_freed_ms"),
    ).where("settles OR dropped OR other_freed_ms IS NOT NULL")


def _by_rows(doubts: DataFrame, settling: DataFrame) -> DataFrame:
    """Gather what the rows of its id say of each doubt: _DOUBT → _DOUBT, `settles, dropped, other_freed_ms`."""
    rows = settling.join(doubts, "id")
    return rows.groupBy(*_DOUBT).agg(*(F.max(name).alias(name) for name in ("settles", "dropped", "other_freed_ms")))


def _changed_doubts(found: DataFrame) -> DataFrame:
    """Filter doubts to those that the rows change: `_by_rows` → `settled_elsewhere`."""
    is_freed = rule_table.is_freed(F.col("other_freed_ms"), F.col("in_doubt_ms"))
    elsewhere = rule_table.is_settled_elsewhere(F.col("was_settled"), F.col("settles"), F.col("dropped"))
    freed_ms = F.greatest("was_freed_ms", F.when(is_freed, F.col("other_freed_ms")))
    updated = found.withColumns({"elsewhere": elsewhere, "freed_ms": freed_ms})
    is_changed = (F.col("elsewhere") != F.col("was_settled")) | ~F.col("freed_ms").eqNullSafe(F.col("was_freed_ms"))
    return updated.where(is_changed).select("accepted_hour", "id", "elsewhere", "freed_ms")


def _may_be_retry(evidence: LogEvidence) -> Column:
    """Check whether a deliveries.ROW may be a client's retry: an event with a record key, named by the ledger or a 201.

    Values without a record key (a sensor reading, a counter) often repeat without being retries.
    """
    event = (F.col("kind") == EVENT) & F.col("has_fencepost_header") & F.col("record_key_hash").isNotNull()
    return (
        F.coalesce(event & deliveries.claimed(), F.lit(False))
        & evidence.audited(F.col("topic"))
        & ~evidence.without_client_duplicates(F.col("topic"))
    )


def retried(rows: DataFrame, evidence: LogEvidence) -> DataFrame:
    """Find fingerprints of several rows: deliveries.ROW → `fingerprint, first_hour timestamp, last_hour timestamp`."""
    return _multi_row(rows.where(_may_be_retry(evidence)), "fingerprint")


def client_duplicates(
    rows: DataFrame, retried_fingerprints: DataFrame, spans: Iterable[tuple[str, str]], evidence: LogEvidence
) -> DataFrame:
    """Find requests that a client sent under several keys: deliveries.ROW → schemas.FINDING.

    These are different ids of one caller with the same fingerprint, accepted less apart than the retention of the
    earlier one's key, with no other record of their record key in between. `retried_fingerprints` are from `retried`,
    `spans` their hours; no other hour is read.
    """
    sequence = _of_retried_keys(rows.where(_within(spans)), retried_fingerprints, evidence)
    numbered = _first_records(_retries(sequence, evidence))
    return _findings_by_fingerprint(numbered)


def _of_retried_keys(rows: DataFrame, retried_fingerprints: DataFrame, evidence: LogEvidence) -> DataFrame:
    """Filter records to all of those record keys that have a retried fingerprint: deliveries.ROW → deliveries.ROW.

    `fingerprint` is null for a record that cannot be a retry.
    """
    records = rows.where((F.col("count") > 0) & F.col("record_key_hash").isNotNull())
    marked = records.withColumn("fingerprint", F.when(_may_be_retry(evidence), F.col("fingerprint")))
    retried_records = marked.join(retried_fingerprints.select("fingerprint"), "fingerprint", "left_semi")
    keys = retried_records.select("topic", "record_key_hash").distinct()
    return marked.join(keys, ["topic", "record_key_hash"], "left_semi")


_RECORD: Final = ("accepted_ms", "topic", "partition", "offset", "timestamp_ms", *rule_table.PRODUCER, "key")


def _first_records(retries: DataFrame) -> DataFrame:
    """Take the first record of each id, numbered by `nth` (from 1) for each fingerprint.

    `_retries` → `fingerprint, id, last_ms`, _RECORD, `accepted_hour, nth`.
    """
    first_record = F.min(F.struct(*_RECORD, "accepted_hour")).alias("first_record")
    ids = retries.groupBy("fingerprint", "id").agg(first_record, F.max("last_ms").alias("last_ms"))
    order = Window.partitionBy("fingerprint").orderBy("accepted_ms", "id")
    first_records = ids.select("fingerprint", "id", "last_ms", "first_record.*")
    return first_records.withColumn("nth", F.row_number().over(order))


def _findings_by_fingerprint(numbered: DataFrame) -> DataFrame:
    """Make one finding of ids with the same fingerprint, named after the first: `_first_records` → schemas.FINDING."""
    copy = F.struct(
        "nth",
        "topic",
        "partition",
        "offset",
        F.col("timestamp_ms").alias("timestamp"),
        *rule_table.PRODUCER,
        F.lit(None).cast("string").alias("cause"),
    )
    grouped = numbered.groupBy("fingerprint").agg(
        F.max("accepted_hour").alias("accepted_hour"),
        F.max_by("id", -F.col("nth")).alias("id"),
        F.max_by("key", -F.col("nth")).alias("key"),
        F.min("topic").alias("topic"),
        F.count("id").alias("count"),
        F.max("last_ms").alias("last_ms"),
        F.collect_list(F.when(F.col("nth") <= deliveries.COORDINATES_MAX, copy)).alias("copies"),
    )
    coordinates = F.transform(F.array_sort("copies"), lambda numbered_copy: numbered_copy.dropFields("nth"))
    of_grouped = ("accepted_hour", "id", "key", "topic", "count", "last_ms", "fingerprint")
    finding = {"kind": F.lit(kinds.CLIENT_DUPLICATE.name), "cause": F.lit("new_key")}
    columns = {name: F.col(name) for name in of_grouped} | finding | {"coordinates": coordinates}
    return findings.as_findings(grouped, findings.IDS, columns)


def _retries(sequence: DataFrame, evidence: LogEvidence) -> DataFrame:
    """Filter all records of some record keys to those that are one request with the record before or after.

    `fingerprint` is null for a record that cannot be a retry; such a record still separates two others.
    """
    with_caller = sequence.withColumns(
        {
            "caller": F.when(F.col("fingerprint").isNotNull(), caller_of(evidence.callers)),
            "asked_ms": F.when(
                rule_table.is_client_timestamp(
                    F.col("timestamp_ms"), F.col("record_accepted_ms"), evidence.timeouts_ms
                ),
                F.col("timestamp_ms"),
            ),
            "retention_ms": evidence.ttl_of_entry_ms(F.col("topic"), F.col("key_ttl_s")),
        }
    )
    order = Window.partitionBy("topic", "record_key_hash").orderBy(
        "record_accepted_ms", "timestamp_ms", "partition", "offset"
    )

    def is_retry_of(step: Callable[[str], Column], retention_ms: Column) -> Column:
        # `retention_ms` is that of the earlier record's key.
        def same(name: str) -> Column:
            return F.col(name) == step(name).over(order)

        distance = F.abs(F.col("record_accepted_ms") - step("record_accepted_ms").over(order))
        return rule_table.is_retry(
            same_content=same("fingerprint"),
            same_caller=same("caller"),
            same_id=same("id"),
            near=rule_table.is_near(distance, retention_ms),
            same_time=F.col("asked_ms").eqNullSafe(step("asked_ms").over(order)) | same("timestamp_ms"),
            same_batch=same("batch_hash"),
        )

    of_earlier, own = F.lag("retention_ms").over(order), F.col("retention_ms")
    return with_caller.withColumn("retry", is_retry_of(F.lag, of_earlier) | is_retry_of(F.lead, own)).where("retry")


def caller_of(scopes: Iterable[str]) -> Column:
    """Return the scope (Rules.scopes) in which a row's id, or that of its atomic batch, is the id of its key.

    It is the name of a caller, empty for none; null for other scopes, and for a record without a key.
    """
    return F.get(F.filter(F.array(*map(F.lit, scopes)), _is_of_caller), F.lit(0))


def _is_of_caller(caller: Column) -> Column:
    """Check whether a row's id, or the id of its atomic batch, is that of its key in a caller's scope."""
    id = wire_expressions.sha256_head(
        F.concat(
            wire_expressions.as_binary(caller),
            wire_expressions.literal(b"\0"),
            wire_expressions.as_binary(F.col("key")),
        ),
        ID_BYTES,
    )
    return (id == F.col("id")) | F.coalesce(hash_of(id) == F.col("batch_hash"), F.lit(False))
