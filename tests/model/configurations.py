"""The configurations of the search: the protocol with few faults each, and without each rule.

The faults of a configuration are upper bounds for one run: each may happen at any step, or not.
"""

from typing import Final, NamedTuple

from tests.model.rules import Configuration, Faults

# Searched completely by the tests.
DEFAULT: Final[dict[str, Configuration]] = {
    "a crash and a commit in doubt": Configuration(Faults(kill=1, lose_reply=1, lose_send=1)),
    "a crash and a script without an answer": Configuration(Faults(kill=1, lose_script=1)),
    "a crash and failed marks": Configuration(Faults(kill=1, fail_mark=1, other=1, late_marker=1)),
    "a failed send, whose claim is let go": Configuration(Faults(lose_send=1, kill=1, deadline=1, post_again=1)),
    "a failed send and a flush": Configuration(Faults(lose_send=1, flush=1, post_again=1)),
    "a pause and a commit in doubt": Configuration(Faults(expire=1, lose_reply=1, deadline=1, post_again=1)),
    "a pause and a script without an answer": Configuration(Faults(expire=1, lose_script=1, post_again=1)),
    "a fence from outside": Configuration(Faults(fence=1, lose_reply=1, late_marker=1, deadline=1, post_again=1)),
    "an expired transactional id": Configuration(Faults(forget_id=1, kill=1)),
    "a flush": Configuration(Faults(flush=1, lose_reply=1, post_again=1)),
    "a flush and a script without an answer": Configuration(Faults(flush=1, lose_script=1, post_again=1)),
    "a flush and a pause": Configuration(Faults(flush=1, expire=1)),
    "two flushes": Configuration(Faults(flush=2, post_again=1)),
    "an older copy of the store": Configuration(Faults(rewind=1, replicate=1, lose_reply=1, post_again=1)),
    "an older copy of the store and failed marks": Configuration(
        Faults(rewind=1, replicate=1, fail_mark=1, other=1, post_again=1)
    ),
    "a failover to a lagging replica": Configuration(Faults(failover=1, replicate=1, lose_reply=1, post_again=1)),
    "a failover and a flush": Configuration(Faults(failover=1, flush=1, post_again=1)),
    "a split": Configuration(Faults(failover=1, replicate=1, fail_mark=1, post_again=1), split=True),
    "a split and a crash": Configuration(Faults(failover=1, kill=1, post_again=1), split=True, take_over=False),
    "a split, and both stores are recovered": Configuration(
        Faults(failover=1, misjudge=1, post_again=1), split=True, take_over=False
    ),
    "a pair, a crash and a fence from outside": Configuration(Faults(kill=1, lose_send=1, fence=1), pair=True),
    "a pair and a split": Configuration(Faults(failover=1, lose_send=1, post_again=1), pair=True, split=True),
    "offsets, a crash and a failed send": Configuration(Faults(kill=1, lose_send=1), offsets=True),
    "offsets of a member that is replaced, and a crash": Configuration(
        Faults(rebalance=1, kill=1, post_again=1), offsets=True
    ),
    "offsets of a member that is replaced, and a commit in doubt": Configuration(
        Faults(rebalance=1, lose_reply=1, lose_script=1), offsets=True
    ),
    "markers of offsets that never come, and a commit in doubt": Configuration(
        Faults(skip_marker=1, lose_send=1, lose_reply=1), offsets=True
    ),
    "markers of refused offsets that never come": Configuration(
        Faults(skip_marker=1, rebalance=1, post_again=1), offsets=True
    ),
    "a marker that never comes, and a crash": Configuration(Faults(skip_marker=1, kill=1)),
    "a marker that never comes, and a failed send": Configuration(
        Faults(skip_marker=1, lose_send=1, deadline=1, post_again=1)
    ),
    "a marker that never comes, and a fence from outside": Configuration(
        Faults(skip_marker=1, fence=1, lose_reply=1, post_again=1)
    ),
    "a marker that never comes, and another key": Configuration(
        Faults(skip_marker=1, other=1, lose_send=1, post_again=1)
    ),
    "a marker that never comes, and a leader that moves": Configuration(
        Faults(skip_marker=1, move=1, other=2, late_marker=1, post_again=1)
    ),
    "a marker that never comes, and a flush": Configuration(Faults(skip_marker=1, flush=1, post_again=1)),
    "a marker that never comes, and a pause": Configuration(Faults(skip_marker=1, expire=1, lose_reply=1)),
    "a marker that never comes, and a split": Configuration(
        Faults(skip_marker=1, failover=1, post_again=1), split=True
    ),
    "markers of a pair that never come, and a commit in doubt": Configuration(
        Faults(skip_marker=1, lose_send=1, lose_reply=1), pair=True
    ),
    "markers of a pair that never come, twice, and a crash": Configuration(Faults(skip_marker=2, kill=1), pair=True),
    "version 2, a crash and a commit in doubt": Configuration(Faults(kill=1, lose_reply=1), bumps=True),
    "version 2, a fence from outside": Configuration(
        Faults(fence=1, lose_reply=1, late_marker=1, post_again=1), bumps=True
    ),
    "version 2, abortable transactions and failed sends": Configuration(
        Faults(abortable=1, lose_send=1, post_again=1), bumps=True
    ),
    "version 2, a marker that never comes, and an abortable transaction": Configuration(
        Faults(skip_marker=1, abortable=1, lose_send=1, post_again=1), bumps=True
    ),
    "version 2, offsets of a member that is replaced, and a marker that never comes": Configuration(
        Faults(skip_marker=1, rebalance=1, post_again=1), offsets=True, bumps=True
    ),
    "a producer id is replaced, a marker that never comes, and a crash": Configuration(
        Faults(overflow=1, skip_marker=1, kill=1)
    ),
    "version 2, a producer id is replaced, a marker that never comes, and a commit in doubt": Configuration(
        Faults(overflow=1, skip_marker=1, lose_reply=1, post_again=1), bumps=True
    ),
    "version 2, a producer id is replaced, and a pause": Configuration(
        Faults(overflow=1, expire=1, post_again=1), bumps=True
    ),
    "version 2, a producer id is replaced, a marker that never comes, and a flush": Configuration(
        Faults(overflow=1, skip_marker=1, flush=1), bumps=True
    ),
    "a late send and a crash": Configuration(Faults(late_send=1, kill=1)),
    "version 2, a late send and a commit in doubt": Configuration(
        Faults(late_send=1, lose_reply=1, post_again=1), bumps=True
    ),
    "version 2 is finalized amid a run with a commit in doubt": Configuration(
        Faults(finalize=1, lose_reply=1, lose_send=1, post_again=1)
    ),
}

