"""The rules of the audit: small functions, each with one decision.

The other modules of spark/ call these functions as attributes of this module (`rule_table.is_beyond(…)`), so that a
test can replace a single rule (tests/spark/mutants.py). Times are ms since the epoch, offsets are offsets of Kafka.
"""

from collections.abc import Iterable
from functools import reduce
from operator import and_
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark.settings import HOUR_MS

PRESENT: Final = "present"
LOST: Final = "lost"
PENDING: Final = "pending"
"""Outcomes of a claim (an offset that a ledger entry or a 201 names). Any other word is the cause of a gap."""

COMPACTED: Final = "compacted"
"""The cause of a gap: compaction may have deleted the record."""

DELIVERED_ONCE: Final = "delivered_once"

FOREIGN_WRITER: Final = "foreign_writer"
REWRITE: Final = "rewrite"
EXPIRED_KEY: Final = "expired_key"
PRODUCER_RESTART: Final = "producer_restart"
DUAL_PRODUCER: Final = "dual_producer"

# --------------------------------------------------------------------------------------------------------- times


def settled_at_ms(accepted_ms: Column, seen_ms: Column, max_settle: int, grace: int) -> Column:
    """Return the time after which the outcome of a request is final.

    `seen_ms` is the time of the last evidence. A retry carries the `accepted_at` of its first claim, which may be long
    ago, so the grace also starts at the evidence.
    """
    return F.greatest(accepted_ms + max_settle, seen_ms + grace)


def blocked_settled_at_ms(accepted_ms: Column, seen_ms: Column, max_settle: int) -> Column:
    """Return `settled_at_ms` by a log that is decided only up to some time.

    A missing record may follow within the timeouts, so the whole `max_settle` starts at the last evidence.
    """
    return F.greatest(accepted_ms, seen_ms) + max_settle


# Synchronised clocks differ by less than a day, and a retry's acceptance is never in the future.
AHEAD_MS: Final = 86_400_000


def is_ahead(ms: Column, now_ms: Column | int) -> Column:
    """Check whether a time is more than a day ahead of `now_ms` (of Kafka, or of the run): its clock is wrong."""
    return ms > now_ms + AHEAD_MS


def is_settled(settled_at_ms: Column, frozen_ms: int) -> Column:
    """Check whether the run froze the ends of the logs after a request was settled."""
    return settled_at_ms < frozen_ms


def is_undecided(settled_at_ms: Column, decided_until_ms: Column | int) -> Column:
    """Check whether a log may still get a record about a request: the log is not decided up to `settled_at_ms`."""
    return settled_at_ms > decided_until_ms


# -------------------------------------------------------------------------------------------------------- claims


def all_claims(entered: Column, answered: Column) -> Column:
    """Concatenate the claims of the ledger and of the answers."""
    return F.concat(entered, answered)


def is_beyond(offset: Column, end: Column) -> Column:
    """Check whether an offset is at or past the end of what was read."""
    return offset >= end


def is_past_end(offset: Column, later_end: Column) -> Column:
    """Check whether an offset is at or past a log's high watermark, listed after the ends of ledger and journal.

    The write of a record is acknowledged before ledger or journal name the record, so a real record lies below that
    high watermark. The rule needs no clock.
    """
    return offset >= later_end


def is_not_yet_read(beyond: Column, was_past_end: Column, past_end: Column) -> Column:
    """Check whether an offset lies in the part of a log that exists but is not read yet.

    Either an open transaction blocks that part, or the part was written while the run was planned. Below the end every
    record is decided. An offset that was past the high watermark once never had the record.
    """
    return beyond & ~was_past_end & ~past_end


def is_of_earlier_topic(
    claimed_id: Column,
    topic_id: Column,
    seen_ms: Column,
    recreated_at_ms: Column,
    first_record_ms: Column,
    settled: Column,
) -> Column:
    """Check whether a claim is about a topic that has been deleted and recreated since.

    `claimed_id` is the topic's id by the ledger entry. Without that id, times decide: the claim is older than the first
    run that saw the present topic, or older than the first record of the log. A claim that is not settled may still
    get its record: as the first record, or because the service does not know the new topic id yet.
    """
    by_time = (seen_ms < recreated_at_ms) | (settled & (seen_ms < first_record_ms))
    return F.when(claimed_id.isNotNull(), settled & (claimed_id != topic_id)).otherwise(by_time)


def is_below(offset: Column, first: Column) -> Column:
    """Check whether an offset is below the first offset that was ever read."""
    return offset < first


def is_within(offset: Column, first: Column, end: Column) -> Column:
    """Check whether an offset lies in a span (`end` is exclusive)."""
    return (offset >= first) & (offset < end)


