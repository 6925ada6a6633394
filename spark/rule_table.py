"""The rules by which the audit judges: a table of small functions, each one decision and nothing else.

The rest of the job gathers what a rule asks for and calls it through this module, as in `rules.is_beyond(…)`: a test
that puts another function in its place has a job with that one rule broken (tests/spark/mutants.py). Times are ms since
the epoch, offsets those of Kafka.
"""

from collections.abc import Iterable
from functools import reduce
from operator import and_
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark.settings import HOUR_MS

THERE: Final = "there"
LOST: Final = "lost"
PENDING: Final = "pending"
"""What becomes of a claimed place; any other word is why it cannot be proven."""

FOREIGN_WRITER: Final = "foreign_writer"
REWRITE: Final = "rewrite"
EXPIRED_KEY: Final = "expired_key"
PRODUCER_RESTART: Final = "producer_restart"
DUAL_PRODUCER: Final = "dual_producer"

# --------------------------------------------------------------------------------------------------------- times


def over_ms(accepted_ms: Column, seen_ms: Column, settle: int, grace: int) -> Column:
    """When the fate of what was accepted then, and last named at `seen_ms`, is final.

    A retry carries the `accepted_at` of its first claim, however long ago: so what tells of it gets the grace as well.
    """
    return F.greatest(accepted_ms + settle, seen_ms + grace)


def held_over_ms(accepted_ms: Column, seen_ms: Column, settle: int) -> Column:
    """The same by a log that is decided only up to some time: what is missing may follow within the timeouts."""
    return F.greatest(accepted_ms, seen_ms) + settle


# Clocks that are kept differ by less; a retry's acceptance is never ahead.
AHEAD_MS: Final = 86_400_000


def is_ahead(ms: Column, now_ms: Column | int) -> Column:
    """Whether a time is a day or more ahead of that of Kafka, or of the run: nobody's who keeps a clock."""
    return ms > now_ms + AHEAD_MS


def is_ripe(over: Column, frozen_ms: int) -> Column:
    return over < frozen_ms


def is_undecided(over: Column, decided_until_ms: Column | int) -> Column:
    """Whether a log may still tell of it: it is not decided as far."""
    return over > decided_until_ms


# ------------------------------------------------------------------------------------------------ claimed places


def is_said_twice(entered: Column) -> Column:
    """Whether a place that a 201 names is one that the ledger names as well: one promise."""
    return entered


def promises(entered: Column, answered: Column) -> Column:
    return F.concat(entered, answered)


def is_beyond(offset: Column, end: Column) -> Column:
    return offset >= end


def is_past_end(offset: Column, later_end: Column) -> Column:
    """Whether a place lies past a log's high watermark, which was listed after the ends of ledger and journal.

    What these name was acknowledged before they named it, and so lay below that high watermark: no clock has a part in
    this.
    """
    return offset >= later_end


def is_waiting(beyond: Column, was_past_end: Column, past_end: Column) -> Column:
    """Whether a place is in the part of a log that is there and not read yet: an open transaction holds it up, or it
    was written while the run was planned.

    Below the end every record is decided. A place that was past the end once never had the record.
    """
    return beyond & ~was_past_end & ~past_end


def is_of_another_life(
    named: Column, topic_id: Column, seen_ms: Column, recreated_at_ms: Column, first_record_ms: Column, ripe: Column
) -> Column:
    """Whether a place was promised in a topic that has been deleted and made anew since.

    Told by the topic's id where the ledger names one. Else by time: before the topic was first seen as it is now, or
    before the log's first record. What is not ripe may still come: its record may be the first one, or the service may
    not have heard of the topic's new id.
    """
    by_time = (seen_ms < recreated_at_ms) | (ripe & (seen_ms < first_record_ms))
    return F.when(named.isNotNull(), ripe & (named != topic_id)).otherwise(by_time)


def is_below(offset: Column, first: Column) -> Column:
    return offset < first


def is_in_gap(offset: Column, first: Column, last: Column) -> Column:
    return (offset >= first) & (offset < last)


def is_compacted(compacted: Column, was_past_end: Column) -> Column:
    """Whether compaction may have taken the record: none that was never there."""
    return compacted & ~was_past_end


def of_no_log(ripe: Column) -> Column:
    """What becomes of a place in a partition that is not there."""
    return F.when(ripe, "topic_gone").otherwise(PENDING)


def fate(
    there: Column,
    no_log: Column,
    anew: Column,
    below: Column,
    gap: Column,
    waiting: Column,
    ripe: Column,
    taken: Column,
) -> Column:
    """What becomes of a claimed place: the first that holds. `no_log` and `gap` are words, or null."""
    return (
        F.when(there, THERE)
        .when(no_log.isNotNull(), no_log)
        .when(anew, "recreated")
        .when(below, "below_start")
        .when(gap.isNotNull(), gap)
        .when(waiting | ~ripe, PENDING)
        .when(taken, "compacted")
        .otherwise(LOST)
    )


