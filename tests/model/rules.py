"""The rules of the protocol that can be left out, the counted faults, and configurations."""

from typing import Final, NamedTuple

from tests.model.world import NONE, READY, SLOTS, Part, Process, Store, View, World


class Rules(NamedTuple):
    """Each field is one rule; False leaves it out."""

    sends_awaited: bool = True  # no commit is requested before every send is answered
    producer_replaced: bool = True  # after any doubt: InitProducerId before the next transaction
    control_checked: bool = True  # a slot recovery reads which store control names
    checked_after_fence: bool = True  # and reads it after its fence, not before
    control_barrier: bool = True  # control is trusted only through a record that the reader has appended
    own_record_read: bool = True  # a recovery reads the ledger through its own record, not up to the LSO of an answer
    ledger_replayed: bool = True  # a slot recovery marks the ledger's records before it frees
    store_replayed: bool = True  # so does a store recovery
    applied_gapless: bool = True  # `applied` moves only from exactly the previous record
    generation_checked: bool = True  # scripts demand the caller's generation
    store_identified: bool = True  # scripts demand that the server is the store that the generation names
    slots_fenced: bool = True  # a store recovery fences every slot
    nonce_demanded: bool = True  # each script of a store recovery demands its nonce
    freed_respected: bool = True  # a claim is dead only when `freed` of its slot is past its term
    term_kept: bool = True  # an event is sent only in the term in which it was claimed
    term_current: bool = True  # the claim script demands that `freed` of the slot is the caller's term
    silence_ends_term: bool = True  # a claim or a release without an answer ends the term
    doubt_kept: bool = True  # an event that may have been sent is never answered 503
    doubt_claimed: bool = True  # a claim is released before its slot's recovery only if no commit was requested
    claim_released: bool = True  # a release removes only a claim of its own slot and term
    terms_are_offsets: bool = True  # terms are ledger offsets, not the epochs of producers
    older_copy_noticed: bool = True  # scripts demand the number of claiming calls that the caller knows of
    superseded_stops: bool = True  # a store recovery stops if there is a later generation
    hanging_settled: bool = True  # a slot recovery ends hanging transactions before its begin record's marker does
    evidence_read: bool = True  # and ends them as markers in their other partitions say
    ledger_read_back: bool = True  # their ledger record is looked for before `applied` too
    store_settles: bool = True  # a store recovery ends hanging transactions in the ledger
    partitions_checked: bool = True  # a term writes only to partitions without a hanging transaction of its producer id
    check_renewed: bool = True  # and checks again if a broker was unreachable since
    leader_followed: bool = True  # a transaction goes on when the leader of one of its partitions has moved
    stall_watched: bool = True  # a slot is recovered if an LSO does not move
    offsets_enclosed: bool = True  # the offsets of a group are committed by the transaction of their event
    refusal_aborts: bool = True  # a transaction whose offsets are refused is aborted
    offsets_named: bool = True  # the ledger record names the partition with the offsets
    abort_rechecked: bool = True  # a term that goes on after an abort checks for hanging transactions again
    former_settled: bool = True  # a slot recovery ends what hangs under producer ids that the slot had before
    former_evidence: bool = True  # and ends them as markers of the same id in their other partitions say
    former_confirmed: bool = True  # and first ends an empty transaction, which a later owner's fence would refuse
    former_refused: bool = True  # brokers refuse an EndTxn or a Produce of a former epoch or producer id


class Faults(NamedTuple):
    """How often each fault may happen in one run."""

    kill: int = 0  # a process is killed and started again
    expire: int = 0  # a process pauses for longer than its lease, and goes on without noticing
    lose_reply: int = 0  # a commit's reply; or the whole request for a time, which then arrives late
    lose_send: int = 0  # the last event is not written, or refused; or all are written without a reply
    late_send: int = 0  # the last event's request gets no answer, and arrives late
    late_marker: int = 0  # markers of a decided commit are written later
    fail_mark: int = 0  # the store refuses a mark
    lose_script: int = 0  # a script gets no reply: it runs never, late, or twice
    deadline: int = 0  # a request's deadline passes
    post_again: int = 0  # the client sends the same key during its request, or after a 201
    other: int = 0  # a transaction of another key in the same slot
    flush: int = 0
    failover: int = 0
    replicate: int = 0  # the replica catches up (before that it has the first state)
    depose: int = 0  # deposed leaders of control and ledger go on answering
    # the broker's transaction timeout, a late InitProducerId, or another program with the transactional id
    fence: int = 0
    forget_id: int = 0  # a transactional id expires: its next producer has another producer id, at epoch 0
    overflow: int = 0  # a fence or an end of a transaction at the last epoch gives another producer id
    skip_marker: int = 0  # a broker dies during an EndTxn: markers of some of the partitions never come
    rewind: int = 0  # the store goes back to the replica's data without a restart, after a heartbeat of every process
    misjudge: int = 0  # a store recovery begins although another store is in use
    rebalance: int = 0  # the group's member is replaced: its offsets are refused, perhaps after some of them were kept
    abortable: int = 0  # a broker calls a transaction of version 2 abortable: its session aborts it and goes on
    finalize: int = 0  # transactions of version 2 are finalized during the run
    move: int = 0  # a leader moves, and the old one, still connected, reports nothing open before it answers NOT_LEADER


FAULT: Final = Faults(*range(len(Faults._fields)))


class Configuration(NamedTuple):
    """The bounds of one search."""

    faults: Faults
    pair: bool = False  # an atomic pair instead of a single event
    bumps: bool = False  # transactions are of version 2 (KIP-890)
    offsets: bool = False  # an atomic batch of one event, and of offsets, which count as the second event
    take_over: bool = True  # a process may take the slot that the other began with
    split: bool = False  # a failover may leave one process at the old store
    # A heartbeat notices that `freed` is past a held slot's term, as in the service; this matters to idle holders only,
    # and is left out of searches without any.
    watchful: bool = False
    posters: tuple[int, ...] = (0, 1)  # the processes that the client knows


def start(configuration: Configuration) -> World:
    """Make the first state: both processes are settled in generation 0, each with one slot READY in term 0."""
    counted = 0 if configuration.faults.rewind else NONE
    keys = (0, 0, 0) if configuration.pair else (0, 0) if configuration.offsets else (0,)
    store = Store(0, 0, NONE, (0, 0), (0, 0), keys, counted)
    ready = View(READY, 0, 0, 0, 0, 0)
    return World(
        processes=tuple(
            Process(0, 0, 0, None, tuple(ready if s == p else View() for s in SLOTS), None) for p in (0, 1)
        ),
        parts=tuple(Part(0, 0, None, (0,), bumps=configuration.bumps) for _ in SLOTS),
        copies=(0, 0) if configuration.pair or configuration.offsets else (0,),
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
    """Return the world with one fault of this kind less to come."""
    left = world.left
    # As `_replace`, at half its cost: `left` is the last field.
    return tuple.__new__(World, (*world[:-1], (*left[:fault], left[fault] - 1, *left[fault + 1 :])))