def is_compacted(compacted: Column, was_past_end: Column) -> Column:
    """Check whether compaction may have deleted the record; a record that was never written cannot be deleted."""
    return compacted & ~was_past_end


def outcome_without_log(settled: Column) -> Column:
    """Return the outcome of a claim whose partition does not exist."""
    return F.when(settled, "topic_gone").otherwise(PENDING)


def outcome(
    present: Column,
    proven_lost: Column,
    no_log: Column,
    recreated: Column,
    below: Column,
    gap: Column,
    not_yet_read: Column,
    settled: Column,
    compacted: Column,
) -> Column:
    """Return the outcome of a claim: the first that holds. `no_log` and `gap` are outcomes or null, others boolean.

    `proven_lost`: an earlier run has proven the loss by the log as it was then, whatever has happened to it since.
    """
    return (
        F.when(present, PRESENT)
        .when(proven_lost, LOST)
        .when(no_log.isNotNull(), no_log)
        .when(recreated, "recreated")
        .when(below, "below_start")
        .when(gap.isNotNull(), gap)
        .when(not_yet_read | ~settled, PENDING)
        .when(compacted, COMPACTED)
        .otherwise(LOST)
    )


def is_without_coordinates(answered_201: Column, entries: Column, located: Column, with_header: Column) -> Column:
    """Check whether an id was answered 201, and nothing says where its record is.

    There is no ledger entry, no 201 with an offset (`located`), and no record with Fencepost's header.
    """
    return (answered_201 > 0) & (entries == 0) & ~located & (with_header == 0)


def outcome_without_coordinates(undecided: Column) -> Column:
    """Return the outcome of a 201 without coordinates: its ledger entry may still follow while the ledger is undecided.

    No record is missing at any offset, so nothing is proven to be lost.
    """
    return F.when(undecided, PENDING).otherwise("no_coordinates")


def gap_count(counted_with_log: Column) -> Column:
    """Return how many records an id's evidence gap counts: 0 where the log's own gap already counts the record."""
    return F.when(counted_with_log, 0).otherwise(1).cast("bigint")


# ------------------------------------------------------------------------------------------------------ phantoms

ANSWER_COUNTS: Final = ("answered_201", "answered_202", "answered_503", "answered_504", "answered_other")


def is_unclaimed(entries: Column, has_201: Column, idempotent: Column, answered: Column) -> Column:
    """Check whether no claim covers a copy with Fencepost's header.

    There is no ledger entry, and no 201 that names the copy (`has_201`). A copy with the guarantee `idempotent` has no
    ledger entry by design: there any answer is enough.
    """
    return (entries == 0) & ~has_201 & ~(idempotent & answered)


def is_ledger_behind(read_run: Column, caught_up_run: Column) -> Column:
    """Check whether the ledger of a copy's slot is not read up to the end that it had when the copy was read.

    A copy that can be read is committed together with its entry, so the entry lies below that end or does not exist.
    """
    return read_run > caught_up_run


def is_undecided_at_freeze(decided_until_ms: int, frozen_ms: int) -> bool:
    """Check whether ledger or journal is not decided up to the freeze: the record that settles a 202 or 504 may come
    much later."""
    return decided_until_ms < frozen_ms


def is_before_evidence(complete_since_ms: Column, accepted_at: Column) -> Column:
    """Check whether a copy was accepted before the time from which on its ledger is complete.

    `complete_since_ms` is null without a ledger for the slot: the header is of another namespace, or the ledger is
    gone. The copy's timestamp does not count, since a client may set it.
    """
    return complete_since_ms.isNull() | (complete_since_ms > accepted_at)


def complete_since(oldest_ms: int, of_topic_ms: Iterable[int], *, has_first_record: bool) -> int:
    """Return the time from which on all records of a log are known.

    That is the time of the log's oldest record. If the log still has its first record, it is the time of the oldest
    record in any log of the topic, since the topic existed then; older records were of an earlier topic.
    """
    return min(of_topic_ms) if has_first_record else oldest_ms


# ---------------------------------------------------------------------------------------- acceptance and balance


def is_freed(freed_ms: Column, in_doubt_ms: Column) -> Column:
    """Check whether the last 503 came after the last 202 or 504; an earlier 503 answered an earlier attempt."""
    return F.coalesce(freed_ms >= in_doubt_ms, F.lit(False))