def gap_count(counted_with_log: Column) -> Column:
    """How many records a gap in one id's evidence stands for: none where the log's own gap counts them."""
    return F.when(counted_with_log, 0).otherwise(1).cast("bigint")


# ------------------------------------------------------------------------------------------------------ phantoms

HEARD: Final = ("answered_201", "answered_202", "answered_503", "answered_504", "answered_other")


def is_unheard(entries: Column, named: Column, idempotent: Column, answered: Column) -> Column:
    """Whether nothing tells of a copy with our header: no ledger entry, no 201 that names its place; for what is
    `idempotent`, which has no ledger: no answer at all."""
    return (entries == 0) & ~named & ~(idempotent & answered)


def is_unread(read_run: Column, caught_up_run: Column) -> Column:
    """Whether the ledger of a copy's slot is not read as far as it went when the copy was read.

    A copy that can be read is committed, and its entry with it: the entry lies in that part of the ledger, or nowhere.
    """
    return read_run > caught_up_run


def waits_longer(decided_until_ms: int, frozen_ms: int) -> bool:
    """Whether what would settle a 202 or 504 may come long after it: ledger or journal is held up."""
    return decided_until_ms < frozen_ms


def is_before_evidence(complete_since_ms: Column, accepted_at: Column, timestamp: Column) -> Column:
    """Whether the ledger is not known as far back as a copy's acceptance; its timestamp may be the client's own.

    Without a ledger for its slot it is another namespace's, or gone.
    """
    return complete_since_ms.isNull() | (complete_since_ms > accepted_at)


def known_since(oldest_ms: int, of_topic_ms: Iterable[int], *, whole: bool) -> int:
    """Since when all records of a log are known: of its oldest one, and if it has all that it ever had (`whole`), of
    the oldest in any log of its topic, as it was made then at the latest. What is older was another topic's."""
    return min(of_topic_ms) if whole else oldest_ms


def is_within(offset: Column, first: Column, end: Column) -> Column:
    """Whether a guarantee that holds from `first` to before `end` is an offset's."""
    return (offset >= first) & (offset < end)


# ---------------------------------------------------------------------------------------- acceptance and balance


def takes_back(freed_ms: Column, in_doubt_ms: Column) -> Column:
    """Whether the last 503 came after the last 202 or 504: one before it was the answer to an earlier try."""
    return F.coalesce(freed_ms >= in_doubt_ms, F.lit(False))


def is_accepted(
    promised: Column, answered_202: Column, answered_504: Column, taken_back: Column, elsewhere: Column, ours: Column
) -> Column:
    """In the ledger or answered 201; or 202 or 504, unless that was taken back, or the id is accepted `elsewhere`, in
    another hour, and no record of ours came of it here."""
    return (promised > 0) | ((answered_202 + answered_504 > 0) & ~((taken_back | elsewhere) & (ours == 0)))


def tells(has_header: Column, entries: Column, answered_201: Column) -> Column:
    """Whether a row tells what became of a 202 or 504 of its id: a stranger's record does not."""
    return F.coalesce(has_header, F.lit(False)) | (entries + answered_201 > 0)


def decided_by(ledger_ms: int, answers_ms: int) -> int:
    """How far both are decided that could settle a 202 or 504."""
    return min(ledger_ms, answers_ms)


def category(
    lost: Column,
    conflicting: Column,
    copies: Column,
    pending: Column,
    unproven: Column,
    ours: Column,
    answered_201: Column,
    undecided: Column,
) -> Column:
    """Where an accepted id stands: what is proven comes first, and the worse before the better; pending before
    unprovable, since it may still prove lost. A 202 or 504 is settled by a record of ours, not by a stranger's."""
    return (
        F.when(lost, LOST)
        .when(conflicting, "conflicted")
        .when(copies > 1, "duplicated")
        .when(pending, PENDING)
        .when(unproven, "unprovable")
        .when((copies == 1) & (ours > 0), "delivered_once")
        .when(answered_201 > 0, "unprovable")
        .when(undecided, PENDING)
        .otherwise("stuck")
    )


def in_doubt_cause(answered_202: Column, answered_504: Column) -> Column:
    return F.when(answered_504 > 0, "504").otherwise("202")


def is_its_record(has_header: Column, same_id: Column, bare: Column, same_content: Column, same_key: Column) -> Column:
    """Whether the record at a place is the one that was read there: in a log that was made anew, or cut off, it may be
    another. With our header its id tells; without, its content and its key, of which the row has its id."""
    return F.when(has_header, same_id).otherwise(bare & same_content & same_key)


