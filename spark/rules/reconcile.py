"""Classify what a run has merged, write findings, rejects and verdicts, and update the balance.

Nearly every id has one clean row, and clean rows are only counted. Only the few other rows are read in full, joined or
cached.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from spark.engine import frames, session
from spark.reading import run_plan
from spark.reading.decode import EVENT, REJECT
from spark.reading.run_plan import Plan, RunContext
from spark.rule_table import LOST, PENDING
from spark.rules import classify, cross_hour, findings, late_findings
from spark.rules.balance import Balance
from spark.rules.classify import LogEvidence
from spark.rules.record_counts import PARTITIONS_MAX, record_counts
from spark.step_timer import StepTimer
from spark.tables import deliveries as deliveries_table
from spark.tables import hours, schemas, verdict_history
from spark.tables.lake import Lake


class MultiRow(NamedTuple):
    """The ids with several rows: `ids` from cross_hour.repeated, `rows` their rows (deliveries.ROW), and whether any of
    these ids may have rows in several hours (`has_multi_hour`)."""

    ids: DataFrame
    rows: DataFrame
    has_multi_hour: bool


class MultiHour(NamedTuple):
    """The ids with rows in several hours: their `rows` (deliveries.ROW), and these classified for each hour by itself
    (`judged_per_hour`)."""

    rows: DataFrame
    judged_per_hour: DataFrame


class Classified(NamedTuple):
    """The result of classifying some hours: `rows` that are not clean (classify.classify), `sums` for the balance
    (findings.SUMS, and `suspicious`), and `double_counted`, which `sums` counts twice."""

    rows: DataFrame
    sums: Sequence[Any]
    double_counted: Sequence[Any]


def reconcile(lake: Lake, context: RunContext, timer: StepTimer) -> Balance:
    """Classify the hours that a run touched, and the ids of several hours; write the findings; return the balance.

    Writes the tables `rejects`, `findings` and `verdicts`, so that a process that repeats the run writes the same, and
    marks proven losses in `deliveries`.
    """
    plan, compares_ids, window_from = context.plan, context.compares_ids, context.window_from
    evidence = classify.gather_evidence(plan, context.settings)
    balance = _carried_over(context)
    rows = _kept_rows(lake, context.kept_from)
    with ExitStack() as cache:
        # Until the findings are written, plans are over all rows.
        with session.compiling(lake.spark, plan.unread):
            with timer.step("classify ids"):
                touched = hours_to_classify(rows, context, balance)
                balance.note_read_late(_read_late(rows, touched, context), plan.frozen_ms)
            with timer.step("compare ids"):
                multi_row = _multi_row(rows if compares_ids else rows.where(hours.within(touched)), cache)
                multi_hour = _multi_hour(multi_row, evidence, cache) if compares_ids else None
                touched |= _hours_to_classify_again(multi_hour, balance)
            in_hours = rows.where(hours.within(touched))
            with timer.step("classify ids"):
                classified = _classify_hours(in_hours, multi_row, touched, evidence, cache)
                balance.replace(touched, classified.sums, classified.double_counted)
                if any(row["rejects"] for row in classified.sums):
                    _write_rejects(lake, in_hours, plan.run)
            with timer.step("count records"):
                _count_records(in_hours, touched, plan, balance)
            found = findings.of_logs(lake.spark, plan) + _findings_of_hours(classified, in_hours, evidence)
            if compares_ids:
                with timer.step("compare ids"):
                    found += _client_duplicates(rows, _first_ms(balance, window_from), evidence, cache)
                    found += _judge_per_id(multi_hour, evidence, balance, cache)
        with timer.step("write findings"):
            condition = _replaced_findings(touched, compares_ids)
            _write_findings(lake, context, found, condition, balance.late_hours)
        with timer.step("write verdicts"):
            _write_verdicts(lake, plan, classified.rows, _single_clean(in_hours, multi_row), touched)
            of_other_hours = None if multi_hour is None else multi_hour.rows
            recent = _recent(rows, context.unread_since, evidence)
            _mark_proven_lost(lake, classified, of_other_hours if compares_ids else recent, plan.run)
    balance.evidence_changed &= not compares_ids
    return balance


def recount(lake: Lake, context: RunContext, balance: Balance) -> Balance:
    """Count all hours of the lake again, in place of a balance that does not close; writes nothing.

    The sums of most hours are carried over from run to run, and with them a fault of any earlier run.
    """
    evidence = classify.gather_evidence(context.plan, context.settings)
    counted = Balance(late_hours=balance.late_hours, evidence_changed=balance.evidence_changed)
    rows = _kept_rows(lake, context.kept_from)
    all_hours = set(hours.of(rows))
    with ExitStack() as cache:
        multi_row = _multi_row(rows, cache)
        multi_hour = _multi_hour(multi_row, evidence, cache)
        classified = _classify_hours(rows, multi_row, all_hours, evidence, cache)
        counted.replace(all_hours, classified.sums, classified.double_counted)
        _count_records(rows, all_hours, context.plan, counted)
        _judge_per_id(multi_hour, evidence, counted, cache)
    return counted


def _carried_over(context: RunContext) -> Balance:
    """Return the balance of the last run, without the hours that the lake no longer keeps."""
    plan = context.plan
    balance = Balance.of(context.last_run)
    balance.delete_before(context.kept_from)
    balance.evidence_changed |= run_plan.evidence_changed(plan, context.last_plan)
    balance.note_late_hours(context.window_from, plan.frozen_ms)
    return balance


def _count_records(in_hours: DataFrame, counted_hours: set[str], plan: Plan, balance: Balance) -> None:
    """Count the records of some hours, and put their numbers in the balance."""
    counts = record_counts(in_hours, partitions=plan.partitions <= PARTITIONS_MAX)
    balance.replace_record_counts(counted_hours, counts.collect() if counted_hours else [])


def _kept_rows(lake: Lake, kept_from: str) -> DataFrame:
    """Read the rows (deliveries.ROW) of the hours that the lake keeps."""
    rows = lake.read_cached("deliveries")
    return rows.where(hours.since(kept_from)) if kept_from else rows


def hours_to_classify(rows: DataFrame, context: RunContext, balance: Balance) -> set[str]:
    """Return the hours that this run wrote to, those of rows about topics that the last run did not audit, and those
    with verdicts that may change by time alone; all hours if `classifies_all`."""
    if classifies_all(context):
        return set(hours.of(rows))
    touched = F.col("run") == context.plan.run
    if added := set(context.plan.topics) - set(context.of_last_run("topics")):
        # A verdict depends on the logs of those topics only that rows of its hour name.
        touched |= F.col("topic").isin(sorted(added))
    return set(hours.of(rows.where(touched))) | balance.open_hours()


def _read_late(rows: DataFrame, touched: set[str], context: RunContext) -> list[str]:
    """Return those of the `touched` hours with records that this run was the first to read, after they had left the
    window: after a pause longer than the window.

    A copy that was written in the pause may repeat an acceptance from before the pause, and counts in that hour.
    """
    since_ms, window_ms = context.unread_since, context.window_from
    if since_ms == window_ms:
        return []
    left = {hour for hour in touched if hour < hours.text_of(window_ms)}
    accepted_in_pause = F.expr(hours.since(hours.text_of(since_ms)))
    seen_in_pause = (F.col("last_ms") >= since_ms) & (F.col("last_ms") < window_ms)
    read = rows.where(hours.within(left)).where(F.col("run") == context.plan.run)
    return hours.of(read.where(accepted_in_pause | seen_in_pause)) if left else []


def classifies_all(context: RunContext) -> bool:
    """Check whether a run classifies all hours.

    It does if the options are others than in the last run, if a topic of that run is no longer audited, if the number
    of partitions has passed PARTITIONS_MAX (record counts are by partition in all hours or in none), or if options or
    topics are others than in a run since that was interrupted and `replaced`.

    If nothing was to be merged, a replaced run may have replaced the findings of any hour by those under its options.
    """
    plan, last_run = context.plan, context.last_run
    if last_run is None or last_run["options"] != plan.options or not set(last_run["topics"]) <= set(plan.topics):
        return True
    last_plan = context.last_plan
    if last_plan is not None and (last_plan.partitions <= PARTITIONS_MAX) != (plan.partitions <= PARTITIONS_MAX):
        return True
    judged = (plan.options, plan.topics, plan.skip_ids)
    return any((other.options, other.topics, other.skip_ids) != judged for other in context.replaced)


def classifies_old_hours(context: RunContext) -> bool:
    """Check whether a run classifies hours without new records and without open verdicts.

    It does if its topics are others than those of the last run, or if `classifies_all`.
    """
    return context.of_last_run("topics") != context.plan.topics or classifies_all(context)


def unchanged_balance(context: RunContext) -> Balance | None:
    """Return the balance of a run that would compute the last run's balance and findings again; None of any other.

    The last run had the same options and the same pass over all ids. Since then nothing was written, no log proves
    anything else, and no hour was deleted. No verdict can change by time alone: none is open, in an hour or over the
    hours of an id.
    """
    plan, last_run = context.plan, context.last_run
    if last_run is None or classifies_old_hours(context) or not run_plan.reads_nothing_new(plan, context.last_plan):
        return None
    balance = Balance.of(last_run)
    if balance.evidence_changed or balance.open_hours() or context.kept_from != last_run.get("kept_from", ""):
        return None
    if context.compares_ids and (balance.open_ids or last_run.get("last_pass") != last_run["run"]):
        return None
    balance.note_late_hours(context.window_from, plan.frozen_ms)
    return balance


def _multi_row(rows: DataFrame, cache: ExitStack) -> MultiRow | None:
    """Find the ids with several of these rows; None, which keeps the plans of most runs small, if there are none."""
    ids = frames.cached(cross_hour.repeated(rows), cache)
    spans = cross_hour.hour_spans(ids)
    if not spans:
        return None
    multi_hour = any(first_hour < last_hour for first_hour, last_hour in spans)
    return MultiRow(ids, frames.cached(cross_hour.rows_of(rows, ids, spans), cache), multi_hour)


def _multi_hour(multi_row: MultiRow | None, evidence: LogEvidence, cache: ExitStack) -> MultiHour | None:
    """Classify the ids with rows in several hours, for each hour by itself; None if there are none."""
    if multi_row is None or not multi_row.has_multi_hour:
        return None
    rows = multi_row.rows.join(multi_row.ids.where("first_hour < last_hour"), "id", "left_semi")
    judged_per_hour = classify.classify(deliveries_table.gathered(rows, quarantine=evidence.quarantine), evidence)
    return MultiHour(rows, frames.cached(judged_per_hour, cache))


def _classify_hours(
    rows: DataFrame, multi_row: MultiRow | None, touched: set[str], evidence: LogEvidence, cache: ExitStack
) -> Classified:
    """Classify all rows of these hours (`touched`).

    Clean rows are only counted; other rows, and all rows of ids with several rows, are classified. A clean row of an id
    with several rows is counted both ways: `double_counted`.
    """
    events = rows.where((F.col("is_clean") == 0) & (F.col("kind") == EVENT))
    counted = classify.classify_clean(rows.where((F.col("is_clean") == 1) | (F.col("kind") != EVENT)), evidence)
    if multi_row is None:
        classified = frames.cached(classify.classify(deliveries_table.gathered_single(events), evidence), cache)
        sums, _ = _collect_sums([classified, counted], [])
        return Classified(classified, sums, [])
    single = deliveries_table.gathered_single(events.join(multi_row.ids, "id", "left_anti"))
    multiple = multi_row.rows.where(hours.within(touched))
    gathered = single.unionByName(deliveries_table.gathered(multiple, quarantine=evidence.quarantine))
    classified = frames.cached(classify.classify(gathered, evidence), cache)
    double_counted = classify.classify_clean(multiple.where("is_clean = 1"), evidence)
    return Classified(classified, *_collect_sums([classified, counted], [double_counted]))


def _collect_sums(added: Sequence[DataFrame], subtracted: Sequence[DataFrame]) -> tuple[list[Row], list[Row]]:
    """Collect the findings.sums of classified rows, to be added to the balance and to be subtracted, in one query."""
    signed = [(rows, True) for rows in added] + [(rows, False) for rows in subtracted]
    each = [findings.sums(rows).withColumn("is_added", F.lit(is_added)) for rows, is_added in signed]
    sums = reduce(DataFrame.unionByName, each).collect()
    return [row for row in sums if row["is_added"]], [row for row in sums if not row["is_added"]]


def _write_rejects(lake: Lake, rows: DataFrame, run: int) -> None:
    """Append this run's undecoded records, and parts of records, to `rejects`."""
    rejected = rows.where((F.col("run") == run) & (F.col("kind") == REJECT) & (F.col("is_clean") == 0))
    columns = rejected.withColumn("seen_ms", F.col("last_ms")).select("*", "reject.*").select(*schemas.REJECT)
    lake.append_once("rejects", columns.coalesce(1), run)


