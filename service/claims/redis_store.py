"""Claims and answers in Redis: the one door to it. The rules stand in states.py, the scripts in claims.lua."""

import asyncio
import hashlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from struct import Struct
from struct import error as StructError  # noqa: N812 - the module's own name says nothing
from typing import Any, Final, Protocol, Self

import structlog
from hiredis import pack_command
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from service.claims.redis_connections import Connections
from service.claims.redis_requirements import NO_EVICTION, SECTIONS, refusals
from service.claims.states import Claim, Claimed, Delivered, DeliveredBatch, KeyState, Outcome
from service.contract import PREFIX, SettingsError
from service.contract.wire import ID_BYTES
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.problems import Fenced, StoreAway, StoreBug, StoreIncomplete, StoreLost, StoreUnanswered

log = structlog.get_logger(__name__)

# Entries in one script call of a replay: some 10 ms of Redis's time, so that the claims of others get their turn.
REPLAY_CHUNK: Final = 2_000
# Of them, those that the script unpacks and writes in one go, for the reasons of AT_ONCE in claims.lua.
UNPACKED_AT_ONCE: Final = 100
# Of a store recovery: so many that Redis has something to write while the event loop unpacks what Kafka sent.
REPLAYS_AT_ONCE: Final = 8
# Look-ups of single keys: however many there are, connections are left for what is written, and for the heartbeat.
FINDS_AT_ONCE: Final = 32
# Calls that failed, by the name under which they are counted.
ERRORS: Final[dict[type[Exception], str]] = {
    StoreLost: "lost",
    StoreIncomplete: "incomplete",
    StoreAway: "away",
    StoreUnanswered: "unanswered",
    StoreBug: "bug",
}

# What a server says to a number of a database that it does not have, or that a cluster never has.
_NO_DATABASE: Final = ("DB index is out of range", "SELECT is not allowed")

_AT = Struct(">Q")
_CLAIMED = Struct(">cHQQ8s")
_DELIVERED = Struct(">cQ8sIQQ")
_BATCH = Struct(">cQ8sI")

Row = tuple[bytes, Delivered | DeliveredBatch]


@dataclass(frozen=True, slots=True)
class StoreGeneration:
    """The generation and the store for which a script is meant; a script for any other writes nothing."""

    number: int
    store: str


@dataclass(frozen=True, slots=True)
class Identity:
    """The server that answers: `store` is its run_id/master_replid, `generation` what it holds (None after a flush).

    `incomplete`: a script found that the server lacks keys of this generation. `evicts`: the server's maxmemory-policy,
    "" for noeviction.
    """

    store: str
    generation: StoreGeneration | None
    incomplete: bool = False
    evicts: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a key without claiming it; `dead` tells of a claim that it was never written."""

    state: KeyState
    dead: bool = False
    leased: bool = True


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One heartbeat's view: live processes; each slot m(ine), t(aken), f(ree) or d(ead); `freed` of those held.

    It has all slots that were asked for, and those beyond that a process with a higher SLOTS_MAX has taken.
    """

    members: int
    slots: str
    freed: Mapping[int, int] = field(default_factory=dict)