# -------------------------------------------------------------------------------------------------------- copies


def rank(entered: Column) -> Column:
    """Copies in the ledger come before the others."""
    return F.when(entered, 0).otherwise(1)


def order() -> tuple[str, ...]:
    """By what copies of one rank are ordered."""
    return ("timestamp", "topic", "partition", "offset")


def producer() -> tuple[str, ...]:
    """What tells one producer from another."""
    return ("slot", "pid", "epoch", "instance")


def is_foreign(has_header: Column, same_producer: Column, late: Column) -> Column:
    """Written past the service: without our header, or with one that was copied."""
    return ~has_header | (same_producer & (late == 1))


def is_apart(accepted_at: Column, earlier_at: Column, key_ttl_ms: int) -> Column:
    return F.abs(accepted_at - earlier_at) >= key_ttl_ms


def is_expired(earlier: Column, all_apart: Column) -> Column:
    """By the nearest of the earlier acceptances: what follows a second delivery by seconds is not the first one's."""
    return (F.size(earlier) > 0) & all_apart


def is_restart(same_slot: Column, same_instance: Column, same_number: Column) -> Column:
    return (same_slot | same_instance) & ~same_number


def cause(foreign: Column, same_producer: Column, expired: Column, restart: Column) -> Column:
    """The cause of a copy after the first: the first that holds."""
    return (
        F.when(foreign, FOREIGN_WRITER)
        .when(same_producer, REWRITE)
        .when(expired, EXPIRED_KEY)
        .when(restart, PRODUCER_RESTART)
        .otherwise(DUAL_PRODUCER)
    )


def has_cause(nth: Column) -> Column:
    return nth > 0


def is_same_request(known: Column, other: Column) -> Column:
    """Whether a fingerprint that a bare copy may have is one that a copy with our header has."""
    return F.array_contains(known, other)


def is_believed(claimed: Column) -> Column:
    """Whether the header's fingerprint counts, not the record's own: the ledger or a 201 knows this very record."""
    return claimed


def is_derived(has_header: Column, claimed: Column, elsewhere: Column) -> Column:
    """Whether a record is another topic's, forwarded with its header: known to nobody, and of an id that was written to
    other topics only. What its own content bears out was written to its topic: a fingerprint covers that."""
    return has_header & ~claimed & elsewhere


def copies_kind(conflicting: Column) -> Column:
    return F.when(conflicting, "conflict").otherwise("duplicate")


# --------------------------------------------------------------------------------------------- client duplicates


def is_own_time(timestamp: Column, accepted_at: Column, timeouts_ms: int) -> Column:
    """Whether a record's timestamp is the client's own: the service makes one after the claim, within its timeouts."""
    return ~timestamp.between(accepted_at, accepted_at + timeouts_ms)


def is_near(distance_ms: Column, key_ttl_ms: int) -> Column:
    return distance_ms < key_ttl_ms


def is_retry(
    same_content: Column, same_caller: Column, same_id: Column, near: Column, same_time: Column, same_batch: Column
) -> Column:
    """Whether two records of a record key, with none between them, are one request under two keys. Null is no."""
    both = [same_content, same_caller, ~same_id, near, same_time, ~F.coalesce(same_batch, F.lit(False))]
    return F.coalesce(reduce(and_, both), F.lit(False))


# ---------------------------------------------------------------------------------------------- logs and reports


def is_made_anew(topic_id: str, now: str) -> bool:
    return topic_id != now


def is_eaten(log_start: int, read_to: int) -> bool:
    """Whether records went away before they were read."""
    return log_start > read_to


def is_cut_off(agrees_to: int, read_to: int) -> bool:
    """Whether a log is not any more what was read of it, from some offset on: a leader without these records."""
    return agrees_to < read_to


def agrees_to(end: int, diverged: int | None, read_to: int) -> int:
    """Up to where a log is what was read of it: its leader's word on that epoch, or else its end; it may have grown
    again beyond what was read."""
    return min(end, read_to if diverged is None else diverged)


def window_from(frozen_ms: int, window_ms: int) -> int:
    """From when on a report looks: the beginning of an hour, since the balance is counted in whole hours."""
    return (frozen_ms - window_ms) // HOUR_MS * HOUR_MS


def is_in_window(seen: Column, accepted: Column) -> Column:
    """Whether a finding stands in the window: its last evidence came in it, or the balance counts its hour.

    A clock that is behind may give evidence an earlier time than the acceptance.
    """
    return seen | F.coalesce(accepted, F.lit(False))


def is_revoked(found_run: Column, passed_run: Column) -> Column:
    """Whether the pass over all ids has a newer word on an id than what was found of it in one hour."""
    return found_run <= passed_run