def _findings_of_hours(classified: Classified, rows: DataFrame, evidence: LogEvidence) -> list[DataFrame]:
    """Return findings (schemas.FINDING) of single hours. The sums say whether there can be any: plans stay small."""
    found = []
    if any(row["suspicious"] for row in classified.sums):
        suspicious = classified.rows.where("suspicious")
        found += [
            findings.of_ids(suspicious, evidence, findings.HOUR),
            findings.of_partitions(suspicious, findings.HOUR),
        ]
    if any(row["unkeyed"] or row["rejects"] for row in classified.sums):
        found.append(findings.without_id(rows.where("is_clean = 0"), evidence))
    return found


def _judge_per_id(
    multi_hour: MultiHour | None, evidence: LogEvidence, balance: Balance, cache: ExitStack
) -> list[DataFrame]:
    """Classify the ids of several hours over all their rows, and make each count once in the balance.

    Returns the findings (schemas.FINDING) about these ids, and the revocations of those of single hours.
    """
    if multi_hour is None:
        balance.adjust([], [])
        return []
    gathered = deliveries_table.gathered(multi_hour.rows, quarantine=evidence.quarantine, by_hour=False)
    judged_per_id = frames.cached(classify.classify(gathered, evidence), cache)
    per_id, per_hour = _collect_sums([judged_per_id], [multi_hour.judged_per_hour])
    balance.adjust(per_hour, per_id)
    suspicious = judged_per_id.where("suspicious")
    return [findings.of_ids(suspicious, evidence, findings.IDS), cross_hour.superseded(judged_per_id)]