# Searched completely by `python -m tests.model --deep`.
DEEP: Final[dict[str, Configuration]] = {
    "two crashes and a commit in doubt": Configuration(Faults(kill=2, lose_reply=1)),
    "a crash, a pause and a commit in doubt": Configuration(Faults(kill=1, expire=1, lose_reply=1), watchful=True),
    "a crash, scripts without an answer and failed marks": Configuration(
        Faults(kill=1, lose_script=2, fail_mark=1, other=1)
    ),
    "two flushes, a pause and a commit in doubt": Configuration(
        Faults(flush=2, expire=1, lose_reply=1, post_again=1), take_over=False
    ),
    "a flush, a crash and a script without an answer": Configuration(
        Faults(flush=1, kill=1, lose_script=1, post_again=1)
    ),
    "a split, a crash and a commit in doubt": Configuration(
        Faults(failover=1, replicate=1, kill=1, lose_reply=1, post_again=1), split=True, take_over=False
    ),
    "a split, a flush, and both stores are recovered": Configuration(
        Faults(failover=1, misjudge=1, flush=1, post_again=1), split=True, take_over=False
    ),
    "a marker that never comes, a crash and a commit in doubt": Configuration(
        Faults(skip_marker=1, kill=1, lose_reply=1)
    ),
    "a marker that never comes, a crash and a failed send": Configuration(
        Faults(skip_marker=1, kill=1, lose_send=1, post_again=1)
    ),
    "a marker that never comes, a crash and failed marks": Configuration(
        Faults(skip_marker=1, kill=1, fail_mark=1, other=1)
    ),
    "a marker that never comes, a crash and an expired transactional id": Configuration(
        Faults(skip_marker=1, kill=1, forget_id=1)
    ),
    "markers of a pair that never come, another key, and a fence from outside": Configuration(
        Faults(skip_marker=1, other=1, lose_send=1, fence=1), pair=True
    ),
    "version 2 is finalized amid a run with a crash and a marker that never comes": Configuration(
        Faults(finalize=1, skip_marker=1, kill=1, abortable=1)
    ),
    "version 2, two abortable transactions, failed sends and a deadline": Configuration(
        Faults(abortable=2, lose_send=1, deadline=1, post_again=1), bumps=True
    ),
    "version 2, a crash, a commit in doubt and a failed send": Configuration(
        Faults(kill=1, lose_reply=1, lose_send=1), bumps=True
    ),
    "version 2, a producer id is replaced, a pause and a failed send": Configuration(
        Faults(overflow=1, expire=1, lose_send=1, post_again=1), bumps=True
    ),
    "version 2, an abortable transaction and a flush": Configuration(
        Faults(abortable=1, flush=1, post_again=1), bumps=True
    ),
    "version 2, a marker that never comes, and another key": Configuration(
        Faults(skip_marker=1, other=1, lose_send=1, post_again=1), bumps=True
    ),
    "version 2, markers of a pair that never come, and a commit in doubt": Configuration(
        Faults(skip_marker=1, lose_send=1, lose_reply=1), pair=True, bumps=True
    ),
    "version 2, a split, a crash and an abortable transaction": Configuration(
        Faults(failover=1, replicate=1, kill=1, abortable=1), split=True, take_over=False, bumps=True
    ),
    "a pair, two crashes and a commit in doubt": Configuration(
        Faults(kill=2, lose_send=1, lose_reply=1, post_again=1), pair=True, posters=(0,)
    ),
}


