"""Tests claims, marks and releases of every key store."""

from collections.abc import Awaitable, Callable

import pytest

from deploy.stack import Redis
from service.claims.keys import Found, Heartbeat, StoreGeneration
from service.claims.states import Claimed, Delivered, DeliveredBatch, Outcome, Row
from service.core.problems import Fenced, StoreAway, StoreLost
from tests.contract.conftest import LEASE_MS, RETENTION_MS, StoreUnderTest, assert_expires, redis_keys

ID, OTHER, THIRD = b"i" * 16, b"o" * 16, b"t" * 16
FP, FP2 = b"f" * 8, b"2" * 8
# Slot 0 is in term 10, slot 1 in term 20.


def delivered(at: int, fp: bytes = FP, offset: int = 7) -> Delivered:
    return Delivered(at, fp, "orders", 3, offset, at + 1)


async def test_a_claim_is_made_once(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    before = under_test.now_ms()
    (claim,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    assert claim.outcome is Outcome.NEW
    assert isinstance(claim.state, Claimed)
    assert (claim.state.slot, claim.state.term, claim.state.fp) == (0, 10, FP)
    assert before <= claim.state.at <= under_test.now_ms()
    for slot, term, fp in ((0, 10, FP), (1, 20, FP), (1, 20, FP2)):
        (again,) = await under_test.keys.claim(generation, slot, term, [(ID, fp)])
        assert (again.outcome, again.state, again.leased) == (Outcome.IN_PROGRESS, claim.state, False)
    assert await under_test.keys.take(generation, 0, "me")
    (again,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP)])
    assert again.leased