def _replaced_findings(touched: set[str], compares_ids: bool) -> str:
    """Return the SQL condition of the findings that a run replaces."""
    replaced = [f"scope = '{findings.LOG}'"]
    if touched:
        replaced.append(f"(scope = '{findings.HOUR}' AND {hours.sql(touched)})")
    if compares_ids:
        replaced.append(f"scope = '{findings.IDS}'")
    return " OR ".join(replaced)


def _write_findings(
    lake: Lake, context: RunContext, found: Sequence[DataFrame], replaced: str, late_hours: Mapping[str, int]
) -> None:
    """Replace the findings that meet the condition `replaced` by those of this run (schemas.FINDING without `run`).

    Nothing is written if there are none, before and now. `late_hours` is Balance.late_hours.
    """
    known = lake.read_cached("findings")
    if found:
        united = reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), found)
        rows = late_findings.with_late_ms(united, known, late_hours, context.window_from)
        rows = rows.withColumn("run", F.lit(context.plan.run).cast("bigint"))
    elif lake.exists("findings") and known.where(replaced).isEmpty():
        return
    else:
        rows = frames.rows_of(lake.spark, schemas.of("findings"), [])
    lake.replace("findings", rows, replaced, context.plan.run)


def _hours_to_classify_again(multi_hour: MultiHour | None, balance: Balance) -> set[str]:
    """Return the hours of rows that `may_differ`; if no evidence has changed, only hours that the balance counts."""
    if multi_hour is None:
        return set()
    found = set(hours.of(may_differ(multi_hour.judged_per_hour, balance.evidence_changed)))
    return found if balance.evidence_changed else found & balance.hours.keys()