# A slot moves to an idle process, and the process that lost it then fences it, which leaves a claim behind: the holder
# counts as READY, so that no process recovers the slot until a claim of the holder is answered FENCED.
IDLE_HOLDER: Final = Configuration(Faults(kill=1, expire=1, lose_reply=1), posters=(0,))


class Mutant(NamedTuple):
    """A rule left out: the configuration that shows it, the violation, and the number of steps."""

    rule: str
    configuration: Configuration
    violation: str
    steps: int


TWICE: Final = "an event is in the log twice"
MISSING: Final = "an acknowledged event is missing"
TORN: Final = "an atomic pair is torn"
TORN_OFFSETS: Final = "offsets are torn from their event"
STUCK: Final = "no way to an answer"
STALLED: Final = "an LSO stands still"
UNTRUE: Final = "503 was said of an event that is committed"

_FLUSH: Final = Configuration(Faults(flush=1, post_again=1))
_SPLIT: Final = Configuration(Faults(failover=1, post_again=1), split=True, take_over=False)

MUTANTS: Final[dict[str, Mutant]] = {
    "a failed send is committed over": Mutant("sends_awaited", Configuration(Faults(lose_send=1)), MISSING, 6),
    "half a pair is committed": Mutant("sends_awaited", Configuration(Faults(lose_send=1), pair=True), TORN, 5),
    "a transaction is aborted in the books only": Mutant(
        "producer_replaced", Configuration(Faults(lose_send=1)), TWICE, 11
    ),
    "a late EndTxn meets the next transaction": Mutant(
        "producer_replaced", Configuration(Faults(lose_reply=1, kill=1)), TWICE, 23
    ),
    "control is not read": Mutant("control_checked", _SPLIT, TWICE, 31),
    "control is read before the fence": Mutant(
        "checked_after_fence", _SPLIT._replace(faults=_SPLIT.faults._replace(lose_send=1)), TWICE, 40
    ),
    "control is read from a deposed leader": Mutant(
        "control_barrier", _SPLIT._replace(faults=_SPLIT.faults._replace(depose=1)), TWICE, 32
    ),
    "a slot recovery believes the LSO of a deposed leader": Mutant(
        "own_record_read", Configuration(Faults(kill=1, depose=1, post_again=1)), TWICE, 17
    ),
    "a store recovery believes the LSO of a deposed leader": Mutant(
        "own_record_read", _FLUSH._replace(faults=_FLUSH.faults._replace(depose=1)), TWICE, 26
    ),
    "a slot recovery does not replay": Mutant(
        "ledger_replayed", Configuration(Faults(kill=1, post_again=1)), TWICE, 16
    ),
    "a store recovery does not replay": Mutant("store_replayed", _FLUSH, TWICE, 25),
    "`applied` moves over a gap": Mutant(
        "applied_gapless", Configuration(Faults(fail_mark=1, other=1, kill=1, post_again=1)), TWICE, 18
    ),
    "the generation is not checked": Mutant("generation_checked", _FLUSH, TWICE, 16),
    "the store is not identified": Mutant(
        "store_identified", Configuration(Faults(failover=1, post_again=1)), TWICE, 11
    ),
    "an older copy of the store is not seen": Mutant(
        "older_copy_noticed", Configuration(Faults(rewind=1, post_again=1)), TWICE, 11
    ),
    "a store recovery fences no slot": Mutant("slots_fenced", _FLUSH, TWICE, 25),
    "a flush during a store recovery is not seen": Mutant(
        "nonce_demanded", Configuration(Faults(flush=2, post_again=1)), TWICE, 26
    ),
    "a living claim is taken over": Mutant("freed_respected", Configuration(Faults(post_again=1)), TWICE, 10),
    "a claim of a past term is sent": Mutant("term_kept", Configuration(Faults(expire=1, post_again=1)), TWICE, 24),
    "a late release gives up another's claim": Mutant(
        "claim_released", Configuration(Faults(lose_script=1, deadline=1, post_again=1)), TWICE, 19
    ),
    "a claim without an answer is forgotten": Mutant(
        "silence_ends_term", Configuration(Faults(lose_script=1)), STUCK, 3
    ),
    "a release without an answer is forgotten": Mutant(
        "silence_ends_term", Configuration(Faults(lose_script=1, deadline=1, post_again=1)), TWICE, 25
    ),
    "terms are the epochs of producers": Mutant("terms_are_offsets", Configuration(Faults(forget_id=1)), STUCK, 2),
    "what may be committed is let go": Mutant(
        "doubt_claimed", Configuration(Faults(lose_reply=1, post_again=1)), TWICE, 11
    ),
    "a doubt is answered 503": Mutant("doubt_kept", Configuration(Faults(lose_reply=1, deadline=1)), UNTRUE, 6),
    "the next commit publishes what was aborted": Mutant(
        "hanging_settled", Configuration(Faults(skip_marker=1, lose_send=1, post_again=1)), TWICE, 11
    ),
    "a begin record publishes a ledger record whose events were aborted": Mutant(
        "hanging_settled", Configuration(Faults(skip_marker=1, lose_reply=1)), MISSING, 10
    ),
    "nobody ends what hangs": Mutant("hanging_settled", Configuration(Faults(skip_marker=1)), STALLED, 5),
    "what hangs is ended against its markers": Mutant(
        "evidence_read", Configuration(Faults(skip_marker=1, kill=1)), MISSING, 13
    ),
    "what hangs is ended without its ledger record": Mutant(
        "ledger_read_back", Configuration(Faults(skip_marker=1, other=1), pair=True), MISSING, 10
    ),
    "a store recovery cannot read the ledger": Mutant(
        "store_settles", Configuration(Faults(skip_marker=1, flush=1)), STALLED, 6
    ),
    "a term writes where its last one hangs": Mutant(
        "partitions_checked", Configuration(Faults(skip_marker=1, fence=1, post_again=1)), TWICE, 13
    ),
    "an abort takes away what an earlier transaction has committed": Mutant(
        "partitions_checked", Configuration(Faults(skip_marker=1, other=1, lose_send=1)), MISSING, 8
    ),
    "a term looks once": Mutant(
        "check_renewed", Configuration(Faults(skip_marker=1, other=1, lose_send=1)), MISSING, 8
    ),
    "a transaction is given up because a leader has moved": Mutant(
        "leader_followed", Configuration(Faults(skip_marker=1, move=1, other=1)), MISSING, 8
    ),
    "offsets are committed by themselves": Mutant(
        "offsets_enclosed", Configuration(Faults(), offsets=True), TORN_OFFSETS, 3
    ),
    "a batch goes on without its offsets": Mutant(
        "refusal_aborts", Configuration(Faults(rebalance=1), offsets=True), TORN_OFFSETS, 6
    ),
    "offsets hang, and no ledger record names them": Mutant(
        "offsets_named", Configuration(Faults(skip_marker=1), offsets=True), MISSING, 10
    ),
    "what an abort left open is published by the next commit": Mutant(
        "abort_rechecked", Configuration(Faults(skip_marker=1, abortable=1), bumps=True), TWICE, 9
    ),
    "a failed send of version 2 is committed over": Mutant(
        "sends_awaited", Configuration(Faults(lose_send=1), bumps=True), MISSING, 6
    ),
    "a transaction of version 2 is aborted in the books only": Mutant(
        "producer_replaced", Configuration(Faults(lose_send=1), bumps=True), TWICE, 11
    ),
    "the next commit of version 2 publishes what was aborted": Mutant(
        "hanging_settled", Configuration(Faults(skip_marker=1, lose_send=1, post_again=1), bumps=True), TWICE, 11
    ),
    "nobody ends what hangs under a former producer id": Mutant(
        "former_settled", Configuration(Faults(overflow=1, skip_marker=1), bumps=True), STALLED, 5
    ),
    "what hangs under a former producer id is ended against its markers": Mutant(
        "former_evidence", Configuration(Faults(overflow=1, skip_marker=1, kill=1), bumps=True), MISSING, 14
    ),
    "a fenced session aborts what a later owner writes under another producer id": Mutant(
        "former_confirmed", Configuration(Faults(overflow=1, expire=1, kill=1), bumps=True, posters=(0,)), MISSING, 17
    ),
    "a late EndTxn of a former epoch ends the next transaction": Mutant(
        "former_refused", Configuration(Faults(lose_reply=1), bumps=True), TWICE, 21
    ),
    "a late send of a former epoch is published by the next commit": Mutant(
        "former_refused", Configuration(Faults(late_send=1), bumps=True), TWICE, 12
    ),
    "nobody watches an idle slot": Mutant("stall_watched", Configuration(Faults(skip_marker=1)), STALLED, 5),
}

# Rules without which nothing goes wrong within these bounds, because other rules cover them, with the reasons.
REDUNDANT: Final[dict[str, tuple[str, Configuration]]] = {
    # `freed` of the own slot differs from the own term only after another process has fenced this slot, or after a
    # flush, which the generation shows. A claim of the ended term is dead from the start, and its producer cannot
    # commit: the check only saves a request to Kafka, which would be answered with the fence.
    "term_current": ("a claim in a passed term", Configuration(Faults(expire=1, lose_script=1, post_again=1))),
    # A superseded recovery could only set a generation that control no longer names: neither the check of a slot
    # recovery nor a process adopts it. Stopping saves the fencing and the replay.
    "superseded_stops": ("a superseded store recovery", _SPLIT._replace(faults=Faults(failover=1, misjudge=1))),
}