async def test_many_claims_in_one_call_keep_their_order(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    await under_test.keys.claim(generation, 0, 10, [(OTHER, FP)])
    claims = await under_test.keys.claim(generation, 0, 10, [(ID, FP), (OTHER, FP), (THIRD, FP), (ID, FP)])
    assert [claim.outcome for claim in claims] == [
        Outcome.NEW,
        Outcome.IN_PROGRESS,
        Outcome.NEW,
        Outcome.IN_PROGRESS,
    ]


async def test_an_id_that_is_asked_for_twice_in_one_call_is_new_once(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    asked = [(ID, FP), (OTHER, FP), (ID, FP2), (THIRD, FP)]
    first, _, again, last = await under_test.keys.claim(generation, 0, 10, asked)
    assert (first.outcome, again.outcome, last.outcome) == (Outcome.NEW, Outcome.IN_PROGRESS, Outcome.NEW)
    assert (await under_test.keys.find(generation, ID)).state == again.state == first.state


@pytest.mark.parametrize(("slot", "term"), [(0, 9), (0, 11), (1, 10), (2, 0)])
async def test_a_claim_outside_the_slot_s_term_is_fenced(under_test: StoreUnderTest, slot: int, term: int) -> None:
    generation = await under_test.settled()
    with pytest.raises(Fenced):
        await under_test.keys.claim(generation, slot, term, [(ID, FP)])
    with pytest.raises(Fenced):
        await under_test.keys.claim_all(generation, slot, term, [(ID, FP)])
    assert (await under_test.keys.find(generation, ID)).state is None


async def test_a_full_store_answers_known_keys_and_claims_nothing(under_test: StoreUnderTest) -> None:
    """Clients without an answer send again at such a time."""
    generation = await under_test.settled()
    (claim,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    await under_test.keys.mark(generation, 0, 10, 10, 11, [(ID, delivered(claim.state.at))])
    await under_test.keys.claim(generation, 0, 10, [(OTHER, FP)])
    asked = [(THIRD, FP), (ID, FP), (ID, FP2), (OTHER, FP)]
    known = [Outcome.DELIVERED, Outcome.CONFLICT, Outcome.IN_PROGRESS]
    under_test.full(True)
    claims = await under_test.keys.claim(generation, 1, 20, asked)
    assert [claim.outcome for claim in claims] == [Outcome.NOT_CLAIMED, *known]
    assert (await under_test.keys.find(generation, THIRD)).state is None
    under_test.full(False)
    claims = await under_test.keys.claim(generation, 1, 20, asked)
    assert [claim.outcome for claim in claims] == [Outcome.NEW, *known]


async def test_a_full_store_takes_no_dead_claim_over(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    (dead,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    await under_test.keys.replay(generation, [], (0, 12))
    under_test.full(True)
    (claim,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP)])
    assert claim.outcome is Outcome.NOT_CLAIMED
    assert (await under_test.keys.find(generation, ID)).state == dead.state
    under_test.full(False)
    (claim,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP)])
    assert claim.outcome is Outcome.TAKEN_OVER


async def test_a_full_store_claims_no_batch_and_answers_a_known_one(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    batch = [(ID, FP), (OTHER, FP), (THIRD, FP)]
    under_test.full(True)
    assert (await under_test.keys.claim_all(generation, 0, 10, batch)).outcome is Outcome.NOT_CLAIMED
    assert await under_test.keys.find_all(generation, [id for id, _ in batch]) == [None, None, None]
    under_test.full(False)
    assert (await under_test.keys.claim_all(generation, 0, 10, batch)).outcome is Outcome.NEW
    under_test.full(True)
    assert (await under_test.keys.claim_all(generation, 1, 20, batch)).outcome is Outcome.IN_PROGRESS


async def test_a_full_store_marks_and_replays_nothing(under_test: StoreUnderTest) -> None:
    """The calls are refused before they write, so that they may be repeated later."""
    generation = await under_test.settled()
    (claim,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    rows: list[Row] = [(ID, delivered(claim.state.at)), (OTHER, delivered(claim.state.at))]
    under_test.full(True)
    with pytest.raises(StoreAway):
        await under_test.keys.mark(generation, 0, 10, 10, 11, rows)
    with pytest.raises(StoreAway):
        await under_test.keys.replay(generation, rows, (0, 12))
    assert await under_test.keys.find_all(generation, [ID, OTHER]) == [claim.state, None]
    assert await under_test.keys.applied(generation, 0) == 10
    under_test.full(False)
    assert await under_test.keys.mark(generation, 0, 10, 10, 11, rows) == 0
    await under_test.keys.replay(generation, rows, (0, 12))
    assert await under_test.keys.applied(generation, 0) == 12


async def test_a_marked_claim_is_replayed_or_in_conflict(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    (claim,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    answer = delivered(claim.state.at)
    assert await under_test.keys.mark(generation, 0, 10, 10, 11, [(ID, answer)]) == 0
    (same,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP)])
    (other,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP2)])
    assert (same.outcome, same.state) == (Outcome.DELIVERED, answer)
    assert (other.outcome, other.state) == (Outcome.CONFLICT, answer)
    assert (await under_test.keys.find(generation, ID)).state == answer


async def test_a_mark_replaces_only_a_claim_of_its_own_term(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    (mine,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP)])
    assert (
        await under_test.keys.mark(generation, 0, 10, 10, 11, [(ID, delivered(5)), (OTHER, delivered(mine.state.at))])
        == 1
    )
    assert (await under_test.keys.find(generation, ID)).state == mine.state
    # An entry that expired meanwhile comes back: the event is in Kafka.
    assert (await under_test.keys.find(generation, OTHER)).state == delivered(mine.state.at)


async def test_applied_moves_only_from_the_record_before(under_test: StoreUnderTest) -> None:
    """`applied` moves only from the very record before: a later recovery must find records without a mark."""
    generation = await under_test.settled()
    assert await under_test.keys.applied(generation, 0) == 10
    await under_test.keys.mark(generation, 0, 10, 10, 12, [])
    assert await under_test.keys.applied(generation, 0) == 12
    await under_test.keys.mark(generation, 0, 10, 14, 16, [])  # the mark of 14 has failed
    assert await under_test.keys.applied(generation, 0) == 12
    await under_test.keys.mark(generation, 0, 10, 12, 14, [])
    assert await under_test.keys.applied(generation, 0) == 14
    assert await under_test.keys.applied(generation, 1) == 20
    assert await under_test.keys.applied(generation, 2) is None