def may_differ(judged: DataFrame, evidence_changed: bool) -> DataFrame:
    """Filter rows of ids with rows in several hours to those whose hour may have been counted by another verdict.

    `Balance.adjust` subtracts present verdicts from the sums of the hours, so these hours must be classified again. A
    delivered id stays delivered, unless the logs prove something else; another may be pending again, because a log is
    blocked again.
    """
    not_clean = judged.where("is_clean = 0")
    if evidence_changed:
        return not_clean
    unsettled = F.col("category").isin(LOST, PENDING, classify.STUCK, "unprovable")
    return not_clean.where(F.coalesce(unsettled, F.lit(False)) | F.col("phantom").isNotNull())


def _recent(rows: DataFrame, since_ms: int, evidence: LogEvidence) -> DataFrame:
    """Filter rows to the hours since a time (ms), and of the longest key retention before it."""
    return rows.where(hours.since(hours.text_of(since_ms - evidence.longest_ttl_ms)))


def _first_ms(balance: Balance, window_from: int) -> int:
    """Return the start (ms) of the first hour whose findings may be in the report."""
    late = min(balance.late_hours, default=None)
    return window_from if late is None else min(window_from, hours.ms_of(late))


def _client_duplicates(rows: DataFrame, since_ms: int, evidence: LogEvidence, cache: ExitStack) -> list[DataFrame]:
    """Return the findings (schemas.FINDING) about requests that clients sent under several keys.

    `since_ms` is `_first_ms`. Rows older than that by the longest key retention are retries of no later row.
    """
    recent = _recent(rows, since_ms, evidence)
    retried = frames.cached(cross_hour.retried(recent, evidence), cache)
    spans = cross_hour.hour_spans(retried)
    return [cross_hour.client_duplicates(recent, retried, spans, evidence)] if spans else []