def is_accepted(
    entries_and_201s: Column,
    answered_202: Column,
    answered_504: Column,
    freed: Column,
    settled_elsewhere: Column,
    with_header: Column,
) -> Column:
    """Check whether an id counts as accepted.

    The id is in the ledger or answered 201 (`entries_and_201s`), or answered 202 or 504. A 202 or 504 does not count
    if its claim was freed, or if other rows of the id settle the answer (`settled_elsewhere`), and this hour has no
    record with Fencepost's header.
    """
    in_doubt = answered_202 + answered_504 > 0
    return (entries_and_201s > 0) | (in_doubt & ~((freed | settled_elsewhere) & (with_header == 0)))


def settles_doubt(has_header: Column, entries: Column, answered_201: Column) -> Column:
    """Check whether a row settles a 202 or 504 of its id; a foreign record does not."""
    return F.coalesce(has_header, F.lit(False)) | (entries + answered_201 > 0)


def is_settled_elsewhere(was_settled: Column, settles: Column, dropped: Column) -> Column:
    """Check whether other rows of its id settle a 202 or 504: now, or since an earlier run.

    `dropped`: this run has dropped such a row's record, which is no longer in its log, and compared all rows again.
    """
    return settles | (was_settled & ~dropped)


def both_decided_until(ledger_ms: int, answers_ms: int) -> int:
    """Return the time up to which both ledger and journal are decided: either may settle a 202 or 504."""
    return min(ledger_ms, answers_ms)


def category(
    lost: Column,
    conflicting: Column,
    copies: Column,
    pending: Column,
    unproven: Column,
    settling: Column,
    answered_201: Column,
    undecided: Column,
) -> Column:
    """Return the category of an accepted id in the balance.

    What is proven comes first, faults before delivery. Pending comes before unprovable, since a pending claim may
    still prove lost. `settling` counts the rows of the id that settle a 202 or 504; a foreign record is none.
    """
    return (
        F.when(lost, LOST)
        .when(conflicting, "conflicted")
        .when(copies > 1, "duplicated")
        .when(pending, PENDING)
        .when(unproven, "unprovable")
        .when((copies == 1) & (settling > 0), DELIVERED_ONCE)
        .when(answered_201 > 0, "unprovable")
        .when(undecided, PENDING)
        .otherwise("stuck")
    )


def clean_category(entries: Column, answered_201: Column) -> Column:
    """Return the category of an id whose only row is clean (deliveries.ROW).

    The id was delivered once if the ledger or a 201 names its record, and is null if neither does: a record of another
    program, which nobody was promised.
    """
    return F.when(entries + answered_201 > 0, DELIVERED_ONCE)


def in_doubt_cause(answered_202: Column, answered_504: Column) -> Column:
    """Return the cause of a finding `stuck`: the answer that was never settled."""
    return F.when(answered_504 > 0, "504").otherwise("202")


def is_its_record(has_header: Column, same_id: Column, bare: Column, same_content: Column, same_key: Column) -> Column:
    """Check whether the record at an offset is the record that was read there.

    A log that was recreated or truncated may have another record at that offset. With Fencepost's header the ids are
    compared; without, content and idempotency key, from which the id of the row was computed.
    """
    return F.when(has_header, same_id).otherwise(bare & same_content & same_key)


# -------------------------------------------------------------------------------------------------------- copies


IN_LEDGER: Final = 0
NOT_IN_LEDGER: Final = 1
"""Ranks of a copy (`ledger_rank`): copies in the ledger come before the others."""


def rank(entered: Column) -> Column:
    """Return the rank of a copy, IN_LEDGER or NOT_IN_LEDGER."""
    return F.when(entered, IN_LEDGER).otherwise(NOT_IN_LEDGER)


ORDER: Final = ("timestamp", "topic", "partition", "offset")
"""The fields by which copies of one rank are ordered."""


PRODUCER: Final = ("slot", "pid", "epoch", "instance")
"""The fields of a producer in Fencepost's header, in the ledger, and in copies and coordinates."""

PRODUCER_IDENTITY: Final = PRODUCER
"""The fields in which two copies of the same producer are equal."""


def is_foreign(has_header: Column, same_producer: Column, ledger_rank: Column) -> Column:
    """Check whether a copy was written by another program: without Fencepost's header, or with a copied one."""
    return ~has_header | (same_producer & (ledger_rank == NOT_IN_LEDGER))


def is_past_retention(accepted_at: Column, earlier_at: Column, key_ttl_ms: Column) -> Column:
    """Check whether two acceptances are at least the key retention apart."""
    return F.abs(accepted_at - earlier_at) >= key_ttl_ms


def is_expired(earlier: Column, all_past_retention: Column) -> Column:
    """Check whether the key of a copy had expired.

    The copy must be past the retention of every earlier copy: a third delivery seconds after the second is not caused
    by the expiry of the first one's key.
    """
    return (F.size(earlier) > 0) & all_past_retention


