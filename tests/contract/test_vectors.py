"""Compares `claims.lua` with the rules of `states.py`: each state of a key under each operation.

The rules get the time of Redis as "now"; times that both set to now count as equal.
"""

from collections.abc import AsyncIterator, Sequence
from itertools import product

import pytest
from msgspec.structs import replace
from redis import Redis as Client
from redis import ResponseError

from deploy.stack import Redis
from service.claims import states
from service.claims.keys import StoreGeneration
from service.claims.redis_store import RedisKeys
from service.claims.state_codec import pack, unpack
from service.claims.states import Claimed, Delivered, DeliveredBatch, KeyState
from service.core.problems import StoreBug
from tests.contract.conftest import LEAST_LEFT_MS, RETENTION_MS, SERVERS, assert_expires, redis_keys

SLOT, TERM = 0, 100
DEAD_SLOT, DEAD_TERM = 1, 50
FREED = {SLOT: TERM, DEAD_SLOT: 60, 2: 70}
FP, FP2 = b"f" * 8, b"2" * 8
NOW = -1  # stands for the present time
Present = Claimed | Delivered | DeliveredBatch


def present(now: int) -> dict[str, KeyState]:
    """Make every kind of state at a time: the age matters if the retention is nearly over."""
    aged, old = now - 1_000, now - RETENTION_MS + LEAST_LEFT_MS // 2
    return {
        "nothing": None,
        "own claim": Claimed(SLOT, TERM, aged, FP),
        "own claim, of an earlier term": Claimed(SLOT, TERM - 1, aged, FP),
        "a live claim": Claimed(2, 70, aged, FP2),
        "a dead claim": Claimed(DEAD_SLOT, DEAD_TERM, aged, FP2),
        "a dead claim about to expire": Claimed(DEAD_SLOT, DEAD_TERM, old, FP),
        "a claim of a slot that was never freed": Claimed(9, 5, aged, FP),
        "delivered": Delivered(aged, FP, "orders", 2, 12, aged + 5),
        "delivered, another": Delivered(aged, FP2, "o", 0, 2**52, 0),
        "delivered, about to expire": Delivered(old, FP, "orders", 2, 12, old),
        "a dead letter": Delivered(aged, FP, "letters", 2, 12, aged + 5, 0, "schema-mismatch value: é is no 1"),
        "a dead letter, another": Delivered(aged, FP2, "letters", 2, 12, aged, 0, "unusable-body body: x"),
        "a batch": DeliveredBatch(aged, FP, 3),
        "a batch, another": DeliveredBatch(aged, FP2, 2**32 - 1),
    }


NAMES = list(present(0))