class KeyStore(Protocol):
    """A store of claims and results. The service's is Redis; the tests' in-memory store passes the same suite.

    All calls but `who` raise StoreLost where the server is not the store of the generation, or lacks keys of it:
    nothing was written. They raise StoreAway where the server refused before writing, StoreUnanswered where the script
    may still run later, and StoreBug for an answer or a state that this version does not know.
    """

    async def who(self) -> Identity: ...
    async def clock_ms(self) -> int:
        """The store's clock, ms since the Unix epoch: accepted_at and every expiry are of it."""

    async def resolve_again(self) -> None:
        """Forget which server the address led to; the next call asks again who is primary."""

    async def claim(
        self, generation: StoreGeneration, slot: int, term: int, asked: Sequence[tuple[bytes, bytes]]
    ) -> list[Claim]:
        """Claim (id, fingerprint) pairs, in order, in one step. Raises Fenced where `freed` of the slot is not term.

        A store that takes no more writes (it is full) tells what it knows, and answers REFUSED for the others.
        """

    async def claim_all(
        self, generation: StoreGeneration, slot: int, term: int, asked: Sequence[tuple[bytes, bytes]]
    ) -> Claim:
        """Claim an atomic batch, the whole first and then its members, or nothing of it. Raises Fenced as claim."""

    async def mark(
        self, generation: StoreGeneration, slot: int, term: int, previous: int, offset: int, rows: Sequence[Row]
    ) -> int:
        """The ledger record at `offset`, after the one at `previous`, is committed. Answers states not touched."""

    async def release(self, generation: StoreGeneration, slot: int, term: int, ids: Sequence[bytes]) -> None: ...
    async def find(self, generation: StoreGeneration, id: bytes) -> Found: ...
    async def find_all(self, generation: StoreGeneration, ids: Sequence[bytes]) -> list[KeyState]: ...
    async def applied(self, generation: StoreGeneration, slot: int) -> int | None: ...
    async def replay(
        self, generation: StoreGeneration, rows: Sequence[Row], free: tuple[int, int] | None = None
    ) -> None:
        """Write ledger entries, then, in the step of the last, raise `freed` and `applied` of (slot, term)."""

    async def take(self, generation: StoreGeneration, slot: int, token: str) -> bool: ...
    async def give_back(self, generation: StoreGeneration, slot: int, token: str, clean: bool) -> None: ...
    async def heartbeat(
        self, generation: StoreGeneration, token: str, slots: int, held: Mapping[int, int]
    ) -> Heartbeat:
        """Renew the leases; `held` has each slot with what its holder knows of `applied`, -1 where it knows nothing."""

    async def leave(self, generation: StoreGeneration, token: str) -> None: ...

    async def recover(self, seen: Identity, nonce: str) -> bool:
        """Begin a store recovery: False where another's nonce stands, or one has ended since `seen` was seen.

        Each call below raises StoreLost without the nonce.
        """

    async def recover_read(self, store: str, nonce: str, slots: int) -> list[int | None]: ...
    async def recover_replay(self, store: str, nonce: str, rows: Sequence[Row]) -> None:
        """Write ledger entries, REPLAY_CHUNK at most. Called many times at once, each waits for its turn."""

    async def recover_end(self, store: str, nonce: str, number: int, freed: Sequence[int]) -> None: ...
    async def recover_abandon(self, store: str, nonce: str) -> None: ...


