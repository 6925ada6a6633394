"""Classification of rows: a table of cases for the balance and the claims, and one for the causes of copies."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import Rules
from spark.reading import decode
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, UNWANTED, Log, LogGap, OffsetGuarantee, Plan
from spark.rules import causes, findings
from spark.rules.classify import LogEvidence, classify, classify_clean, gather_evidence
from spark.settings import OFFSETS_MOST, Settings
from spark.tables import deliveries
from tests.spark import fake_cluster
from tests.spark.rows import NOW_MS, TTL_MS, answer, copy, entry, ids, name_of, reduced, states
from tests.spark.times import FAR_FUTURE_MS, HOUR_MS

FROZEN_MS = NOW_MS + HOUR_MS
SETTLED, FRESH = NOW_MS, FROZEN_MS - 1000
# Before the grace (60 s), but not before timeouts and grace (80 s).
LATE = FROZEN_MS - 61_000


def log(role: str, topic: str, partition: int, *, end: int = 100, **more: Any) -> Log:
    """A log that was read from its beginning to its end, without an open transaction; `more` changes fields."""
    values: dict[str, Any] = {
        "topic_id": "one",
        "audited": True,
        "compacted": False,
        "recreated_at_ms": 0,
        "first": 0,
        "start": 0,
    }
    values |= {
        "end": end,
        "last_stable": end,
        "high_watermark": end,
        "complete_since_ms": 0,
        "decided_until_ms": FROZEN_MS,
    }
    is_held_up = more.get("high_watermark", end) > more.get("last_stable", end)
    values |= {"later_end": OFFSETS_MOST if is_held_up else more.get("high_watermark", end), "caught_up_run": 1}
    return Log(role=role, topic=topic, partition=partition, **(values | more))


# One gap of the earlier topic, and one of the present topic, which a run found whose clock was behind.
RECREATED_GAPS = (
    LogGap(6, 8, "retention", NOW_MS),
    LogGap(9, 9, "recreated", NOW_MS + 60_000),
    LogGap(20, 22, "retention", NOW_MS + 59_000),
)


def plan(*logs: Log) -> Plan:
    default_logs = [
        log(DATA, "t", 0),
        log(DATA, "t", 1, last_stable=100, high_watermark=103),
        log(DATA, "t", 2, first=50, gaps=(LogGap(60, 70, "retention", NOW_MS),)),
        log(DATA, "compact", 0, compacted=True),
        log(DATA, "recreated", 0, recreated_at_ms=NOW_MS + 60_000, gaps=RECREATED_GAPS),
        log(DATA, "began", 0, first_record_ms=NOW_MS + 60_000),
        log(DATA, "begins", 0, first_record_ms=FROZEN_MS),
        log(DATA, "telemetry", 0, guarantees=(OffsetGuarantee(0, "idempotent"),)),
        log(DATA, "changed", 0, guarantees=(OffsetGuarantee(0, "idempotent"), OffsetGuarantee(5, "exactly_once"))),
        log(DATA, "relaxed", 0, guarantees=(OffsetGuarantee(0, "exactly_once"), OffsetGuarantee(5, "idempotent"))),
        log(DATA, "u", 0),
        log(DATA, "proven", 0, last_stable=100, high_watermark=103),
        log(DATA, "meanwhile", 0, later_end=103),
        log(DATA, "passed", 0, compacted=True),
        log(DATA, "unblocked", 0, compacted=True),
        log(LEDGER, "fencepost.ledger", 0),
        log(LEDGER, "fencepost.ledger", 1, complete_since_ms=NOW_MS + 60_000),
        log(REQUESTS, "fencepost.requests", 0),
    ]
    here = {one.topic_partition for one in logs}
    return Plan(1, FROZEN_MS, "", (*logs, *(one for one in default_logs if one.topic_partition not in here)))


def settings(**options: Any) -> Settings:
    return fake_cluster.settings('[[topics]]\npattern = "telemetry*"\nguarantee = "idempotent"', **options)


OTHER = (1, 20, 0, "b:1")

# The end of a log when all claims on it were read.
ENDED = {("proven", 0): 100, ("compact", 0): 100, ("passed", 0): 50}

CASES: dict[str, tuple[Sequence[Any], str | None, set[str], str | None]] = {
    # name: evidence, category, outcomes of claims without a record, phantom
    "once": ([copy(1), entry(1), answer(201, 1)], "delivered_once", set(), None),
    "replayed": ([copy(1), entry(1), answer(201, 1), answer(201, 1), answer(504)], "delivered_once", set(), None),
    "no-answer": ([copy(1), entry(1)], "delivered_once", set(), None),
    "twice": ([copy(1), copy(2, writer=OTHER), entry(1), entry(2)], "duplicated", set(), None),
    "conflict": ([copy(1), copy(2, fingerprint=b"x" * 8), entry(1), entry(2)], "conflicted", set(), None),
    "same-by-alt": (
        [copy(1, fingerprint=b"x" * 8), entry(1), copy(2, writer=None, alternative_fingerprints=b"x" * 8)],
        "duplicated",
        set(),
        None,
    ),
    "other-by-alt": (
        [copy(1), entry(1), copy(2, writer=None, fingerprint=b"y" * 8, alternative_fingerprints=b"x" * 8)],
        "conflicted",
        set(),
        None,
    ),
    "lost": ([entry(1), answer(201, 1)], "lost", {"lost"}, None),
    "lost-beyond": ([entry(1000)], "lost", {"lost"}, None),
    "lost-answer": ([answer(201, 7)], "lost", {"lost"}, None),
    "lost-beside": ([copy(2), entry(1), entry(2)], "lost", {"lost"}, None),
    # Accepted long ago, with recent evidence: a retry carries the accepted_at of its first claim.
    "lost-late": ([entry(1, timestamp_ms=LATE)], "lost", {"lost"}, None),
    "lost-late-answer": ([answer(201, 1, timestamp_ms=LATE)], "lost", {"lost"}, None),
    "lost-just-now": ([entry(1, timestamp_ms=FRESH)], "pending", {"pending"}, None),
    "stuck-late": ([answer(504, timestamp_ms=LATE)], "stuck", set(), None),
    "stuck-just-now": ([answer(504, timestamp_ms=FRESH)], "pending", set(), None),
    "phantom-late": ([copy(1, timestamp_ms=LATE)], None, set(), "phantom"),
    "phantom-just-now": ([copy(1, timestamp_ms=FRESH)], None, set(), "pending"),
    "answered-late": ([copy(1, topic="telemetry", timestamp_ms=LATE)], None, set(), "pending"),
    "late": ([entry(1, at=LATE)], "pending", {"pending"}, None),
    # To the millisecond: by the acceptance, and by the time of the evidence.
    "almost-ripe": ([entry(1, at=FROZEN_MS - 80_000)], "pending", {"pending"}, None),
    "just-ripe": ([entry(1, at=FROZEN_MS - 80_001)], "lost", {"lost"}, None),
    "almost-late": ([entry(1, timestamp_ms=FROZEN_MS - 60_000)], "pending", {"pending"}, None),
    "just-late": ([entry(1, timestamp_ms=FROZEN_MS - 60_001)], "lost", {"lost"}, None),
    "just-stuck": ([answer(504, at=FROZEN_MS - 80_000)], "stuck", set(), None),
    "almost-stuck": ([answer(504, at=FROZEN_MS - 79_999)], "pending", set(), None),
    # Past the end of the log when the claim was read: never written, whatever is open or was written since.
    "proven-empty": ([entry(100, topic="proven")], "lost", {"lost"}, None),
    "proven-answer": ([answer(201, 102, topic="proven")], "lost", {"lost"}, None),
    # Written while the run was planned, or after an open transaction: exists, and is not read.
    "meanwhile": ([entry(102, topic="meanwhile")], "pending", {"pending"}, None),
    "meanwhile-past": ([entry(103, topic="meanwhile")], "lost", {"lost"}, None),
    "past-end": ([entry(103, partition=1)], "pending", {"pending"}, None),
    "at-start": ([entry(50, partition=2)], "lost", {"lost"}, None),
    "fresh": ([entry(1, at=FRESH)], "pending", {"pending"}, None),
    "fresh-beyond": ([entry(1000, at=FRESH)], "pending", {"pending"}, None),
    "open-beyond": ([entry(100, partition=1)], "pending", {"pending"}, None),
    "open-below": ([entry(99, partition=1)], "lost", {"lost"}, None),
    "below-start": ([entry(49, partition=2)], "unprovable", {"below_start"}, None),
    "in-gap": ([entry(60, partition=2)], "unprovable", {"retention"}, None),
    "after-gap": ([entry(70, partition=2)], "lost", {"lost"}, None),
    "compacted": ([entry(5, topic="compact")], "unprovable", {"compacted"}, None),
    # Compaction does not move the end: a record past the end was never written.
    "compact-beyond": ([entry(100, topic="compact")], "lost", {"lost"}, None),
    # The log grew past the offset, where compaction may delete records, but not one that was never written.
    "passed": ([entry(50, topic="passed")], "lost", {"lost"}, None),
    # An open transaction hid the end of the log when the claim was read.
    "unblocked-beyond": ([entry(100, topic="unblocked")], "lost", {"lost"}, None),
    "passed-below": ([entry(49, topic="passed")], "unprovable", {"compacted"}, None),
    "recreated": ([entry(5, topic="recreated")], "unprovable", {"recreated"}, None),
    "recreated-later": ([entry(5, topic="recreated", at=NOW_MS + 120_000)], "lost", {"lost"}, None),
    # The topic id decides, whatever the times are; without the id the time of the log's first record.
    "other-id": ([entry(5, topic_id="other")], "unprovable", {"recreated"}, None),
    "other-id-later": (
        [entry(5, topic="recreated", at=NOW_MS + 120_000, topic_id="other")],
        "unprovable",
        {"recreated"},
        None,
    ),
    "same-id": ([entry(5, topic="recreated", topic_id="one")], "lost", {"lost"}, None),
    "same-id-began": ([entry(5, topic="began", topic_id="one")], "lost", {"lost"}, None),
    "other-id-fresh": ([entry(5, topic_id="other", timestamp_ms=FRESH)], "pending", {"pending"}, None),
    "other-id-there": ([copy(5), entry(5, topic_id="other")], "delivered_once", set(), None),
    "began": ([entry(5, topic="began")], "unprovable", {"recreated"}, None),
    "began-answer": ([answer(201, 5, topic="began")], "unprovable", {"recreated"}, None),
    "began-later": (
        [entry(5, topic="began", at=NOW_MS + 60_000, timestamp_ms=NOW_MS + 60_000)],
        "lost",
        {"lost"},
        None,
    ),
    "begins-fresh": ([entry(5, topic="begins", at=FRESH)], "pending", {"pending"}, None),
    "recreated-gap": ([entry(7, topic="recreated", at=NOW_MS + 120_000)], "lost", {"lost"}, None),
    "recreated-unread": (
        [entry(21, topic="recreated", at=NOW_MS + 120_000)],
        "unprovable",
        {"retention"},
        None,
    ),
    "gone": ([entry(5, topic="gone")], "unprovable", {"topic_gone"}, None),
    "gone-fresh": ([entry(5, topic="gone", at=FRESH)], "pending", {"pending"}, None),
    # Lost by an earlier run, whatever the log shows now; see `cases`.
    "was-lost-gone": ([entry(5, topic="gone")], "lost", {"lost"}, None),
    "was-lost-other": ([entry(5, topic_id="other")], "lost", {"lost"}, None),
    "was-lost-below": ([answer(201, 49, partition=2)], "lost", {"lost"}, None),
    "was-lost-gap": ([entry(60, partition=2)], "lost", {"lost"}, None),
    "was-lost-compact": ([entry(5, topic="compact")], "lost", {"lost"}, None),
    "was-lost-there": ([copy(5), entry(5), entry(5)], "delivered_once", set(), None),
    # A 201 without coordinates, and nothing else that locates its record.
    "unlocated": ([answer(201)], "unprovable", {"no_coordinates"}, None),
    "unlocated-fresh": ([answer(201, timestamp_ms=FRESH)], "pending", {"pending"}, None),
    "unlocated-504": ([answer(504), answer(201)], "unprovable", {"no_coordinates"}, None),
    "unlocated-bare": ([answer(201), copy(1, writer=None)], "unprovable", {"no_coordinates"}, None),
    "located-entry": ([answer(201), entry(5)], "lost", {"lost"}, None),
    "located-answer": ([answer(201), answer(201, 49, partition=2)], "unprovable", {"below_start"}, None),
    "located-copy": ([answer(201), copy(1)], "delivered_once", set(), "phantom"),
    "stuck": ([answer(504)], "stuck", set(), None),
    "stuck-202": ([answer(202), answer(409)], "stuck", set(), None),
    "in-doubt": ([answer(504, at=FRESH)], "pending", set(), None),
    "elsewhere": ([answer(504)], None, set(), None),
    "elsewhere-fresh": ([answer(202, at=FRESH)], None, set(), None),
    "elsewhere-here": ([answer(504), copy(1)], "delivered_once", set(), "phantom"),
    "elsewhere-lost": ([answer(504), entry(9)], "lost", {"lost"}, None),
    "taken-back": ([answer(504), answer(503, timestamp_ms=NOW_MS + 21)], None, set(), None),
    "not-taken-back": (
        [answer(503, timestamp_ms=NOW_MS + 19), answer(503), answer(504, timestamp_ms=NOW_MS + 21)],
        "stuck",
        set(),
        None,
    ),
    "freed-elsewhere": ([answer(503, topic="u", timestamp_ms=NOW_MS + 1), answer(504)], "stuck", set(), None),
    "taken-yet-there": ([answer(504), answer(503, position=1), copy(1)], "delivered_once", set(), "phantom"),
    "stuck-both": ([answer(202), answer(504)], "stuck", set(), None),
    "taken-at-once": ([answer(504), answer(503, position=1)], None, set(), None),
    "not-at-once": ([answer(503), answer(202, position=1)], "stuck", set(), None),
    "came-after-all": ([answer(504), answer(503, position=1), copy(1), entry(1)], "delivered_once", set(), None),
    "refused": ([answer(422)], None, set(), None),
    "foreign": ([copy(1, writer=None)], None, set(), None),
    "phantom": ([copy(1)], None, set(), "phantom"),
    # The journal names the copy: written while the topic was idempotent, or the ledger entry was deleted.
    "phantom-answered": ([copy(1), answer(201, 1)], "delivered_once", set(), None),
    "answered-beside": ([copy(1), answer(201, 2)], "lost", {"lost"}, "phantom"),
    "answered-one": ([copy(1), copy(2), answer(201, 2)], "duplicated", set(), None),
    "phantom-fresh": ([copy(1, at=FRESH)], None, set(), "pending"),
    "phantom-no-claim": ([copy(1, writer=OTHER)], None, set(), "evidence_gap"),
    "phantom-no-slot": ([copy(1, writer=(99, 1, 0, "x"))], None, set(), "evidence_gap"),
    # The acceptance decides, not the timestamp, which a client may set.
    "phantom-ts-old": ([copy(1, writer=OTHER, at=NOW_MS + 120_000, timestamp_ms=NOW_MS)], None, set(), "phantom"),
    "no-ledger-ts-new": ([copy(1, writer=OTHER, timestamp_ms=NOW_MS + 120_000)], None, set(), "evidence_gap"),
    # A timestamp of 2096, read some time ago and just now.
    "phantom-wild": ([copy(1, timestamp_ms=FAR_FUTURE_MS, observed_ms=LATE)], None, set(), "phantom"),
    "phantom-wild-now": ([copy(1, timestamp_ms=FAR_FUTURE_MS, observed_ms=FRESH)], None, set(), "pending"),
    # Several faults of one id: a finding for each, and one category in the balance.
    "twice-lost": ([copy(1), copy(2), entry(1), entry(2), entry(3)], "lost", {"lost"}, None),
    "conflict-lost": ([copy(1), copy(2, fingerprint=b"x" * 8), entry(1), entry(3)], "lost", {"lost"}, None),
    "gap-lost": ([entry(3), entry(49, partition=2)], "lost", {"lost", "below_start"}, None),
    "fresh-lost": ([entry(3), entry(4, timestamp_ms=FRESH)], "lost", {"lost", "pending"}, None),
    "twice-fresh": ([copy(1), copy(2), entry(1), entry(9, timestamp_ms=FRESH)], "duplicated", {"pending"}, None),
    "twice-gap": ([copy(1), copy(2), entry(1), entry(49, partition=2)], "duplicated", {"below_start"}, None),
    "fresh-gap": ([entry(49, partition=2), entry(9, timestamp_ms=FRESH)], "pending", {"below_start", "pending"}, None),
    "once-gap": ([copy(1), entry(1), entry(49, partition=2)], "unprovable", {"below_start"}, None),
    "stuck-strange": ([answer(504), copy(1, writer=None)], "stuck", set(), None),
    "in-doubt-strange": ([answer(504, at=FRESH), copy(1, writer=None, at=FRESH)], "pending", set(), None),
    "stuck-strangers": ([answer(504), copy(1, writer=None), copy(2, writer=None)], "duplicated", set(), None),
    "freed-strange": ([answer(504), answer(503, position=1), copy(1, writer=None)], None, set(), None),
    "stuck-phantom": ([answer(504), copy(1)], "delivered_once", set(), "phantom"),
    "idempotent": ([copy(1, topic="telemetry"), answer(201, 1, topic="telemetry")], "delivered_once", set(), None),
    "idempotent-phantom": ([copy(1, topic="telemetry")], None, set(), "phantom"),
    "idempotent-lost": ([answer(201, 7, topic="telemetry")], "lost", {"lost"}, None),
    "idempotent-504": ([copy(1, topic="telemetry"), answer(504, topic="telemetry")], "delivered_once", set(), None),
    # A changed rule applies to later records.
    "changed-before": ([copy(4, topic="changed"), answer(504, topic="changed")], "delivered_once", set(), None),
    "changed-after": ([copy(5, topic="changed"), answer(504, topic="changed")], "delivered_once", set(), "phantom"),
    "relaxed-before": ([copy(4, topic="relaxed"), answer(504, topic="relaxed")], "delivered_once", set(), "phantom"),
    "relaxed-after": ([copy(5, topic="relaxed"), answer(504, topic="relaxed")], "delivered_once", set(), None),
    # A forwarded header: the content of the record counts, in its own topic and in another.
    "fwd": ([copy(1), entry(1), copy(2, alternative_fingerprints=b"x" * 8)], "conflicted", set(), None),
    "fwd-entered": (
        [copy(1), entry(1), copy(2, alternative_fingerprints=b"x" * 8), entry(2)],
        "duplicated",
        set(),
        None,
    ),
    "fwd-answered": (
        [copy(1), entry(1), copy(2, alternative_fingerprints=b"x" * 8), answer(201, 2)],
        "duplicated",
        set(),
        None,
    ),
    "derived": (
        [copy(1), entry(1), copy(2, topic="u", alternative_fingerprints=b"x" * 8)],
        "delivered_once",
        set(),
        None,
    ),
    "derived-again": (
        [
            copy(1),
            copy(2),
            entry(1),
            entry(2),
            *(copy(n, topic="u", alternative_fingerprints=b"x" * 8) for n in (1, 2)),
        ],
        "duplicated",
        set(),
        None,
    ),
    "derived-only": ([entry(1), copy(2, topic="u", alternative_fingerprints=b"x" * 8)], "lost", {"lost"}, None),
    "derived-phantom": ([copy(1), copy(2, topic="u", alternative_fingerprints=b"x" * 8)], None, set(), "phantom"),
    # With the fingerprint of its own topic: no derived copy, but another write under the same key.
    "not-derived": ([copy(1), entry(1), copy(2, topic="u")], "duplicated", set(), None),
    "no-home": ([copy(2, topic="u", alternative_fingerprints=b"x" * 8)], None, set(), "phantom"),
    # A copy without header of a request with a partition, or with the client's traceparent.
    "bare-alt-second": (
        [copy(1, fingerprint=b"x" * 8), entry(1), copy(2, writer=None, alternative_fingerprints=b"y" * 8 + b"x" * 8)],
        "duplicated",
        set(),
        None,
    ),
}


def cases(spark: SparkSession) -> DataFrame:
    """All cases as ROWs; computed once a session, since no rule takes part."""
    if not spark.catalog.tableExists("cases"):
        rows = reduced(spark, ids({name: case[0] for name, case in CASES.items()}), later_ends=ENDED)
        elsewhere = F.col("id").cast("string").startswith("elsewhere") & F.col("offset").isNull()
        was_lost = F.col("id").cast("string").startswith("was-lost")
        rows = rows.withColumns(
            {"elsewhere": F.when(elsewhere, F.lit(True)), "proven_lost": F.when(was_lost, F.lit(True))}
        )
        rows.localCheckpoint().createOrReplaceTempView("cases")
    return spark.table("cases")


@pytest.fixture(scope="module")
def classified(spark: SparkSession) -> dict[str, Any]:
    rows = deliveries.gathered(cases(spark))
    return {name_of(row["id"]): row for row in classify(rows, gather_evidence(plan(), settings())).collect()}


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_classified(classified: dict[str, Any], name: str) -> None:
    _, category, outcomes, phantom = CASES[name]
    row = classified[name[:16]]
    assert row["category"] == category
    assert {claim["outcome"] for claim in row["missing"] or []} == outcomes
    assert row["phantom"] == phantom
    assert row["accepted"] == (category is not None)
    assert row["open"] == ("pending" in {category, phantom, *outcomes})


def test_the_names_of_the_cases_differ_in_the_bytes_of_an_id() -> None:
    assert len({name[:16] for name in CASES}) == len(CASES)
    assert all(len(name) <= 16 for name in FOUND)


FOUND: dict[str, set[tuple[str, str | None, int]]] = {
    # name of a case: kind, cause and count of each finding
    "once": set(),
    "twice": {("duplicate", "dual_producer", 2)},
    "conflict": {("conflict", "rewrite", 2)},
    "lost": {("lost", "ledger", 1)},
    "lost-answer": {("lost", "answer", 1)},
    "in-gap": {("evidence_gap", "retention", 0)},
    "unlocated": {("evidence_gap", "no_coordinates", 1)},
    "other-id": {("evidence_gap", "recreated", 1)},
    "below-start": {("evidence_gap", "below_start", 1)},
    "phantom": {("phantom", None, 1)},
    "phantom-no-claim": {("evidence_gap", "ledger_gone", 1)},
    "stuck": {("stuck", "504", 0)},
    "stuck-202": {("stuck", "202", 0)},
    "stuck-both": {("stuck", "504", 0)},
    "fwd": {("conflict", "foreign_writer", 2)},
    "derived": {("derived_copy", None, 1)},
    "derived-again": {("duplicate", "rewrite", 2), ("derived_copy", None, 2)},
}


def found_of(rows: DataFrame, seen: LogEvidence) -> dict[str, set[tuple[str, str | None, int]]]:
    """The findings of classified rows, for the cases of FOUND."""
    found: dict[str, set[tuple[str, str | None, int]]] = {name: set() for name in FOUND}
    some = rows.where(F.col("id").isin([bytearray(name.ljust(16).encode()) for name in FOUND]))
    suspects = some.where("suspicious")
    for row in findings.of_ids(suspects, seen, findings.HOUR).collect():
        found[name_of(row["id"])].add((row["kind"], row["cause"], row["count"]))
    for name in ("in-gap", "below-start", "phantom-no-claim", "other-id", "unlocated"):
        one = suspects.where(F.col("id").isin([bytearray(name.ljust(16).encode())]))
        gap_findings = findings.of_partitions(one, findings.HOUR).collect()
        found[name] |= {(row["kind"], row["cause"], row["count"]) for row in gap_findings}
    return found


def test_each_classified_row_has_its_findings(spark: SparkSession) -> None:
    seen = gather_evidence(plan(), settings())
    assert found_of(classify(deliveries.gathered(cases(spark)), seen), seen) == FOUND


def test_a_topic_with_derived_in_its_rule_has_no_finding_derived_copy(spark: SparkSession) -> None:
    rules = Rules.parse('[[topics]]\npattern = "u"\nderived = true')
    seen = gather_evidence(plan(), dataclasses.replace(settings(), rules=rules))
    found = found_of(classify(deliveries.gathered(cases(spark)), seen), seen)
    assert (found["derived"], found["derived-again"]) == (set(), {("duplicate", "rewrite", 2)})


def letter(offset: int, topic: str = "u") -> Any:
    """Return a record whose header has the fingerprint of what was asked for, as a dead letter's has."""
    return copy(offset, topic=topic, fingerprint=b"l" * 8, alternative_fingerprints=b"x" * 8)