def _mark_proven_lost(lake: Lake, classified: Classified, other_rows: DataFrame | None, run: int) -> None:
    """Store which claims these rows prove to be lost: a log that is deleted or recreated later proves nothing more.

    `other_rows` (deliveries.ROW) are those that may have the record of a claim in another hour. The last write of the
    classification, since a MERGE into `deliveries` drops the cached rows that were read from it.
    """
    if any(row[LOST] for row in classified.sums):
        newly_lost = frames.checkpointed(findings.newly_lost(classified.rows))
        if other_rows is not None:
            newly_lost = frames.checkpointed(findings.without_record(newly_lost, other_rows))
        if touched := hours.of(newly_lost):
            lake.mark_proven_lost(newly_lost, touched, run)


def _single_clean(rows: DataFrame, multi_row: MultiRow | None) -> DataFrame:
    """Filter to the clean rows of ids with a single row."""
    clean = rows.where("is_clean = 1")
    return clean if multi_row is None else clean.join(multi_row.ids, "id", "left_anti")


def _write_verdicts(lake: Lake, plan: Plan, classified: DataFrame, clean: DataFrame, touched: set[str]) -> None:
    """Append the ids whose verdict has changed to `verdicts`; `clean` are the clean rows of ids with a single row."""
    # No verdict of another hour is read: the table has the changes of all hours.
    known = lake.read_cached("verdicts").where(hours.within(touched))
    last_verdicts = verdict_history.last_verdicts(known, plan.run)
    revisable = verdict_history.may_change(last_verdicts)
    revised_hours = hours.of(revisable) if lake.exists("verdicts") else []
    settled = None
    if revised_hours:
        in_hours = clean.where(hours.within(revised_hours))
        settled = in_hours.join(revisable, ["accepted_hour", "id"], "left_semi")
    changes = frames.checkpointed(verdict_history.changed(classified, settled, last_verdicts, plan.run, plan.frozen_ms))
    if not changes.isEmpty():
        lake.append_once("verdicts", changes.coalesce(1), plan.run, in_memory=changes)
