"""The rules of the protocol that can be taken out one by one, the faults that are counted, and configurations."""

from typing import Final, NamedTuple

from tests.model.world import NONE, READY, SLOTS, Part, Process, Store, View, World


class Rules(NamedTuple):
    """Each field is one rule; False takes it out."""

    sends_awaited: bool = True  # no commit is asked for before every send is answered
    producer_replaced: bool = True  # after any doubt: InitProducerId before the next transaction
    control_checked: bool = True  # a slot recovery reads which store control names
    checked_after_fence: bool = True  # and it reads that after its fence, not before
    control_barrier: bool = True  # control is believed only through a record of one's own
    own_record_read: bool = True  # a recovery reads the ledger through a record of its own, not up to an answered LSO
    ledger_replayed: bool = True  # a slot recovery marks what the ledger has before it frees
    store_replayed: bool = True  # so does a store recovery
    applied_gapless: bool = True  # `applied` moves only from exactly the record before
    generation_checked: bool = True  # scripts demand the caller's generation
    store_identified: bool = True  # scripts demand that the server is the store that the generation names
    slots_fenced: bool = True  # a store recovery fences every slot
    nonce_demanded: bool = True  # each script of a store recovery demands its nonce
    freed_respected: bool = True  # a claim is dead only when `freed` of its slot has passed its term
    term_kept: bool = True  # an event is sent only in the term in which it was claimed
    term_current: bool = True  # the claim script demands that `freed` of the slot is the caller's term
    silence_ends_term: bool = True  # a claim or a release without an answer ends the term
    doubt_kept: bool = True  # what may have been sent is never answered 503
    doubt_claimed: bool = True  # a claim is given up before its slot's recovery only if no commit was asked for
    claim_released: bool = True  # a release gives up only a claim of its own slot and term
    terms_are_offsets: bool = True  # terms are ledger offsets, not the epochs of producers
    older_copy_noticed: bool = True  # scripts demand that as many calls have claimed something as the caller knows of
    superseded_stops: bool = True  # a store recovery stops where a later generation stands
    hanging_settled: bool = True  # a slot recovery ends what hangs, before its begin record's marker does
    evidence_read: bool = True  # and as markers in the transaction's other partitions say
    ledger_read_back: bool = True  # its ledger record is looked for before `applied` too
    store_settles: bool = True  # a store recovery ends what hangs in the ledger
    partitions_checked: bool = True  # a term writes to a partition only where nothing of its producer id hangs
    check_renewed: bool = True  # and looks again where a broker was away since
    stall_watched: bool = True  # a slot is recovered where an LSO stands still


class Faults(NamedTuple):
    """How often each may happen in one run."""

    kill: int = 0  # a process dies, and is started again
    expire: int = 0  # a process pauses for longer than its lease; it goes on as if nothing had been
    lose_reply: int = 0  # a commit's answer, or the whole request for a time: then it arrives late
    lose_send: int = 0  # the last event is not written, or refused; or all are written and nobody says so
    late_marker: int = 0  # markers of a decided commit take their time
    fail_mark: int = 0  # the store refuses a mark
    lose_script: int = 0  # a script has no answer: it runs never, late, or twice
    deadline: int = 0  # a request's time is over
    post_again: int = 0  # the client sends the same key while it is open, or after a 201
    other: int = 0  # a transaction of another key in the same slot
    flush: int = 0
    failover: int = 0
    replicate: int = 0  # the replica catches up (before that it is as at the start)
    depose: int = 0  # deposed leaders of control and ledger go on answering
    fence: int = 0  # the broker's transaction timeout, a late InitProducerId, or a thief of the transactional id
    forget_id: int = 0  # a transactional id expires: its next producer begins at epoch 0
    skip_marker: int = 0  # a broker dies amid an EndTxn: markers of some of the partitions never come
    rewind: int = 0  # the store becomes, in the same life, what the replica holds; after a heartbeat of every process
    misjudge: int = 0  # a store recovery begins although another store is in use


FAULT: Final = Faults(*range(len(Faults._fields)))


class Configuration(NamedTuple):
    """What one search allows."""

    faults: Faults
    pair: bool = False  # an atomic pair instead of a single event
    take_over: bool = True  # a process may take the slot that the other began with
    split: bool = False  # a failover may leave one process at the old store
    # A heartbeat sees that `freed` has passed a held slot's term. The service's does; it matters to idle holders only,
    # and is left out of the searches that have none.
    watchful: bool = False
    posters: tuple[int, ...] = (0, 1)  # the processes that the client knows


def start(configuration: Configuration) -> World:
    """Both processes are settled in generation 0, each with one slot READY in term 0."""
    counted = 0 if configuration.faults.rewind else NONE
    store = Store(0, 0, NONE, (0, 0), (0, 0), (0, 0, 0) if configuration.pair else (0,), counted)
    ready = View(READY, 0, 0, 0, 0, 0)
    return World(
        processes=tuple(
            Process(0, 0, 0, None, tuple(ready if s == p else View() for s in SLOTS), None) for p in (0, 1)
        ),
        parts=tuple(Part(0, 0, None, (0,)) for _ in SLOTS),
        copies=(0, 0) if configuration.pair else (0,),
        control=(0,),
        deposed=(),
        stores=(store,),
        replica=store if configuration.faults.failover or configuration.faults.rewind else None,
        primary=0,
        holders=(0, 1),
        late=(),
        acknowledged=False,
        wrong="",
        left=tuple(configuration.faults),
    )


def spend(world: World, fault: int) -> World:
    """The world with one fault of that kind less to come."""
    left = world.left
    return world._replace(left=(*left[:fault], left[fault] - 1, *left[fault + 1 :]))