LETTERS: dict[str, tuple[Sequence[Any], str, set[tuple[str, str | None]]]] = {
    # name: evidence, category, kind and cause of each finding; "u" is a quarantine topic
    "letter": ([letter(1), entry(1, topic="u"), answer(422, topic="u")], "delivered_once", set()),
    "then-written": ([letter(1), entry(1, topic="u"), copy(2), entry(2)], "delivered_once", set()),
    "then-twice": (
        [letter(1), entry(1, topic="u"), copy(2), entry(2), copy(3, writer=OTHER), entry(3)],
        "duplicated",
        {("duplicate", "dual_producer")},
    ),
    "letter-twice": (
        [letter(1), entry(1, topic="u"), letter(2), entry(2, topic="u")],
        "duplicated",
        {("duplicate", "rewrite")},
    ),
    "letter-lost": ([entry(1, topic="u"), copy(2), entry(2)], "lost", {("lost", "ledger")}),
}


def test_a_dead_letter_is_delivered_once_and_no_copy_of_a_later_event(spark: SparkSession) -> None:
    rules = Rules.parse('[[topics]]\npattern = "t"\nschema = "s"\nquarantine = "u"')
    seen = gather_evidence(plan(), dataclasses.replace(settings(), rules=rules))
    rows = reduced(spark, ids({name: case[0] for name, case in LETTERS.items()}))
    classified = classify(deliveries.gathered(rows, quarantine=seen.quarantine), seen).localCheckpoint()
    assert {name_of(row["id"]): row["category"] for row in classified.collect()} == {
        name: category for name, (_, category, _) in LETTERS.items()
    }
    found: dict[str, set[tuple[str, str | None]]] = {name: set() for name in LETTERS}
    for row in findings.of_ids(classified.where("suspicious"), seen, findings.HOUR).collect():
        found[name_of(row["id"])].add((row["kind"], row["cause"]))
    assert found == {name: wanted for name, (_, _, wanted) in LETTERS.items()}