class RedisKeys:
    """KeyStore in Redis, one script for all of it. The client's own retries are off: a repeat is a second call."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        retention_ms: int,
        least_left_ms: int,
        lease_ttl_ms: int,
        timeout_s: float,
        telemetry: Telemetry,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raises SettingsError as `check_url` does."""
        self._connections = Connections(_maker_of(url, timeout_s), timeout_s, tls)
        self._prefix = f"{{{namespace}:0}}"
        self._key = f"{self._prefix}k".encode()
        # A key and its state, without the topic.
        self._entry = Struct(f">{len(self._key)}s{ID_BYTES}s" + _DELIVERED.format.removeprefix(">"))
        self._retention_ms = retention_ms
        self._least_left_ms = least_left_ms
        self._lease_ttl_ms = lease_ttl_ms
        self._timeout_s = timeout_s
        self._errors = telemetry.redis_errors
        self._bugs = Incident(log, "bug in what Redis says")
        self._claims_seen: tuple[StoreGeneration | None, int] = (
            None,
            0,
        )  # the most calls that have claimed something, in that generation
        self._incomplete: StoreGeneration | None = None  # in which the store was met that lacks something
        self._finding = asyncio.Semaphore(FINDS_AT_ONCE)
        self._replaying = asyncio.Semaphore(REPLAYS_AT_ONCE)
        self._script = (files("service.claims") / "claims.lua").read_text()
        self._sha = hashlib.sha1(self._script.encode()).hexdigest()  # noqa: S324 - EVALSHA's own name for a script

    async def close(self) -> None:
        await self._connections.close_idle()

    async def resolve_again(self) -> None:
        await self.close()

    async def check(self) -> None:
        """Refuse a server that cannot keep the promise: SettingsError, a line for each thing to change."""
        try:
            info = await self._info(*SECTIONS)
        except (StoreAway, StoreUnanswered) as error:
            if isinstance(error.__cause__, AuthenticationError):  # NOAUTH, whose text tells of commands, or WRONGPASS
                raise SettingsError(
                    f"{PREFIX}REDIS has not the user and password that the server asks for: "
                    "set redis://user:password@host:port/db, without `user` where it has but a password"
                ) from None
            if any(words in str(error) for words in _NO_DATABASE):
                raise SettingsError(f"{PREFIX}REDIS names a database that this server does not have: set /0") from None
            raise
        if wrong := refusals(info):
            raise SettingsError("\n".join(wrong))

    async def memory(self) -> tuple[int, int]:
        """Bytes that Redis uses, and its limit: maxmemory, or the memory of its machine where that is not set."""
        info = await self._info("memory")
        limit = int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))
        return int(info.get("used_memory", 0)), limit

    # ---------------------------------------------------------------------------------------------- operations

    async def who(self) -> Identity:
        store, held, policy = (part.decode() for part in await self._call("who"))
        evicts = "" if policy == NO_EVICTION else policy
        if not held:
            return Identity(store, None, evicts=evicts)
        number, _, named = held.partition(" ")
        generation = StoreGeneration(int(number), named)
        return Identity(store, generation, generation == self._incomplete, evicts)

    async def clock_ms(self) -> int:
        seconds, micros = await self._send("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def claim(
        self, generation: StoreGeneration, slot: int, term: int, asked: Sequence[tuple[bytes, bytes]]
    ) -> list[Claim]:
        blob = b"".join(id + fp for id, fp in asked)
        count, *answers = await self._call_in(
            generation, "claim", slot, term, self._retention_ms, self._least_left_ms, blob
        )
        self._note_claims(generation, count)
        if b"E" in answers:
            self._errors.labels(ERRORS[StoreAway]).inc()
        return [self._claim(answer, slot, term, id, fp) for answer, (id, fp) in zip(answers, asked, strict=True)]

    async def claim_all(
        self, generation: StoreGeneration, slot: int, term: int, asked: Sequence[tuple[bytes, bytes]]
    ) -> Claim:
        blob = b"".join(id + fp for id, fp in asked)
        count, answer = await self._call_in(
            generation, "claim_all", slot, term, self._retention_ms, self._least_left_ms, blob
        )
        self._note_claims(generation, count)
        return self._claim(answer, slot, term, *asked[0])

    def _claim(self, answer: bytes, slot: int, term: int, id: bytes, fp: bytes) -> Claim:
        """What a script answers to one claim. What cannot be read is told of, and no other claim's matter."""
        try:
            return self._claim_of(answer, slot, term, fp)
        except CorruptState as error:
            self._bug(f"claim of {id.hex()}: {error}")
            return Claim(Outcome.UNREADABLE, Claimed(slot, term, 0, fp))

    @staticmethod
    def _claim_of(answer: bytes, slot: int, term: int, fp: bytes) -> Claim:
        match answer[:1]:
            case b"N":
                return Claim(Outcome.NEW, Claimed(slot, term, _AT.unpack_from(answer, 1)[0], fp))
            case b"T":
                return Claim(Outcome.TAKEN_OVER, Claimed(slot, term, _AT.unpack_from(answer, 1)[0], fp))
            case b"D" | b"B":
                return Claim(Outcome.DELIVERED, unpack(answer))
            case b"X":
                return Claim(Outcome.CONFLICT, unpack(answer[1:]))
            case b"E":
                return Claim(Outcome.REFUSED, Claimed(slot, term, 0, fp))
            case b"0" | b"1" as leased:
                return Claim(Outcome.IN_PROGRESS, unpack(answer[1:]), leased=leased == b"1")
        raise CorruptState.of(answer)

    async def mark(
        self, generation: StoreGeneration, slot: int, term: int, previous: int, offset: int, rows: Sequence[Row]
    ) -> int:
        head = ("mark", slot, term, self._retention_ms, previous, offset)
        (untouched,) = await self._call_in(generation, *head, *self._delivered(rows))
        return int(untouched)

    async def release(self, generation: StoreGeneration, slot: int, term: int, ids: Sequence[bytes]) -> None:
        await self._call_in(generation, "release", slot, term, b"".join(ids))

    async def find(self, generation: StoreGeneration, id: bytes) -> Found:
        try:
            async with asyncio.timeout(self._timeout_s), self._finding:
                answer = await self._call_in(generation, "find", id)
        except TimeoutError as error:
            raise StoreAway(f"Redis: more than {FINDS_AT_ONCE} look-ups wait for their answers") from error
        match answer:
            case [state, freed, leased]:
                claimed = self._unpack(id, state)
                dead = isinstance(claimed, Claimed) and int(freed) > claimed.term
                return Found(claimed, dead, bool(leased))
            case [state]:
                return Found(self._unpack(id, state))
        return Found(None)

    async def find_all(self, generation: StoreGeneration, ids: Sequence[bytes]) -> list[KeyState]:
        states = await self._call_in(generation, "find_all", b"".join(ids))
        return [self._unpack(id, state) if state else None for id, state in zip(ids, states, strict=True)]

    async def applied(self, generation: StoreGeneration, slot: int) -> int | None:
        (offset,) = await self._call_in(generation, "applied", slot)
        return None if offset < 0 else int(offset)

    async def replay(
        self, generation: StoreGeneration, rows: Sequence[Row], free: tuple[int, int] | None = None
    ) -> None:
        head = ("replay", self._retention_ms)
        *others, last = chunks(rows)
        for chunk in others:
            await self._call_in(generation, *head, "", "", *self._delivered(chunk))
        await self._call_in(generation, *head, *(free or ("", "")), *self._delivered(last))

    async def take(self, generation: StoreGeneration, slot: int, token: str) -> bool:
        (mine,) = await self._call_in(generation, "take", slot, token, self._lease_ttl_ms)
        return bool(mine)

    async def give_back(self, generation: StoreGeneration, slot: int, token: str, clean: bool) -> None:
        await self._call_in(generation, "give_back", slot, token, int(clean))

    async def heartbeat(
        self, generation: StoreGeneration, token: str, slots: int, held: Mapping[int, int]
    ) -> Heartbeat:
        pairs = [number for slot_and_applied in held.items() for number in slot_and_applied]
        count, members, view, freed = await self._call_in(
            generation, "heartbeat", token, self._lease_ttl_ms, slots, *pairs
        )
        self._note_claims(generation, count)
        return Heartbeat(int(members), view.decode(), dict(zip(held, freed, strict=True)))

    async def leave(self, generation: StoreGeneration, token: str) -> None:
        await self._call_in(generation, "leave", token)

    async def recover(self, seen: Identity, nonce: str) -> bool:
        held = "" if seen.generation is None else f"{seen.generation.number} {seen.generation.store}"
        (first,) = await self._call("recover", seen.store, nonce, self._nonce_ttl_ms, held)
        return bool(first)

    async def recover_read(self, store: str, nonce: str, slots: int) -> list[int | None]:
        offsets = await self._call("recover_read", store, nonce, self._nonce_ttl_ms, slots)
        return [None if offset < 0 else int(offset) for offset in offsets]

    async def recover_replay(self, store: str, nonce: str, rows: Sequence[Row]) -> None:
        packed = self._delivered(rows)
        del rows  # packed they take a fifth of the memory while they wait
        async with self._replaying:
            await self._call("recover_replay", store, nonce, self._nonce_ttl_ms, self._retention_ms, *packed)

    async def recover_end(self, store: str, nonce: str, number: int, freed: Sequence[int]) -> None:
        pairs = [number for slot_and_offset in enumerate(freed) for number in slot_and_offset]
        await self._call("recover_end", store, nonce, number, *pairs)

    async def recover_abandon(self, store: str, nonce: str) -> None:
        await self._call("recover_abandon", store, nonce)

    def _delivered(self, rows: Sequence[Row]) -> list[int | str | bytes]:
        """As claims.lua takes delivered states: for each few of one time and size that time, their format, and they."""
        groups: list[int | str | bytes] = []
        parts: list[bytes] = []
        at = size = 0
        pack_entry, key = self._entry.pack, self._key

        def close() -> None:
            if parts:
                format = f"c{len(key) + ID_BYTES}c{size - len(key) - ID_BYTES}"
                groups.extend((at, len(parts) // 2 * format, b"".join(parts)))
                parts.clear()

        for id, state in rows:
            if isinstance(state, Delivered):  # as `pack` does, in one go: a store recovery has millions of them
                rest = state.topic.encode()
                entry = pack_entry(key, id, b"D", state.at, state.fp, state.partition, state.offset, state.ts)
            else:
                entry, rest = key + id, pack(state)
            if state.at != at or len(entry) + len(rest) != size or len(parts) == 2 * UNPACKED_AT_ONCE:
                close()
                at, size = state.at, len(entry) + len(rest)
            parts += (entry, rest)
        close()
        return groups

    @property
    def _nonce_ttl_ms(self) -> int:
        # A recovery renews it with each script; a dead one's is gone soon after a lease would be.
        return 5 * self._lease_ttl_ms

    # ----------------------------------------------------------------------------------------------- transport

    async def _info(self, *sections: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for section in sections:  # several at once only since Redis 7
            lines = (await self._send("INFO", section)).decode().splitlines()
            parts = (line.partition(":") for line in lines if ":" in line)
            found |= {name: value.strip() for name, _, value in parts}
        return found

    async def _call_in(self, generation: StoreGeneration, operation: str, *arguments: str | int | bytes) -> list[Any]:
        """`_call` of an operation for a generation, with the most claims seen in it."""
        of, count = self._claims_seen
        seen = count if of == generation else 0
        try:
            return await self._call(operation, f"{generation.number} {generation.store}", seen, *arguments)
        except StoreIncomplete:
            self._incomplete = generation
            raise

    def _note_claims(self, generation: StoreGeneration, count: int) -> None:
        of, seen = self._claims_seen
        if of == generation:
            self._claims_seen = generation, max(seen, count)
        elif of is None or of.number < generation.number:
            self._claims_seen = generation, count

    async def _call(self, operation: str, *arguments: str | int | bytes) -> list[Any]:
        """Run one operation of claims.lua; the rest of its answer after OK. What fails is counted."""
        try:
            return await self._run(operation, *arguments)
        except StoreBug as error:
            self._bugs.add(error, bug=True)
            self._errors.labels(ERRORS[StoreBug]).inc()
            raise
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            self._errors.labels(ERRORS[type(error)]).inc()
            raise

    async def _run(self, operation: str, *arguments: str | int | bytes) -> list[Any]:
        try:
            answer = await self._send("EVALSHA", self._sha, 1, self._prefix, operation, *arguments)
        except NoScriptError:  # said before anything ran
            answer = await self._send("EVAL", self._script, 1, self._prefix, operation, *arguments)
        match answer:
            case [b"OK", *rest]:
                return rest
            case [b"FENCED"]:
                raise Fenced(f"{operation}: the slot was taken by another")
            case [b"REWOUND"]:
                raise StoreIncomplete(f"{operation}: the store is an older copy of what this process knew")
            case [b"EVICTED"]:
                raise StoreIncomplete(f"{operation}: Redis has evicted keys")
            case [b"STORE_LOST"]:
                raise StoreLost(f"{operation}: the server that answers is not the store of this generation")
            case _:
                raise StoreBug(f"{operation}: the script answers {answer!s:.200}, which this version does not know")

    def _unpack(self, id: bytes, state: bytes) -> Claimed | Delivered | DeliveredBatch:
        """A key's state. Raises StoreBug where it cannot be read."""
        try:
            return unpack(state)
        except CorruptState as error:
            raise self._bug(f"{id.hex()}: {error}") from error

    def _bug(self, text: str) -> StoreBug:
        """Log and count something that Redis holds and no script writes."""
        error = StoreBug(text)
        self._bugs.add(error, bug=True)
        self._errors.labels(ERRORS[StoreBug]).inc()
        return error

    async def _send(self, *command: str | int | bytes) -> Any:
        """One command and its answer on a connection of its own for that time."""
        connection = await self._connections.take()
        answered = False  # in full: what is still to come would be read by the next user of the connection
        try:
            async with asyncio.timeout(self._timeout_s):
                packed = pack_command(command)  # type: ignore[arg-type]  # its stub takes one word
                await connection.send_packed_command(packed, check_health=False)
                answer = await connection.read_response()
            answered = True
            return answer
        except (NoScriptError, ReadOnlyError, MasterDownError) as error:  # redis-py takes their codes off the text
            answered = True
            if isinstance(error, NoScriptError):
                raise
            raise StoreAway(f"Redis: {error}") from error
        except ResponseError as error:
            answered = True
            if str(error).startswith(("OOM", "BUSY", "NOREPLICAS", "READONLY", "LOADING", "command not")):
                raise StoreAway(f"Redis: {error}") from error
            failed = StoreBug if _is_bug(str(error)) else StoreUnanswered
            raise failed(f"Redis: {error}") from error
        except BusyLoadingError as error:
            raise StoreAway(f"Redis: {error}") from error
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnanswered(f"Redis did not answer: {str(error) or type(error).__name__}") from error
        finally:
            await self._connections.give_back(connection, usable=answered)


def check_url(url: str) -> None:
    """SettingsError where a URL that is one by itself asks for something after its `?` that redis-py does not take."""
    _maker_of(url, None)


def _maker_of(url: str, connect_timeout_s: float | None) -> ConnectionPool:
    """What makes connections to where a URL leads; none is opened. Raises SettingsError."""
    try:
        pool = ConnectionPool.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=connect_timeout_s
        )
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, AttributeError, RedisError):  # its text may have a part of a password in it
        raise SettingsError(
            f"{PREFIX}REDIS is wrong: set after its ? only what redis-py takes in a URL, with values of its kind"
        ) from None
    # Whatever the URL says: nothing is sent twice behind our back, and answers are bytes.
    pool.connection_kwargs |= {"retry_on_error": [], "retry_on_timeout": False, "decode_responses": False}
    return pool


def pack(state: Claimed | Delivered | DeliveredBatch) -> bytes:
    """A key's state as claims.lua keeps it."""
    match state:
        case Claimed(slot, term, at, fp):
            return _CLAIMED.pack(b"C", slot, term, at, fp)
        case Delivered(at, fp, topic, partition, offset, ts):
            return _DELIVERED.pack(b"D", at, fp, partition, offset, ts) + topic.encode()
        case DeliveredBatch(at, fp, count):
            return _BATCH.pack(b"B", at, fp, count)


class CorruptState(ValueError):
    """What Redis holds under a key is none of the states that claims.lua writes."""

    @classmethod
    def of(cls, raw: bytes) -> Self:
        return cls(f"the state of a key is {raw[:40]!r} ({len(raw)} bytes), which this version does not write")


def unpack(raw: bytes) -> Claimed | Delivered | DeliveredBatch:
    """The inverse of `pack`. Raises CorruptState for what `pack` does not make."""
    try:
        match raw[:1]:
            case b"C":
                return Claimed(*_CLAIMED.unpack(raw)[1:])
            case b"B":
                return DeliveredBatch(*_BATCH.unpack(raw)[1:])
            case b"D":
                _, at, fp, partition, offset, ts = _DELIVERED.unpack_from(raw)
                return Delivered(at, fp, raw[_DELIVERED.size :].decode(), partition, offset, ts)
    except (StructError, UnicodeDecodeError) as error:
        raise CorruptState.of(raw) from error
    raise CorruptState.of(raw)


def _is_bug(error: str) -> bool:
    """Is it the script itself that failed, or a key in it that is of another kind? A server's own state is neither."""
    return "user_script" in error and error.startswith(("ERR", "WRONGTYPE", "user_script", "Error running", "@user"))


def chunks(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """The rows as one script call of a replay takes them; at least one chunk, as the last call does more than write."""
    return [rows[start : start + REPLAY_CHUNK] for start in range(0, len(rows), REPLAY_CHUNK)] or [()]
