"""Tests the recovery of slots and of the store, with every key store."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from redis import Redis as Client

from deploy.stack import Redis
from service.claims.keys import REPLAY_CHUNK, ServerIdentity, StoreGeneration
from service.claims.redis_store import REPLAYS_AT_ONCE
from service.claims.states import Claimed, Outcome
from service.contract import Guarantee
from service.contract.wire.ledger import encode_ledger
from service.core.problems import NOT_WRITTEN, SCHEMA_MISMATCH, Fenced, Problem, StoreIncomplete, StoreLost
from service.events import dead_letters
from service.events.event import event_of
from service.kafka.reader import Item
from service.kafka.records import Record, RecordMetadata
from service.pipeline.decisions import after_claim
from service.pipeline.group import committed_of, entries_of, rows_to_mark
from service.pipeline.request import Quarantined, WriteRequest
from service.slots.ledger_rows import encode_entries, rows_of
from tests.contract.conftest import LEASE_MS, RETENTION_MS, StoreUnderTest, redis_keys
from tests.contract.memory_keys import Clock, MemoryKeys, Server
from tests.contract.test_keys import FP, FP2, ID, OTHER, THIRD, delivered


async def test_a_replay_writes_what_the_ledger_has_and_then_frees(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    now = under_test.now_ms()
    await under_test.keys.claim(generation, 0, 10, [(ID, FP), (OTHER, FP)])
    await under_test.keys.replay(generation, [(ID, delivered(now))])
    assert await under_test.keys.applied(generation, 0) == 10
    assert not (await under_test.keys.find(generation, OTHER)).dead
    await under_test.keys.replay(generation, [], (0, 30))
    assert (await under_test.keys.find(generation, ID)).state == delivered(now)
    assert (await under_test.keys.find(generation, OTHER)).dead
    assert await under_test.keys.applied(generation, 0) == 30
    (claim,) = await under_test.keys.claim(generation, 0, 30, [(OTHER, FP)])
    assert claim.outcome is Outcome.TAKEN_OVER


async def test_an_earlier_term_can_free_nothing(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    await under_test.keys.replay(generation, [], (0, 30))
    with pytest.raises(Fenced):
        await under_test.keys.replay(generation, [], (0, 25))
    assert await under_test.keys.applied(generation, 0) == 30
    await under_test.keys.claim(generation, 0, 30, [(ID, FP)])


async def test_a_replay_of_more_rows_than_a_call_takes_writes_all_of_them(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    now = under_test.now_ms()
    rows = [(number.to_bytes(16, "big"), delivered(now, offset=number)) for number in range(2 * REPLAY_CHUNK + 7)]
    await under_test.keys.replay(generation, rows, (0, 30))
    found = await under_test.keys.find_all(generation, [id for id, _ in rows])
    assert found == [state for _, state in rows]


async def test_a_replay_leaves_newer_states_and_expired_entries_alone(under_test: StoreUnderTest) -> None:
    """Expired entries, and states accepted later than the entry: a key may be used again after its retention."""
    generation = await under_test.settled()
    now = under_test.now_ms()
    await under_test.keys.mark(generation, 0, 10, 10, 11, [(ID, delivered(now, FP2, 9))])
    await under_test.keys.replay(
        generation, [(ID, delivered(now - 1)), (OTHER, delivered(now - RETENTION_MS - 1))], (0, 30)
    )
    assert await under_test.keys.find_all(generation, [ID, OTHER]) == [delivered(now, FP2, 9), None]
    await under_test.keys.replay(generation, [(ID, delivered(now, FP2, 10))], (0, 30))
    assert (await under_test.keys.find(generation, ID)).state == delivered(now, FP2, 10)


async def test_a_replay_replaces_a_claim_that_is_newer_than_the_record(under_test: StoreUnderTest) -> None:
    """The claim was made in a store without the record; once it is freed, the event would be written again."""
    generation = await under_test.settled()
    earlier = under_test.now_ms() - 1_000
    (claim,) = await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    assert claim.state.at > earlier
    await under_test.keys.replay(generation, [(ID, delivered(earlier))], (0, 30))
    (again,) = await under_test.keys.claim(generation, 0, 30, [(ID, FP)])
    assert (again.outcome, again.state) == (Outcome.DELIVERED, delivered(earlier))


async def test_a_store_recovery_from_nothing(under_test: StoreUnderTest) -> None:
    identity = await under_test.keys.who()
    assert identity.generation is None
    store, now = identity.store, under_test.now_ms()
    assert await under_test.keys.recover(await under_test.keys.who(), "mine")
    assert await under_test.keys.recover_read(store, "mine", 2) == [None, None]
    await under_test.keys.recover_replay(store, "mine", [(ID, delivered(now))])
    assert (await under_test.keys.who()).generation is None
    await under_test.keys.recover_end(store, "mine", 7, [40, 50])
    generation = StoreGeneration(7, store)
    assert (await under_test.keys.who()).generation == generation
    assert (await under_test.keys.find(generation, ID)).state == delivered(now)
    assert [await under_test.keys.applied(generation, slot) for slot in (0, 1)] == [40, 50]
    (claim,) = await under_test.keys.claim(generation, 1, 50, [(OTHER, FP)])
    assert claim.outcome is Outcome.NEW


async def test_a_store_recovery_keeps_the_keys_and_lowers_no_freed(under_test: StoreUnderTest) -> None:
    first = await under_test.settled(generation=3, freed=(10, 20))
    (claim,) = await under_test.keys.claim(first, 0, 10, [(ID, FP)])
    store = first.store
    assert await under_test.keys.recover(await under_test.keys.who(), "mine")
    assert await under_test.keys.recover_read(store, "mine", 2) == [10, 20]
    await under_test.keys.recover_end(store, "mine", 8, [5, 60])
    generation = StoreGeneration(8, store)
    assert [await under_test.keys.applied(generation, slot) for slot in (0, 1)] == [10, 60]
    assert (await under_test.keys.find(generation, ID)).state == claim.state
    with pytest.raises(StoreLost):
        await under_test.keys.find(first, ID)


async def test_one_recovery_at_a_time_until_its_nonce_runs_out(under_test: StoreUnderTest) -> None:
    store = (await under_test.keys.who()).store
    assert await under_test.keys.recover(await under_test.keys.who(), "dead")
    assert not await under_test.keys.recover(await under_test.keys.who(), "mine")
    under_test.elapse(5 * LEASE_MS + 50)
    assert await under_test.keys.recover(await under_test.keys.who(), "mine")
    with pytest.raises(StoreLost):
        await under_test.keys.recover_replay(store, "dead", [])
    with pytest.raises(StoreLost):
        await under_test.keys.recover_end(store, "dead", 9, [])
    await under_test.keys.recover_abandon(store, "dead")  # the nonce of another attempt: nothing happens
    assert not await under_test.keys.recover(await under_test.keys.who(), "another")
    await under_test.keys.recover_abandon(store, "mine")
    assert await under_test.keys.recover(await under_test.keys.who(), "another")


async def test_a_store_that_another_process_has_recovered_is_not_recovered_again(under_test: StoreUnderTest) -> None:
    """Two processes may notice a flush, and one of them only after the other has recovered the store."""
    seen = await under_test.keys.who()
    generation = await under_test.settled(generation=3)
    assert not await under_test.keys.recover(seen, "mine")
    assert (await under_test.keys.who()).generation == generation


async def test_a_flush_ends_a_recovery(under_test: StoreUnderTest) -> None:
    """Otherwise a store that lost its replayed keys would count as complete."""
    store = (await under_test.keys.who()).store
    assert await under_test.keys.recover(await under_test.keys.who(), "mine")
    await under_test.keys.recover_replay(store, "mine", [(ID, delivered(under_test.now_ms()))])
    under_test.flush()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: under_test.keys.recover_read(store, "mine", 1),
        lambda: under_test.keys.recover_replay(store, "mine", []),
        lambda: under_test.keys.recover_end(store, "mine", 7, [1]),
    ]
    for call in calls:
        with pytest.raises(StoreLost):
            await call()
    assert (await under_test.keys.who()).generation is None


async def test_a_recovery_of_another_store_does_nothing(under_test: StoreUnderTest) -> None:
    with pytest.raises(StoreLost):
        await under_test.keys.recover(ServerIdentity("another/one", None), "mine")
    assert await under_test.keys.recover(await under_test.keys.who(), "mine")


async def test_an_older_generation_never_replaces_a_newer_one(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled(generation=5)
    assert await under_test.keys.recover(await under_test.keys.who(), "late")
    for number in (4, 5):
        with pytest.raises(StoreLost):
            await under_test.keys.recover_end(generation.store, "late", number, [99, 99])
    assert (await under_test.keys.who()).generation == generation
    assert await under_test.keys.applied(generation, 0) == 10


async def test_claims_of_all_slots_are_dead_after_a_recovery(under_test: StoreUnderTest) -> None:
    first = await under_test.settled(generation=3)
    await under_test.keys.claim(first, 0, 10, [(ID, FP)])
    await under_test.keys.claim(first, 1, 20, [(OTHER, FP)])
    assert await under_test.keys.recover(await under_test.keys.who(), "mine")
    await under_test.keys.recover_end(first.store, "mine", 4, [30, 40])
    generation = StoreGeneration(4, first.store)
    claims = await under_test.keys.claim(generation, 0, 30, [(ID, FP), (OTHER, FP)])
    assert [claim.outcome for claim in claims] == [Outcome.TAKEN_OVER, Outcome.TAKEN_OVER]
    assert all(isinstance(claim.state, Claimed) and claim.state.term == 30 for claim in claims)


async def test_each_step_of_a_store_recovery_renews_its_nonce(redis: Redis, namespace: str) -> None:
    """However long fences and replay take, another process takes over only after silence."""
    keys = redis_keys(redis, namespace, lease_ttl_ms=60_000)
    seen = await keys.who()
    assert await keys.recover(seen, "mine")
    nonce = f"{{{namespace}:0}}n"
    with redis.client() as client:
        assert 290_000 < int(client.pttl(nonce)) <= 300_000
        for step in (
            lambda: keys.recover_read(seen.store, "mine", 2),
            lambda: keys.recover_replay(seen.store, "mine", [(ID, delivered(1))]),
        ):
            client.pexpire(nonce, 5_000)
            await step()
            assert 290_000 < int(client.pttl(nonce)) <= 300_000
    await keys.close()


async def test_replays_of_a_store_recovery_take_turns(own_redis: Redis, namespace: str) -> None:
    """Redis always has work, and no further calls wait at Redis."""
    keys = redis_keys(own_redis, namespace)
    seen = await keys.who()
    assert await keys.recover(seen, "mine")
    now = time.time_ns() // 1_000_000
    rows = [(number.to_bytes(16, "big"), delivered(now, offset=number)) for number in range(5_000)]
    replays = [keys.recover_replay(seen.store, "mine", rows[start : start + 100]) for start in range(0, 5_000, 100)]
    await asyncio.gather(*replays)
    await keys.recover_end(seen.store, "mine", 1, [10])
    assert await keys.find_all(StoreGeneration(1, seen.store), [id for id, _ in rows]) == [state for _, state in rows]
    with own_redis.client() as client:
        assert client.info("clients")["connected_clients"] == REPLAYS_AT_ONCE + 1
    await keys.close()


async def test_a_replica_is_no_store(own_redis: Redis, namespace: str) -> None:
    """A replica answers as its primary did, but does not have later writes."""
    keys = redis_keys(own_redis, namespace)
    store = (await keys.who()).store
    assert await keys.recover(await keys.who(), "mine")
    await keys.recover_end(store, "mine", 1, [10])
    with own_redis.client() as client:
        assert store == f"{client.info('server')['run_id']}/{client.info('replication')['master_replid']}"
        client.replicaof("127.0.0.1", "1")
    seen = await keys.who()
    assert (seen.store, seen.generation) == ("not a primary", StoreGeneration(1, store))
    with pytest.raises(StoreLost):
        await keys.find(StoreGeneration(1, store), ID)
    await keys.close()


async def test_an_older_copy_of_the_store_is_met_by_every_call(under_test: StoreUnderTest) -> None:
    """Server and generation are the same; only the number of claiming calls is smaller."""
    generation = await under_test.settled()
    await under_test.keys.claim(generation, 0, 10, [(THIRD, FP)])
    put_back = under_test.save()
    assert (await under_test.keys.claim(generation, 0, 10, [(ID, FP)]))[0].outcome is Outcome.NEW
    assert not (await under_test.keys.who()).incomplete
    put_back()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: under_test.keys.claim(generation, 0, 10, [(ID, FP)]),
        lambda: under_test.keys.claim_all(generation, 0, 10, [(ID, FP)]),
        lambda: under_test.keys.mark(generation, 0, 10, 10, 11, []),
        lambda: under_test.keys.find(generation, ID),
        lambda: under_test.keys.heartbeat(generation, "me", 2, {}),
        lambda: under_test.keys.replay(generation, [], (0, 30)),
    ]
    for call in calls:
        with pytest.raises(StoreIncomplete):
            await call()
    assert await under_test.keys.who() == ServerIdentity(generation.store, generation, incomplete=True)
    assert await under_test.keys.recover(await under_test.keys.who(), "mine")
    await under_test.keys.recover_end(generation.store, "mine", 2, [30, 40])
    recovered = StoreGeneration(2, generation.store)
    assert await under_test.keys.who() == ServerIdentity(generation.store, recovered)
    assert (await under_test.keys.claim(recovered, 0, 30, [(ID, FP)]))[0].outcome is Outcome.NEW


async def test_an_older_copy_that_lacks_an_atomic_batch(under_test: StoreUnderTest) -> None:
    generation = await under_test.settled()
    put_back = under_test.save()
    assert (await under_test.keys.claim_all(generation, 0, 10, [(ID, FP), (OTHER, FP)])).outcome is Outcome.NEW
    put_back()
    with pytest.raises(StoreIncomplete):
        await under_test.keys.find(generation, ID)


async def test_a_heartbeat_reveals_an_older_copy_of_the_store_by_its_claims(under_test: StoreUnderTest) -> None:
    """The heartbeat returns the number of claiming calls, so that a process without claims of its own notices too."""
    generation = await under_test.settled()
    put_back = under_test.save()
    await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    assert (await under_test.hour.heartbeat(generation, "other", 2, {})).members == 1
    put_back()
    with pytest.raises(StoreIncomplete):
        await under_test.hour.claim(generation, 1, 20, [(ID, FP)])


async def test_an_older_copy_with_new_claims_is_revealed_by_applied(under_test: StoreUnderTest) -> None:
    """Other processes have claimed as often as was lost; the `applied` that a holder knows still shows it."""
    generation = await under_test.settled()
    put_back = under_test.save()
    await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    await under_test.keys.mark(generation, 0, 10, 10, 12, [(ID, delivered(under_test.now_ms()))])
    put_back()
    await under_test.hour.claim(generation, 1, 20, [(ID, FP)])
    assert (await under_test.keys.heartbeat(generation, "me", 2, {0: 10})).members == 1
    with pytest.raises(StoreIncomplete):
        await under_test.keys.heartbeat(generation, "me", 2, {0: 12, 1: -1})
    assert (await under_test.keys.who()).incomplete


async def test_a_call_that_claims_nothing_is_not_counted(under_test: StoreUnderTest) -> None:
    """Replays, and calls of a full store, cost no additional write."""
    generation = await under_test.settled()
    await under_test.keys.claim(generation, 0, 10, [(ID, FP)])
    await under_test.keys.mark(generation, 0, 10, 10, 12, [(ID, delivered(under_test.now_ms()))])
    put_back = under_test.save()
    assert (await under_test.keys.claim(generation, 0, 10, [(ID, FP)]))[0].outcome is Outcome.DELIVERED
    assert (await under_test.keys.claim_all(generation, 0, 10, [(ID, FP)])).outcome is Outcome.DELIVERED
    put_back()
    assert (await under_test.keys.find(generation, ID)).state is not None


def evict(client: Client) -> int:
    """Let Redis evict keys by a policy that was set after the start; returns the number of evicted keys."""
    before = int(client.info("stats")["evicted_keys"])
    client.config_set("maxmemory-policy", "volatile-ttl")  # evicts the nonce last
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 100_000)
    deadline = time.monotonic() + 10
    while not (evicted := int(client.info("stats")["evicted_keys"]) - before):
        assert time.monotonic() < deadline
        client.echo("a command, at which it looks how full it is")
    client.config_set("maxmemory", 0)
    return evicted


async def test_keys_that_were_evicted_are_missed_at_the_next_heartbeat(own_redis: Redis, namespace: str) -> None:
    keys = redis_keys(own_redis, namespace, lease_ttl_ms=60_000)
    seen = await keys.who()
    assert (await keys.recover(seen, "first"), seen.evicts) == (True, "")
    await keys.recover_end(seen.store, "first", 1, [10, 20])
    generation = StoreGeneration(1, seen.store)
    now = time.time_ns() // 1_000_000
    rows = [(number.to_bytes(16, "big"), delivered(now, offset=number)) for number in range(5_000)]
    await keys.replay(generation, rows)
    assert (await keys.heartbeat(generation, "me", 2, {})).members == 1
    with own_redis.client() as client:
        assert evict(client) > 0
        with pytest.raises(StoreIncomplete):
            await keys.heartbeat(generation, "me", 2, {})
        assert await keys.who() == ServerIdentity(seen.store, generation, incomplete=True, evicts="volatile-ttl")
        client.config_set("maxmemory-policy", "noeviction")
        assert await keys.recover(await keys.who(), "mine")
        # Some marks are missing: the ledger must be read back to the oldest key that has not expired.
        assert await keys.recover_read(seen.store, "mine", 2) == [None, None]
        await keys.recover_end(seen.store, "mine", 2, [30, 40])
        recovered = StoreGeneration(2, seen.store)
        assert (await keys.heartbeat(recovered, "me", 2, {})).members == 1
        assert await keys.who() == ServerIdentity(seen.store, recovered)
        assert await keys.recover(await keys.who(), "another")
        assert await keys.recover_read(seen.store, "another", 2) == [30, 40]
        assert evict(client) > 0  # during a recovery, which counts until the next heartbeat only
        await keys.recover_end(seen.store, "another", 3, [30, 40])
        with pytest.raises(StoreIncomplete):
            await keys.heartbeat(StoreGeneration(3, seen.store), "me", 2, {})
    await keys.close()


async def test_the_double_misses_evicted_keys_as_redis_does() -> None:
    server = Server("run/replid", Clock(), StoreGeneration(1, "run/replid"), applied={0: 10})
    keys = MemoryKeys(server, retention_ms=RETENTION_MS, least_left_ms=5_000, lease_ttl_ms=LEASE_MS)
    generation = StoreGeneration(1, "run/replid")
    assert (await keys.heartbeat(generation, "me", 1, {0: 10})).members == 1
    server.evicted, server.evicts = 3, "allkeys-lru"
    with pytest.raises(StoreIncomplete):
        await keys.heartbeat(generation, "me", 1, {0: 10})
    assert await keys.who() == ServerIdentity("run/replid", generation, incomplete=True, evicts="allkeys-lru")
    assert await keys.recover(await keys.who(), "mine")
    assert await keys.recover_read("run/replid", "mine", 1) == [None]
    await keys.recover_end("run/replid", "mine", 2, [30])
    assert (await keys.heartbeat(StoreGeneration(2, "run/replid"), "me", 1, {0: 30})).members == 1


async def test_the_answer_of_a_dead_letter_survives_a_store_recovery(under_test: StoreUnderTest) -> None:
    """All of it is in the ledger: the schema by which its event was refused may have changed meanwhile."""
    generation = await under_test.settled()
    event = event_of("k", ID, "orders", None, b"{}", [])
    problem = Problem(SCHEMA_MISMATCH, 'value.n: "é" is not of type "number": see the schema of orders')
    letter = dead_letters.of_event(event, problem, "letters", "shop", 7_200)
    request = WriteRequest.for_event(letter, 0.0, 1.0, Guarantee.EXACTLY_ONCE, letter.ttl_s)
    pair = (letter.id, letter.fp)
    (claim,) = await under_test.keys.claim(generation, 0, 10, [pair], [request.ttl_s])
    at = claim.state.at
    written = Record("letters", 1, None, b"{}", [], at)
    committed = committed_of([(request, [at])], [written], [RecordMetadata(7, at)])
    first = request.shown(committed[0][1])
    assert isinstance(first, Quarantined)
    assert await under_test.keys.mark(generation, 0, 10, 10, 11, rows_to_mark(committed)) == 0
    text = encode_ledger(0, 7, 0, "me", [encode_entries(entries_of(committed))])

    under_test.flush()
    seen = await under_test.keys.who()
    assert await under_test.keys.recover(seen, "mine")
    await under_test.keys.recover_replay(seen.store, "mine", rows_of([Item(0, 11, None, text)]))
    await under_test.keys.recover_end(seen.store, "mine", 7, [40, 50])
    generation = StoreGeneration(7, seen.store)
    # A retry finds it, whether its event is still refused or not; another event does not.
    for again in (letter, event):
        claims = await under_test.keys.claim(generation, 0, 40, [(again.id, again.fp)], [7_200])
        retry = WriteRequest.for_event(again, 0.0, 1.0, Guarantee.EXACTLY_ONCE)
        ((_, answer),) = after_claim([retry], claims, {}, 0.5, lambda _: Problem(NOT_WRITTEN, "")).results
        assert isinstance(answer, Quarantined)
        assert (answer.body(), answer.at, answer.replayed) == (first.body(), first.at, True)
    (other,) = await under_test.keys.claim(generation, 0, 40, [(ID, FP2)], [7_200])
    assert other.outcome is Outcome.CONFLICT
