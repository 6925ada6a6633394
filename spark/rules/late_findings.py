"""Findings that are decided late: after their hour has left the report's window.

While a log is blocked, the verdict about an id stays open however old its evidence is; and after a pause longer than
the window a run reads what is older than its window. The finding that a run makes in the end has neither evidence nor
an hour in the window, so the time of the decision (`late_ms`) keeps it in the reports.
"""

import json
from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.engine import frames
from spark.rules import current_findings
from spark.rules.findings import HOUR, IDS
from spark.tables import hours


def with_late_ms(found: DataFrame, known: DataFrame, late_hours: Mapping[str, int], since_ms: int) -> DataFrame:
    """Set `late_ms` of a run's findings: schemas.FINDING → schemas.FINDING.

    `known` are all findings of earlier runs (those that were revoked are in no report), `late_hours` is
    Balance.late_hours, `since_ms` the start of the window. A finding over several hours of an id is as late as that of
    a single hour.
    """
    if not late_hours:
        return found.withColumn("late_ms", F.lit(None).cast("bigint"))
    subject = _subject()
    late = found.where(F.col("scope").isin(HOUR, IDS) & F.col("kind").isNotNull() & (F.col("last_ms") < since_ms))
    decided = late.groupBy(subject).agg(F.max(_decided_ms(late_hours)).alias("decided_ms"))
    before = (
        current_findings.unrevoked(known)
        .groupBy(subject)
        .agg(F.lit(True).alias("known"), F.max("late_ms").alias("known_late_ms"))
    )
    # A checkpoint, since the table of `known` is replaced by the result.
    compared = frames.checkpointed(decided.join(before, "subject", "full_outer"))
    late_ms = rule_table.late_ms(F.coalesce("known", F.lit(False)), F.col("known_late_ms"), F.col("decided_ms"))
    of_subjects = compared.select("subject", late_ms.alias("late_ms")).where("late_ms is not null")
    return found.drop("late_ms").withColumn("subject", subject).join(of_subjects, "subject", "left").drop("subject")


def _decided_ms(late_hours: Mapping[str, int]) -> Column:
    """Look up when the verdicts of a finding's hour were decided; null if the hour left the window without an open
    verdict, after a run had read its records."""
    # JSON: a map of literals takes a call into the JVM for each of them, and a long pause has many hours.
    constant = F.from_json(F.lit(json.dumps(dict(late_hours))), "map<string, bigint>")
    return F.try_element_at(constant, hours.as_text(F.col("accepted_hour")))


def _subject() -> Column:
    """Return what a finding is about: its kind, with the id or fingerprint, or the records of a partition in an
    hour."""
    hour = hours.as_text(F.col("accepted_hour"))
    of_partition = (
        F.coalesce(F.col(name).cast("string"), F.lit("")) for name in ("cause", "topic", "partition", "count")
    )
    records = F.concat_ws(":", hour, *of_partition)
    return F.concat_ws(":", "kind", F.coalesce(current_findings.subject(), records)).alias("subject")