async def test_a_dead_claim_is_taken_over_with_its_time(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    (old,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    await under_test.keys.replay(generation, [], (0, 30))
    under_test.elapse(5)
    assert (await under_test.keys.find(generation, ID)).dead
    (new,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP2)])
    assert (new.outcome, new.state) == (Outcome.TAKEN_OVER, Claimed(1, 20, old.state.at, FP2))
    assert (await under_test.keys.find(generation, ID)).state == new.state
    # The claim of its own term is marked, that of the ended term is not.
    assert await under_test.keys.mark(generation, 0, 10, 10, 11, [(ID, delivered(old.state.at))]) == 1
    assert await under_test.keys.mark(generation, 1, 20, 20, 21, [(ID, delivered(old.state.at, FP2))]) == 0


async def test_a_release_gives_up_only_own_claims(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    await under_test.keys.claim(generation, 1, 20, [(OTHER, FP)])
    await under_test.keys.mark(generation, 0, 10, 10, 11, [(THIRD, delivered(under_test.now_ms()))])
    await under_test.keys.release(generation, 0, 10, [ID, OTHER, THIRD])
    states = [type(state) for state in await under_test.keys.find_all(generation, [ID, OTHER, THIRD])]
    assert states == [type(None), Claimed, Delivered]


async def test_an_atomic_batch_is_claimed_whole_or_not(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    asked = [(ID, FP), (OTHER, FP), (THIRD, FP2)]
    await under_test.keys.claim(generation, 1, 20, [(THIRD, FP2)])
    busy = await under_test.keys.claim_all(generation, 0, 10, asked)
    assert (busy.outcome, busy.leased) == (Outcome.IN_PROGRESS, False)
    assert await under_test.keys.find_all(generation, [ID, OTHER]) == [None, None]

    await under_test.keys.release(generation, 1, 20, [THIRD])
    won = await under_test.keys.claim_all(generation, 0, 10, asked)
    assert won.outcome is Outcome.NEW
    assert await under_test.keys.find_all(generation, [ID, OTHER, THIRD]) == [
        Claimed(0, 10, won.state.at, fp) for fp in (FP, FP, FP2)
    ]
    whole = DeliveredBatch(won.state.at, FP, 2)
    rows: list[Row] = [(ID, whole), (OTHER, delivered(won.state.at)), (THIRD, delivered(won.state.at, FP2, 8))]
    assert await under_test.keys.mark(generation, 0, 10, 10, 11, rows) == 0
    again = await under_test.keys.claim_all(generation, 1, 20, asked)
    assert (again.outcome, again.state) == (Outcome.DELIVERED, whole)
    other = await under_test.keys.claim_all(generation, 1, 20, [(ID, FP2), (OTHER, FP)])
    assert other.outcome is Outcome.CONFLICT
    assert (await under_test.keys.claim(generation, 1, 20, [(ID, FP)]))[0].state == whole


async def test_a_slot_is_leased_to_one_process_until_it_gives_it_back(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    assert await under_test.keys.take(generation, 0, "a")
    assert await under_test.keys.take(generation, 0, "a")
    assert not await under_test.keys.take(generation, 0, "b")
    assert (await under_test.keys.heartbeat(generation, "a", 3, {0: -1})).slots == "mff"
    heartbeat = await under_test.keys.heartbeat(generation, "b", 3, {})
    assert (heartbeat.members, heartbeat.slots) == (2, "tff")
    assert (
        await under_test.keys.heartbeat(generation, "b", 3, {0: -1})
    ).slots == "tff"  # the reply shows that the slot was lost
    await under_test.keys.give_back(generation, 0, "b", True)  # the lease is not b's
    assert (await under_test.keys.heartbeat(generation, "b", 1, {})).slots == "t"
    await under_test.keys.give_back(generation, 0, "a", True)
    assert (await under_test.keys.heartbeat(generation, "b", 1, {})).slots == "f"
    assert await under_test.keys.take(generation, 0, "b")
    await under_test.keys.give_back(generation, 0, "b", False)
    assert (await under_test.keys.heartbeat(generation, "a", 1, {})).slots == "d"
    await under_test.keys.leave(generation, "a")
    assert (await under_test.keys.heartbeat(generation, "b", 1, {})).members == 1


async def test_slots_beyond_those_that_a_process_knows_are_seen_once_they_were_taken(
    under_test: StoreUnderTest,
) -> None:
    """While SLOTS_MAX is raised, a process with the lower value must also see dead slots beyond its own."""
    generation = await under_test.settled()
    await under_test.keys.take(generation, 10, "new")
    assert (await under_test.keys.heartbeat(generation, "old", 2, {})).slots == 10 * "f" + "t"
    await under_test.keys.give_back(generation, 10, "new", False)
    assert (await under_test.keys.heartbeat(generation, "old", 2, {})).slots == 10 * "f" + "d"
    await under_test.keys.take(generation, 10, "old")
    assert (await under_test.keys.heartbeat(generation, "old", 2, {10: -1})).slots == 10 * "f" + "m"
    await under_test.keys.give_back(generation, 10, "old", True)
    assert (await under_test.keys.heartbeat(generation, "old", 2, {})).slots == "ff"
    assert (await under_test.keys.heartbeat(generation, "old", 2, {3: -1})).slots == "fffm"


async def test_a_lease_from_before_a_clock_went_back_lasts_no_longer_than_another(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    assert await under_test.hour.take(generation, 0, "gone")
    assert (await under_test.hour.heartbeat(generation, "gone", 2, {0: -1})).slots == "mf"
    assert (await under_test.keys.heartbeat(generation, "here", 2, {})) == Heartbeat(1, "tf")
    under_test.elapse(LEASE_MS + 50)
    assert (await under_test.keys.heartbeat(generation, "here", 2, {})) == Heartbeat(1, "df")


async def test_a_silent_process_loses_its_slots(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    await under_test.keys.take(generation, 0, "silent")
    await under_test.keys.heartbeat(generation, "silent", 1, {0: -1})
    under_test.elapse(350)
    heartbeat = await under_test.keys.heartbeat(generation, "other", 1, {})
    assert (heartbeat.members, heartbeat.slots) == (1, "d")
    # A holder that was only late continues if no other process took the slot.
    assert (await under_test.keys.heartbeat(generation, "silent", 1, {0: -1})).slots == "m"


async def test_a_heartbeat_renews_only_its_own_leases(under_test: StoreUnderTest) -> None:
    """A slot of a killed holder is dead after one lease, however often other processes send heartbeats."""
    generation = await under_test.settled()
    for slot, token in ((0, "here"), (1, "gone")):
        assert await under_test.keys.take(generation, slot, token)
    seen = []
    for _ in range(2):
        under_test.elapse(LEASE_MS * 3 // 5)
        seen.append((await under_test.keys.heartbeat(generation, "here", 2, {0: -1})).slots)
    assert seen == ["mt", "md"]
    assert not await under_test.keys.take(generation, 0, "another")


async def test_a_slot_that_is_held_through_a_flush_is_dead_and_not_free_once_its_holder_is_gone(
    under_test: StoreUnderTest,
) -> None:
    """A free slot would not be recovered, and its open transaction would stay."""
    await under_test.settled()
    under_test.flush()
    generation = await under_test.settled(generation=2)
    assert (await under_test.keys.heartbeat(generation, "gone", 2, {0: -1})).slots == "mf"
    under_test.elapse(LEASE_MS + 50)
    assert (await under_test.keys.heartbeat(generation, "here", 2, {})).slots == "df"


async def test_a_found_claim_has_the_state_of_its_own_slot(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled(freed=(10, 20))
    (claim,) = await under_test.keys.claim(generation, 1, 20, [(ID, FP)])
    assert await under_test.keys.find(generation, ID) == Found(claim.state, dead=False, leased=False)
    assert await under_test.keys.take(generation, 1, "me")
    assert await under_test.keys.find(generation, ID) == Found(claim.state, dead=False, leased=True)
    await under_test.keys.replay(generation, [], (1, 21))
    assert await under_test.keys.find(generation, ID) == Found(claim.state, dead=True, leased=True)
    answer = delivered(under_test.now_ms())
    await under_test.keys.replay(generation, [(ID, answer)])
    assert await under_test.keys.find(generation, ID) == Found(answer)
    assert await under_test.keys.find(generation, OTHER) == Found(None)


@pytest.mark.parametrize("lost", ["a later generation", "an older generation", "another store", "a flush"])
async def test_every_call_in_another_store_or_generation_is_refused(under_test: StoreUnderTest, lost: str) -> None:
    generation = await under_test.settled(generation=5)
    (claim,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    wrong = {
        "a later generation": StoreGeneration(6, generation.store),
        "an older generation": StoreGeneration(4, generation.store),
        "another store": StoreGeneration(5, "another/one"),
        "a flush": generation,
    }[lost]
    if lost == "a flush":
        under_test.flush()
        assert (await under_test.keys.who()).generation is None
    keys = under_test.keys
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: keys.claim(wrong, 0, 10, [(OTHER, FP)]),
        lambda: keys.claim_all(wrong, 0, 10, [(OTHER, FP)]),
        lambda: keys.mark(wrong, 0, 10, 10, 11, [(ID, delivered(1))]),
        lambda: keys.release(wrong, 0, 10, [ID]),
        lambda: keys.find(wrong, ID),
        lambda: keys.find_all(wrong, [ID]),
        lambda: keys.applied(wrong, 0),
        lambda: keys.replay(wrong, [(ID, delivered(under_test.now_ms()))], (0, 30)),
        lambda: keys.take(wrong, 0, "me"),
        lambda: keys.give_back(wrong, 0, "me", True),
        lambda: keys.heartbeat(wrong, "me", 2, {}),
        lambda: keys.leave(wrong, "me"),
    ]
    for call in calls:
        with pytest.raises(StoreLost):
            await call()
    if lost == "a flush":
        generation = await under_test.settled(generation=6)
    assert (await keys.find(generation, ID)).state == (None if lost == "a flush" else claim.state)
    assert (await keys.find(generation, OTHER)).state is None
    assert (await keys.heartbeat(generation, "me", 2, {})).slots == "ff"
    assert await keys.applied(generation, 0) == 10


async def test_a_key_is_forgotten_after_its_retention(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    at = under_test.now_ms() - RETENTION_MS + 200
    await under_test.keys.mark(generation, 0, 10, 10, 11, [(ID, delivered(at))])
    assert (await under_test.keys.find(generation, ID)).state == delivered(at)
    under_test.elapse(300)
    assert (await under_test.keys.find(generation, ID)).state is None
    (claim,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP2)])
    assert claim.outcome is Outcome.NEW


async def test_a_mark_leaves_the_time_at_which_a_key_is_forgotten(redis: Redis, namespace: str) -> None:
    """For the mark of its own claim, and for a state that the mark leaves as it is."""
    keys = redis_keys(redis, namespace)
    seen = await keys.who()
    assert await keys.recover(seen, "the first")
    await keys.recover_end(seen.store, "the first", 1, (10, 20))
    generation = StoreGeneration(1, seen.store)
    (own,) = await keys.claim(generation, 0, 10, [(ID, FP)])
    (others,) = await keys.claim(generation, 1, 20, [(OTHER, FP)])
    assert (
        await keys.mark(generation, 0, 10, 10, 11, [(ID, delivered(own.state.at)), (OTHER, delivered(own.state.at))])
        == 1
    )
    assert isinstance(own.state, Claimed)
    assert isinstance(others.state, Claimed)
    with redis.client() as client:
        for id, state in ((ID, own.state), (OTHER, others.state)):
            assert_expires(client, f"{{{namespace}:0}}k".encode() + id, state.at + RETENTION_MS)
    assert await keys.find_all(generation, [OTHER]) == [others.state]
    await keys.close()


async def test_each_key_is_remembered_for_the_retention_that_it_was_claimed_with(under_test: StoreUnderTest) -> None:
    """In one call; the mark, and the replay into another store, keep it. A retention of 0 is the store's own."""
    generation = await under_test.settled()
    ids = [bytes([n]) * 16 for n in range(5)]
    long_s, short_s = 3 * RETENTION_MS // 1000, RETENTION_MS // 4000
    ttls_s = [0, long_s, long_s, short_s, 0]
    claims = await under_test.keys.claim(generation, 0, 10, [(id, FP) for id in ids], ttls_s)
    assert {claim.outcome for claim in claims} == {Outcome.NEW}
    rows: list[Row] = [
        (id, Delivered(claim.state.at, FP, "orders", 3, n, claim.state.at, ttl_s))
        for n, (id, claim, ttl_s) in enumerate(zip(ids, claims, ttls_s, strict=True))
    ]
    assert await under_test.keys.mark(generation, 0, 10, 10, 11, rows) == 0
    assert await under_test.keys.find_all(generation, ids) == [state for _, state in rows]
    under_test.flush()
    generation = await under_test.settled(generation=6)
    aged = under_test.now_ms() - RETENTION_MS // 2
    old: list[Row] = [
        (id, Delivered(aged, FP, "orders", 3, n, aged, ttl_s))
        for n, (id, ttl_s) in enumerate(zip(ids, ttls_s, strict=True))
    ]
    older: Row = (b"o" * 16, DeliveredBatch(under_test.now_ms() - 2 * RETENTION_MS, FP, 2, long_s))
    await under_test.keys.replay(generation, [*old, older], (0, 30))
    found = await under_test.keys.find_all(generation, [*ids, older[0]])
    assert found == [*(state if state.ttl_s != short_s else None for _, state in old), older[1]]


async def test_a_state_with_a_retention_of_its_own_expires_in_redis_with_it(redis: Redis, namespace: str) -> None:
    keys = redis_keys(redis, namespace)
    seen = await keys.who()
    assert await keys.recover(seen, "the first")
    await keys.recover_end(seen.store, "the first", 1, (10, 20))
    generation = StoreGeneration(1, seen.store)
    pairs = [(ID, FP), (OTHER, FP), (THIRD, FP)]
    claims = await keys.claim(generation, 0, 10, pairs, [7_200, 0, 7_200])
    whole = await keys.claim_all(generation, 0, 10, [(b"w" * 16, FP), (b"m" * 16, FP)], 7_200)
    with redis.client() as client:

        def expires(id: bytes, at_ms: int) -> None:
            assert_expires(client, f"{{{namespace}:0}}k".encode() + id, at_ms)

        for (id, _), claim, ttl_ms in zip(pairs, claims, (7_200_000, RETENTION_MS, 7_200_000), strict=True):
            expires(id, claim.state.at + ttl_ms)
        expires(b"m" * 16, whole.state.at + 7_200_000)
        rows: list[Row] = [(b"e" * 16, Delivered(whole.state.at, FP, "orders", 3, 7, whole.state.at, 7_200))]
        await keys.mark(generation, 0, 10, 10, 11, rows)  # its claim has expired
        expires(b"e" * 16, whole.state.at + 7_200_000)
    await keys.close()