def is_restart(same_slot: Column, same_instance: Column, same_number: Column) -> Column:
    """Check whether a copy was written by a restarted producer; `same_number`: with the same producer id and epoch."""
    return (same_slot | same_instance) & ~same_number


def cause(foreign: Column, same_producer: Column, expired: Column, restart: Column) -> Column:
    """Return the cause of a copy after the first: the first that holds."""
    return (
        F.when(foreign, FOREIGN_WRITER)
        .when(same_producer, REWRITE)
        .when(expired, EXPIRED_KEY)
        .when(restart, PRODUCER_RESTART)
        .otherwise(DUAL_PRODUCER)
    )


def has_cause(nth: Column) -> Column:
    """Check whether the copy with this index (from 0) has a cause: every copy after the first."""
    return nth > 0


def is_same_request(fingerprints: Column, other: Column) -> Column:
    """Check whether a possible fingerprint of a copy without header (`other`) is among those of copies with header."""
    return F.array_contains(fingerprints, other)


def is_derived_copy(has_header: Column, claimed: Column, written_elsewhere: Column) -> Column:
    """Check whether a record was forwarded from another topic with its header.

    No claim names the record, and its id was written to other topics only. A record whose own content matches the
    fingerprint in its header was written to its topic, since a fingerprint covers the topic.
    """
    return has_header & ~claimed & written_elsewhere


def copies_kind(conflicting: Column) -> Column:
    """Return the kind of the finding for an id with several copies."""
    return F.when(conflicting, "conflict").otherwise("duplicate")


# --------------------------------------------------------------------------------------------- client duplicates


def is_client_timestamp(timestamp: Column, accepted_at: Column, timeouts_ms: int) -> Column:
    """Check whether the client set a record's timestamp: the service sets one within its timeouts after the claim."""
    return ~timestamp.between(accepted_at, accepted_at + timeouts_ms)


def is_near(distance_ms: Column, key_ttl_ms: Column) -> Column:
    """Check whether two acceptances are less than the key retention apart."""
    return distance_ms < key_ttl_ms


def is_retry(
    same_content: Column, same_caller: Column, same_id: Column, near: Column, same_time: Column, same_batch: Column
) -> Column:
    """Check whether two consecutive records of a record key are one request under two idempotency keys. Null is no."""
    both = [same_content, same_caller, ~same_id, near, same_time, ~F.coalesce(same_batch, F.lit(False))]
    return F.coalesce(reduce(and_, both), F.lit(False))


# ---------------------------------------------------------------------------------------------- logs and reports


def is_recreated(topic_id: str, found_id: str) -> bool:
    """Check whether a topic was recreated: its topic id is another one now."""
    return topic_id != found_id


def is_deleted_unread(log_start: int, read_until: int) -> bool:
    """Check whether records were deleted before they were read."""
    return log_start > read_until


def is_truncated(intact_until: int, read_until: int) -> bool:
    """Check whether a log was truncated below the offset up to which it was read: a leader without these records."""
    return intact_until < read_until


def intact_until(end: int, diverged: int | None, read_until: int) -> int:
    """Return the offset up to which a log still has the records that were read.

    `diverged` is the leader's answer for the leader epoch of the read (KIP-320), None where nothing diverged. The log
    may have grown past `read_until` again after a truncation.
    """
    return min(end, read_until if diverged is None else diverged)


def window_from(frozen_ms: int, window_ms: int) -> int:
    """Return the start of a report's window: the beginning of an hour, since the balance counts whole hours."""
    return (frozen_ms - window_ms) // HOUR_MS * HOUR_MS


def is_in_window(seen: Column, accepted: Column, decided: Column) -> Column:
    """Check whether a finding is in the window: its last evidence is, or the balance counts its hour, or a run decided
    it late (`late_ms`) in the window.

    Evidence and hour are both checked, since a slow clock may date the evidence before the acceptance.
    """
    return seen | F.coalesce(accepted, F.lit(False)) | F.coalesce(decided, F.lit(False))


def late_ms(known: Column, known_late_ms: Column, decided_ms: Column) -> Column:
    """Return the time at which a finding was decided, if its hour had left the window by then; else null.

    `known`: an earlier run made the finding, with `known_late_ms`. `decided_ms`: when a run last decided the verdicts
    that the hour still had open, or first read records of the hour, after the hour had left the window; null if no run
    did.
    """
    return F.when(known, known_late_ms).otherwise(decided_ms)


def is_revoked(found_run: Column, passed_run: Column) -> Column:
    """Check whether the pass over all ids replaced what an earlier or the same run found of an id in one hour."""
    return found_run <= passed_run