class StatesInRedis:
    """A Redis whose states are set directly, without an operation."""

    def __init__(self, keys: RedisKeys, client: Client, namespace: str, generation: StoreGeneration) -> None:
        self.keys = keys
        self.client = client
        self.prefix = f"{{{namespace}:0}}".encode()
        self.generation = generation

    def now_ms(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds * 1000 + micros // 1000)

    def has_msetex(self) -> bool:
        try:
            self.client.execute_command("MSETEX", 1, f"{self.prefix.decode()}any", "")  # type: ignore[no-untyped-call]
        except ResponseError:
            return False
        return True

    def calls(self, command: str) -> int:
        """Count the calls of a command that the server has executed."""
        stats: dict[str, dict[str, int]] = self.client.info("commandstats")
        return stats.get(f"cmdstat_{command}", {}).get("calls", 0)

    def put(self, id: bytes, state: KeyState) -> None:
        key = self.prefix + b"k" + id
        if state is None:
            self.client.delete(key)
        else:
            self.client.set(key, pack(state), pxat=state.at + RETENTION_MS)

    def get(self, id: bytes) -> KeyState:
        raw = self.client.get(self.prefix + b"k" + id)
        assert raw is None or isinstance(raw, bytes)
        if raw is None:
            return None
        state = unpack(raw)
        assert_expires(self.client, self.prefix + b"k" + id, state.at + RETENTION_MS)
        return state


@pytest.fixture(params=SERVERS)
async def redis_states(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[StatesInRedis]:
    redis: Redis = request.getfixturevalue(request.param)
    keys = redis_keys(redis, namespace)
    store = (await keys.who()).store
    assert await keys.recover(await keys.who(), "first")
    await keys.recover_end(store, "first", 1, [FREED.get(slot, -1) for slot in range(3)])
    with redis.client() as client:
        yield StatesInRedis(keys, client, namespace, StoreGeneration(1, store))
    await keys.close()


def freed(slot: int) -> int:
    return FREED.get(slot, -1)


def anytime(state: KeyState, since: int) -> KeyState:
    """Replace every time of this test's run in a state by NOW."""
    if state is None or state.at < since:
        return state
    return replace(state, at=NOW)


def ids(count: int) -> list[bytes]:
    return [bytes([number]) * 16 for number in range(count)]


@pytest.mark.parametrize("fp", [FP, FP2])
async def test_a_claim_does_what_the_table_of_states_says(redis_states: StatesInRedis, fp: bytes) -> None:
    now = redis_states.now_ms()
    before = present(now)
    for id, state in zip(ids(len(before)), before.values(), strict=True):
        redis_states.put(id, state)
    claims = await redis_states.keys.claim(redis_states.generation, SLOT, TERM, [(id, fp) for id in ids(len(before))])
    for id, (name, state), claim in zip(ids(len(before)), before.items(), claims, strict=True):
        wanted = states.claim(state, Claimed(SLOT, TERM, now, fp), freed, RETENTION_MS, LEAST_LEFT_MS)
        assert claim.outcome is wanted.outcome, name
        assert anytime(claim.state, now) == anytime(wanted.state, now), name
        assert anytime(redis_states.get(id), now) == anytime(wanted.state, now), name


@pytest.mark.parametrize("name", NAMES)
async def test_many_claims_in_one_call_end_as_each_would_alone(redis_states: StatesInRedis, name: str) -> None:
    """New keys are written many at a time, if none of them exists; the result must be that of single calls."""
    now = redis_states.now_ms()
    before: list[KeyState] = [None] * 250
    before[99] = before[240] = present(now)[name]
    for id, state in zip(ids(250), before, strict=True):
        redis_states.put(id, state)
    claims = await redis_states.keys.claim(redis_states.generation, SLOT, TERM, [(id, FP) for id in ids(250)])
    wanted = [states.claim(s, Claimed(SLOT, TERM, now, FP), freed, RETENTION_MS, LEAST_LEFT_MS) for s in before]
    assert [claim.outcome for claim in claims] == [each.outcome for each in wanted]
    states_wanted = [anytime(each.state, now) for each in wanted]
    assert [anytime(claim.state, now) for claim in claims] == states_wanted
    assert [anytime(redis_states.get(id), now) for id in ids(250)] == states_wanted


@pytest.mark.parametrize("present_id", [None, 1])
async def test_new_claims_are_written_with_one_msetex_where_the_server_has_it(
    redis_states: StatesInRedis, present_id: int | None
) -> None:
    """The answers are the same without MSETEX, so the server's call counts are compared."""
    now = redis_states.now_ms()
    if present_id is not None:
        redis_states.put(ids(3)[present_id], present(now)["delivered"])
    has = redis_states.has_msetex()
    before = redis_states.calls("set"), redis_states.calls("msetex")
    await redis_states.keys.claim(redis_states.generation, SLOT, TERM, [(id, FP) for id in ids(3)])
    one_by_one = not has or present_id is not None
    assert (redis_states.calls("set") - before[0], redis_states.calls("msetex") - before[1]) == (
        3 * one_by_one,
        1 * has,
    )


@pytest.mark.parametrize("first", NAMES)
async def test_an_atomic_batch_is_claimed_whole_or_not_at_all(redis_states: StatesInRedis, first: str) -> None:
    """A whole and two members, in each combination of states."""
    for second, third in product(NAMES, NAMES):
        await _claim_all(redis_states, (first, second, third))


async def _claim_all(redis_states: StatesInRedis, names: Sequence[str]) -> None:
    now = redis_states.now_ms()
    before = [present(now)[name] for name in names]
    for id, state in zip(ids(3), before, strict=True):
        redis_states.put(id, state)
    claim = await redis_states.keys.claim_all(redis_states.generation, SLOT, TERM, [(id, FP) for id in ids(3)])
    wanted, written = states.claim_all(before, [Claimed(SLOT, TERM, now, FP)] * 3, freed, RETENTION_MS, LEAST_LEFT_MS)
    assert claim.outcome is wanted.outcome, names
    assert anytime(claim.state, now) == anytime(wanted.state, now), names
    after = [anytime(redis_states.get(id), now) for id in ids(3)]
    assert after == [anytime(state, now) for state in written or before], names


async def test_a_mark_does_what_the_table_of_states_says(redis_states: StatesInRedis) -> None:
    now = redis_states.now_ms()
    before = present(now)
    marked = Delivered(now - 1_000, FP, "orders", 1, 77, now)
    for id, state in zip(ids(len(before)), before.values(), strict=True):
        redis_states.put(id, state)
    untouched = await redis_states.keys.mark(
        redis_states.generation, SLOT, TERM, TERM, TERM + 1, [(id, marked) for id in ids(len(before))]
    )
    wanted = [states.mark(state, SLOT, TERM, marked) for state in before.values()]
    assert [redis_states.get(id) for id in ids(len(before))] == wanted
    assert untouched == sum(state != marked for state in wanted)


async def test_a_release_does_what_the_table_of_states_says(redis_states: StatesInRedis) -> None:
    before = present(redis_states.now_ms())
    for id, state in zip(ids(len(before)), before.values(), strict=True):
        redis_states.put(id, state)
    await redis_states.keys.release(redis_states.generation, SLOT, TERM, ids(len(before)))
    assert [redis_states.get(id) for id in ids(len(before))] == [states.release(s, SLOT, TERM) for s in before.values()]


@pytest.mark.parametrize("age_ms", [500, 1_000, 1_500, RETENTION_MS - 1_000, RETENTION_MS + 1])
@pytest.mark.parametrize("batch", [False, True])
async def test_a_replay_does_what_the_table_of_states_says(
    redis_states: StatesInRedis, age_ms: int, batch: bool
) -> None:
    now = redis_states.now_ms()
    before, at = present(now), now - age_ms
    entry = DeliveredBatch(at, FP2, 5) if batch else Delivered(at, FP2, "ledgered", 0, 3, at)
    for id, state in zip(ids(len(before)), before.values(), strict=True):
        redis_states.put(id, state)
    await redis_states.keys.replay(redis_states.generation, [(id, entry) for id in ids(len(before))])
    wanted = [states.replay(state, entry, now, RETENTION_MS) for state in before.values()]
    assert dict(zip(before, [redis_states.get(id) for id in ids(len(before))], strict=True)) == dict(
        zip(before, wanted, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
async def test_many_replayed_entries_in_one_call_end_as_each_would_alone(
    redis_states: StatesInRedis, name: str
) -> None:
    """Entries with one time are written together, if none of them exists; the result must be that of single calls."""
    now = redis_states.now_ms()
    ages_ms = [500] * 120 + [1_500] * 30 + [RETENTION_MS + 1] * 5 + [500] * 40 + [700, 900, 700] * 15 + [500] * 10
    rows = [(id, delivered(number, now - ms)) for number, (id, ms) in enumerate(zip(ids(250), ages_ms, strict=True))]
    before: list[KeyState] = [None] * 250
    before[99] = before[140] = before[152] = before[249] = present(now)[name]
    for id, state in zip(ids(250), before, strict=True):
        redis_states.put(id, state)
    await redis_states.keys.replay(redis_states.generation, rows)
    wanted = [states.replay(state, entry, now, RETENTION_MS) for state, (_, entry) in zip(before, rows, strict=True)]
    assert [redis_states.get(id) for id in ids(250)] == wanted


@pytest.mark.parametrize("name", NAMES)
async def test_many_marks_in_one_call_end_as_each_would_alone(redis_states: StatesInRedis, name: str) -> None:
    now, other = redis_states.now_ms(), present(redis_states.now_ms())[name]
    before: list[KeyState] = [Claimed(SLOT, TERM, now - number // 120, FP2) for number in range(250)]
    before[99] = before[140] = before[249] = other
    ats = [state.at if state else now for state in before]
    rows = [(id, delivered(number, at)) for number, (id, at) in enumerate(zip(ids(250), ats, strict=True))]
    for id, state in zip(ids(250), before, strict=True):
        redis_states.put(id, state)
    untouched = await redis_states.keys.mark(redis_states.generation, SLOT, TERM, TERM, TERM + 1, rows)
    wanted = [states.mark(state, SLOT, TERM, entry) for state, (_, entry) in zip(before, rows, strict=True)]
    assert [redis_states.get(id) for id in ids(250)] == wanted
    assert untouched == sum(state != entry for state, (_, entry) in zip(wanted, rows, strict=True))


def delivered(number: int, at: int) -> Delivered | DeliveredBatch:
    """Make states of three lengths, in runs and one by one."""
    if number % 60 == 59:
        return DeliveredBatch(at, FP2, 5)
    return Delivered(at, FP2, "o" if number % 50 < 40 or number % 2 else "orders", 0, number, at)


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_state_unpacks_to_itself(name: str) -> None:
    state = present(1_700_000_000_000)[name]
    if state is not None:
        assert unpack(pack(state)) == state


@pytest.mark.parametrize("state", [b"Z" + bytes(60), b"D", b"Z" + bytes(8) + FP + bytes(20)], ids=repr)
async def test_a_state_that_no_script_writes_is_unreadable(redis_states: StatesInRedis, state: bytes) -> None:
    """Such a key is neither delivered nor in conflict; no claim of it stands, and it keeps its state."""
    key = redis_states.prefix + b"k" + ids(1)[0]
    redis_states.client.set(key, state)
    claims = await redis_states.keys.claim(redis_states.generation, SLOT, TERM, [(id, FP) for id in ids(2)])
    assert [claim.outcome for claim in claims] == [states.Outcome.UNREADABLE, states.Outcome.NEW]
    assert (
        await redis_states.keys.claim_all(redis_states.generation, SLOT, TERM, [(ids(1)[0], FP)])
    ).outcome is states.Outcome.UNREADABLE
    with pytest.raises(StoreBug, match="the state of a key"):
        await redis_states.keys.find(redis_states.generation, ids(1)[0])
    assert redis_states.client.get(key) == state


async def test_a_script_that_fails_is_a_bug_and_no_store_that_is_lost(redis_states: StatesInRedis) -> None:
    redis_states.client.set(redis_states.prefix + b"f", b"no hash")
    with pytest.raises(StoreBug, match="WRONGTYPE"):
        await redis_states.keys.claim(redis_states.generation, SLOT, TERM, [(ids(1)[0], FP)])
    redis_states.client.delete(redis_states.prefix + b"f")
    redis_states.client.set(redis_states.prefix + b"k" + ids(1)[0], b"C")
    with pytest.raises(StoreBug, match="user_script"):
        await redis_states.keys.find(redis_states.generation, ids(1)[0])
    with pytest.raises(StoreBug, match="user_script"):
        await redis_states.keys._call("no such operation", f"1 {redis_states.generation.store}", 0)