def test_an_id_in_doubt_is_pending_while_the_ledger_is_undecided(spark: SparkSession) -> None:
    held = plan(log(LEDGER, "fencepost.ledger", 0, decided_until_ms=NOW_MS, caught_up_run=0))
    rows = states(
        spark,
        {
            "in-doubt": [answer(504)],
            # With evidence from before the log was blocked, by less than the timeouts.
            "in-doubt-late": [answer(504, at=NOW_MS - HOUR_MS, timestamp_ms=NOW_MS - 70_000)],
            "phantom": [copy(1)],
            "old": [copy(3, at=NOW_MS - 30 * HOUR_MS)],
            "other": [copy(2, writer=(1, 1, 1, "x"), at=FRESH - HOUR_MS // 2)],
        },
    )
    found = {name_of(row["id"]): row for row in classify(rows, gather_evidence(held, settings())).collect()}
    assert found["in-doubt"]["category"] == found["in-doubt-late"]["category"] == "pending"
    assert found["phantom"]["phantom"] == found["old"]["phantom"] == "pending"
    assert found["other"]["phantom"] == "phantom"


@pytest.mark.parametrize(
    "options",
    [{"topics": ("t",)}, {"without_topics": ("oth*", "a")}, {"topics": ("*",), "without_topics": ("a", "o*")}],
)
def test_only_audited_topics_are_classified(spark: SparkSession, options: dict[str, Any]) -> None:
    rows = states(spark, {"in": [entry(1)], "out": [entry(1, topic="other")], "both": [entry(1, topic="a"), entry(2)]})
    seen = gather_evidence(plan(), settings(**options))
    found = {name_of(row["id"]): row for row in classify(rows, seen).collect()}
    assert found.keys() == {"in", "both"}
    assert [claim["offset"] for claim in found["both"]["missing"]] == [2]


def test_topics_that_only_other_options_named_are_neither_classified_nor_reported(spark: SparkSession) -> None:
    gone = log(DATA, "gone", 0, audited=False, gaps=(LogGap(2, 4, "retention", NOW_MS),))
    left_out = log(UNWANTED, "out", 0, audited=False, gaps=(LogGap(1, 3, "retention", NOW_MS),))
    cases = plan(gone, left_out)
    rows = states(spark, {"in": [entry(1)], "out": [copy(1, topic="out")], "gone": [entry(1, topic="gone")]})
    found = {name_of(row["id"]) for row in classify(rows, gather_evidence(cases, settings())).collect()}
    assert found == {"in", "gone"}
    (of_logs,) = findings.of_logs(spark, cases)
    assert {row["topic"] for row in of_logs.collect()} == {"t", "recreated", "gone"}


def test_without_a_ledger_a_record_is_a_phantom_only_where_the_journal_shows_it(spark: SparkSession) -> None:
    logs = [one for one in plan().logs if one.role != LEDGER]
    seen = gather_evidence(Plan(1, FROZEN_MS, "", tuple(logs)), settings())
    rows = states(spark, {"unknown": [copy(1)], "answered": [copy(1, topic="telemetry")], "fresh": [copy(1, at=FRESH)]})
    found = {name_of(row["id"]): row["phantom"] for row in classify(rows, seen).collect()}
    assert found == {"unknown": "evidence_gap", "answered": "phantom", "fresh": "pending"}


RESTARTED = (0, 11, 0, "a:1")
ELSEWHERE = (5, 50, 0, "z:9")

# A copy within three retentions of the first one, and one after them.
RETRIED_LATE = ((1, 0, (0, 10, 0, "a:1")), (2, 3 * TTL_MS - 1, ELSEWHERE), (3, 7 * TTL_MS, (6, 60, 0, "y:9")))


def kept_for(ttl_ms: int, offset: int, *, at: int = NOW_MS, **more: Any) -> list[Any]:
    """A copy in the topic `u`, and its ledger entry, which tells the retention of its key; 0 for the service's own."""
    entered = entry(offset, at=at, topic="u", key_ttl_s=ttl_ms // 1000)
    return [copy(offset, at=at, topic="u", **more), entered]


COPIES: dict[str, tuple[Sequence[Any], list[str | None]]] = {
    "bare": ([copy(1), entry(1), copy(2, writer=None)], [None, "foreign_writer"]),
    "not in the ledger": ([copy(1), entry(1), copy(2)], [None, "foreign_writer"]),
    "in the ledger": ([copy(1), entry(1), copy(2), entry(2)], [None, "rewrite"]),
    "expired": ([copy(1), copy(2, at=NOW_MS + TTL_MS), entry(1), entry(2)], [None, "rewrite"]),
    "expired, other": (
        [copy(1), copy(2, at=NOW_MS + TTL_MS, writer=ELSEWHERE), entry(1), entry(2)],
        [None, "expired_key"],
    ),
    "almost": (
        [copy(1), copy(2, at=NOW_MS + TTL_MS - 1, writer=ELSEWHERE), entry(1), entry(2)],
        [None, "dual_producer"],
    ),
    "kept for longer": (
        [copy(n, at=NOW_MS + ms, writer=writer, topic="u") for n, ms, writer in RETRIED_LATE],
        [None, "dual_producer", "expired_key"],
    ),
    # By the entries the keys lived for a third of the topic's retention, three times it, and for the service's own.
    "source, expired": (
        [*kept_for(TTL_MS, 1), *kept_for(3 * TTL_MS, 2, at=NOW_MS + TTL_MS, writer=ELSEWHERE)],
        [None, "expired_key"],
    ),
    "source, kept": (
        [*kept_for(3 * TTL_MS, 1), *kept_for(TTL_MS, 2, at=NOW_MS + TTL_MS, writer=ELSEWHERE)],
        [None, "dual_producer"],
    ),
    "usual, expired": (
        [*kept_for(0, 1), *kept_for(0, 2, at=NOW_MS + TTL_MS, writer=ELSEWHERE)],
        [None, "expired_key"],
    ),
    "claimed later": (
        [
            *kept_for(3 * TTL_MS, 1, at=NOW_MS + TTL_MS, timestamp_ms=NOW_MS),
            *kept_for(TTL_MS, 2, timestamp_ms=NOW_MS + 9, writer=ELSEWHERE),
        ],
        [None, "expired_key"],
    ),
    "near the second": (
        [
            copy(1),
            copy(2, at=NOW_MS + TTL_MS, writer=ELSEWHERE),
            copy(3, at=NOW_MS + TTL_MS + 5, writer=(5, 51, 0, "y:1")),
            *(entry(n) for n in (1, 2, 3)),
        ],
        [None, "expired_key", "producer_restart"],
    ),
    "same slot": ([copy(1), copy(2, writer=(0, 99, 0, "q:1")), entry(1), entry(2)], [None, "producer_restart"]),
    "same epoch": ([copy(1), copy(2, writer=(0, 10, 1, "a:1")), entry(1), entry(2)], [None, "producer_restart"]),
    "same host": ([copy(1), copy(2, writer=(7, 99, 0, "a:1")), entry(1), entry(2)], [None, "producer_restart"]),
    "nothing": ([copy(1), copy(2, writer=ELSEWHERE), entry(1), entry(2)], [None, "dual_producer"]),
    "namesake": ([copy(1), copy(2, writer=(0, 10, 0, "q:1")), entry(1), entry(2)], [None, "dual_producer"]),
    "bare, unclaimed": ([copy(1, writer=None, timestamp_ms=NOW_MS - 9), copy(2)], [None, "dual_producer"]),
    "ledger first": ([copy(1, writer=ELSEWHERE), copy(2), entry(2)], [None, "dual_producer"]),
    "bare first": ([copy(1, writer=None, timestamp_ms=NOW_MS - 9), copy(2), entry(2)], [None, "foreign_writer"]),
}


def test_each_copy_after_the_first_has_the_cause_of_the_first_matching_rule(spark: SparkSession) -> None:
    rows = reduced(spark, ids({name: case[0] for name, case in COPIES.items()}))
    # Some ids have copies in two hours, as in the pass over all ids.
    gathered = deliveries.gathered(rows, by_hour=False).withColumn("copies", causes.ordered())
    rules = Rules.parse(f'[[topics]]\npattern = "u"\nkey_ttl_s = {3 * TTL_MS // 1000}')
    seen = gather_evidence(plan(), dataclasses.replace(settings(), rules=rules))
    explained = gathered.select("id", causes.explained(F.col("copies"), seen.ttl_of_entry_ms).alias("copies")).collect()
    found = {name_of(row["id"]): [one["cause"] for one in row["copies"]] for row in explained}
    assert found == {name[:16].strip(): causes for name, (_, causes) in COPIES.items()}


def test_copies_are_ordered_by_ledger_then_time_then_coordinates(spark: SparkSession) -> None:
    evidence_of = [
        copy(9, timestamp_ms=NOW_MS),
        copy(8, timestamp_ms=NOW_MS + 2, topic="b"),
        copy(3, timestamp_ms=NOW_MS + 2, topic="a", partition=1),
        copy(6, timestamp_ms=NOW_MS + 2, topic="a", partition=0),
        copy(5, timestamp_ms=NOW_MS + 2, topic="a", partition=0),
        copy(4, timestamp_ms=NOW_MS + 99),
        entry(4),
    ]
    (row,) = states(spark, {"x": evidence_of}).select(causes.ordered().alias("copies")).collect()
    assert [one["offset"] for one in row["copies"]] == [4, 9, 5, 6, 3, 8]


def test_every_finding_has_its_kind_cause_and_count(spark: SparkSession) -> None:
    seen = gather_evidence(plan(), settings())
    named = {
        "lost": [entry(3), answer(201, 4)],
        "both": [copy(1), copy(2, fingerprint=b"x" * 8)],
        "fine": [copy(5), entry(5)],
    }
    rows = classify(states(spark, named), seen).where("suspicious")
    finding_rows = findings.of_ids(rows, seen, findings.HOUR).collect()
    found = {(name_of(row["id"]), row["kind"], row["cause"], row["count"]) for row in finding_rows}
    assert found == {
        ("lost", "lost", "ledger", 2),
        ("both", "conflict", "foreign_writer", 2),
        ("both", "phantom", None, 2),
    }


def test_records_without_an_id_are_unkeyed_or_could_not_be_decoded(spark: SparkSession) -> None:
    undecoded: dict[str, Any] = {"reject": {"reason": "a reason", "content": b"x"}}
    rejected: dict[str, Any] = {"kind": decode.REJECT, "writer": None, **undecoded}
    records = [
        copy(1, kind=decode.UNKEYED, writer=None),
        copy(2, **rejected),
        copy(4, **rejected),
        copy(3, topic="other", **rejected),
        {**entry(7, topic="fencepost.ledger", **undecoded), "status": None},
        {**entry(8, topic="fencepost.requests", **undecoded), "status": None},
    ]
    seen = gather_evidence(plan(), settings(topics=("t",)))
    names = ("kind", "cause", "topic", "count", "first_offset", "last_offset")
    found = findings.without_id(reduced(spark, records), seen).select(*names).collect()
    assert {tuple(row) for row in found} == {
        ("unkeyed", None, "t", 1, 1, 1),
        ("evidence_gap", "undecoded", "t", 2, 2, 4),
        ("evidence_gap", "undecoded", "fencepost.ledger", 1, 7, 7),
        ("evidence_gap", "undecoded", "fencepost.requests", 1, 8, 8),
    }


def test_the_claims_of_a_row_that_are_newly_lost(spark: SparkSession) -> None:
    evidence_of = [entry(3), answer(201, 3), answer(201, 4), entry(5), copy(5), entry(6, timestamp_ms=FRESH)]
    rows = reduced(spark, ids({"lost": evidence_of}))
    for proven, offsets in ((0, {3, 4}), (4, {3})):
        marked = rows.withColumn("proven_lost", F.when(F.col("offset") == proven, F.lit(True)))
        seen = gather_evidence(plan(), settings())
        found = findings.newly_lost(classify(deliveries.gathered(marked), seen)).collect()
        assert [row["offset"] for row in sorted(found)] == sorted(offsets)
        assert {(name_of(row["id"]), row["topic"], row["partition"]) for row in found} == {("lost", "t", 0)}


def test_clean_rows_are_classified_by_their_counts_as_by_their_lists(spark: SparkSession) -> None:
    rows = reduced(spark, ids({name: case[0] for name, case in CASES.items()})).where("is_clean = 1")
    gathered = states(spark, {name: case[0] for name, case in CASES.items()})
    names = [name_of(row["id"]) for row in gathered.where("is_clean = 1").collect()]
    assert set(names) == {"once", "no-answer", "foreign", "idempotent", "phantom-answered", "other-id-there"}
    seen = gather_evidence(plan(), settings())
    alone = rows.where(F.col("id").isin([bytearray(name.ljust(16).encode()) for name in names]))
    whole = findings.sums(classify(deliveries.gathered_single(alone), seen)).collect()
    assert whole == findings.sums(classify(gathered.where("is_clean = 1"), seen)).collect()
    assert whole == findings.sums(classify_clean(alone, seen)).collect()
