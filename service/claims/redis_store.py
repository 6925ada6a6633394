"""Claims and results in Redis. The rules are in states.py, the scripts in claims.lua."""

import asyncio
import hashlib
import re
import ssl
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import structlog
from hiredis import pack_command
from redis.asyncio import Connection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from service.claims.keys import Found, Heartbeat, ServerIdentity, StoreGeneration, chunks
from service.claims.rates import Ask, Granted
from service.claims.redis_connections import FollowingConnections, connections_of
from service.claims.redis_requirements import NO_EVICTION, SECTIONS, Demand, script_demand, unmet_demands
from service.claims.redis_seeds import Address, WronglyAddressed
from service.claims.state_codec import AT, CorruptState, RowPacker, unpack, unpack_claim
from service.claims.states import Claim, Claimed, Delivered, DeliveredBatch, KeyState, Outcome, Row
from service.contract import PREFIX, SettingsError
from service.contract.wire.versions import newer_version
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.problems import Fenced, StoreAway, StoreBug, StoreIncomplete, StoreLost, StoreUnanswered
from service.core.shared_timeout import SharedTimeout

log = structlog.get_logger(__name__)

# The version of the keys' layout, which is part of the generation's key from 2 on (claims.lua).
LAYOUT: Final = 1
# Replay calls of a store recovery at once: enough to keep Redis busy while the event loop decodes records.
REPLAYS_AT_ONCE: Final = 8
# Look-ups of single keys at once, so that connections are left for claims, marks and the heartbeat.
FINDS_AT_ONCE: Final = 32
# Failed calls, by the label under which they are counted.
ERRORS: Final[dict[type[Exception], str]] = {
    StoreLost: "lost",
    StoreIncomplete: "incomplete",
    StoreAway: "away",
    StoreUnanswered: "unanswered",
    StoreBug: "bug",
}

# Error texts for a database number that the server does not have; a cluster has only 0.
_NO_DATABASE: Final = ("DB index is out of range", "SELECT is not allowed")

# Error texts of a server that takes no (more) writes; Redis 6.2 wraps that of a command in a script. Redis refuses only
# the first write of a script, so nothing was written. redis-py removes the code OOM.
_TAKES_NO_WRITES: Final = re.compile(
    r"(?:^|@user_script: ?\d+: -)(?:OOM|BUSY|NOREPLICAS|READONLY|LOADING|MASTERDOWN|MISCONF)\b|^command not allowed"
    # A cluster without a majority, or a hash slot that is being moved: refused at the first access too.
    r"|Script attempted to execute a (?:write )?command while the cluster is down"
    r"|Script attempted to access a (?:slot not served|non local key)"
)


class StoreMoved(StoreAway):
    """Another node of the cluster serves the keys of the namespace: `primary`."""

    def __init__(self, text: str, primary: Address) -> None:
        super().__init__(text)
        self.primary = primary


class RedisKeys:
    """Keys in Redis, by one script. redis-py's retries are off, because a repeated script would run twice."""

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
        sentinel_login: tuple[str, str] = ("", ""),
    ) -> None:
        """Connect to nothing yet; `url` is an address as RedisAddress reads it. Raises SettingsError as `check_url`."""
        self._prefix = f"{{{namespace}:0}}"
        self._connections = connections_of(url, self._prefix, timeout_s, tls, sentinel_login)
        self._rows = RowPacker(f"{self._prefix}k".encode(), retention_ms)
        self._retention_ms = retention_ms
        self._least_left_ms = least_left_ms
        self._lease_ttl_ms = lease_ttl_ms
        self._timeout_s = timeout_s
        self._command_timeout = SharedTimeout(timeout_s)
        self._errors = telemetry.redis_errors
        self._bugs = Incident(log, "bug in what Redis says")
        # The highest number of claiming calls that a reply of this generation had (P "c" in claims.lua). A server that
        # reports a smaller one is an older copy of the store.
        self._claims_seen: tuple[StoreGeneration | None, int] = (None, 0)
        self._incomplete: StoreGeneration | None = None  # the last generation whose store lacks keys
        self._finding = asyncio.Semaphore(FINDS_AT_ONCE)
        self._replaying = asyncio.Semaphore(REPLAYS_AT_ONCE)
        self._script = (files("service.claims") / "claims.lua").read_text()
        self._sha = _sha_of(self._script)
        self._rates_script = (files("service.claims") / "rates.lua").read_text()
        self._rates_sha = _sha_of(self._rates_script)

    async def close(self) -> None:
        await self._connections.close()

    async def resolve_again(self) -> None:
        await self._connections.resolve_again()

    async def check(self) -> None:
        """Raise SettingsError for a server that cannot keep the guarantee, with a line for each thing to change.

        Raises StoreAway for a replica that sentinels or a cluster name: they soon name its primary.
        """
        try:
            await self._connections.refresh()
            info = await self._info(*SECTIONS)
        except WronglyAddressed as error:
            raise SettingsError(str(error)) from None
        except (StoreAway, StoreUnanswered) as error:
            if isinstance(error.__cause__, AuthenticationError):  # NOAUTH, whose text names commands, or WRONGPASS
                raise SettingsError(
                    f"{PREFIX}REDIS has not the user and password that the server asks for: "
                    "set redis://user:password@host:port/db, without `user` where it has but a password"
                ) from None
            if any(words in str(error) for words in _NO_DATABASE):
                raise SettingsError(f"{PREFIX}REDIS names a database that this server does not have: set /0") from None
            raise
        if self.follows and info.get("role") != "master":
            raise StoreAway(f"Redis: the server that is named as the primary has the role {info.get('role')}")
        if wrong := unmet_demands(info, await self.try_script()):
            raise SettingsError("\n".join(wrong))

    @property
    def follows(self) -> bool:
        """Whether sentinels or the nodes of a cluster tell which server is the primary."""
        return isinstance(self._connections, FollowingConnections)

    async def try_script(self) -> Demand:
        """Find out whether the server runs a script on a key of the namespace. Raises StoreAway, StoreUnanswered."""
        try:
            await self._run("who")
        except (StoreAway, StoreUnanswered) as error:
            cause = error.__cause__
            if isinstance(cause, ResponseError) and (isinstance(cause, MovedError) or not isinstance(error, StoreAway)):
                return script_demand(cause)
            raise
        return script_demand(None)

    async def memory(self) -> tuple[int, int]:
        """Read the bytes that Redis uses, and its limit: maxmemory, or if that is not set its machine's memory."""
        info = await self._info("memory")
        limit = int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))
        return int(info.get("used_memory", 0)), limit

    # ---------------------------------------------------------------------------------------------- operations

    async def who(self) -> ServerIdentity:
        await self._connections.refresh()
        store, held, policy = (part.decode(errors="replace") for part in await self._call("who"))
        evicts = "" if policy == NO_EVICTION else policy
        if not held:
            return ServerIdentity(store, None, evicts=evicts)
        first, _, rest = held.partition(" ")
        if first.startswith("v"):
            raise newer_version("Redis holds keys", first[1:], (LAYOUT,))
        if not (first.isascii() and first.isdigit()):
            raise self._bug(
                f"{self._prefix}g is {held!r:.80}, which no release has written: stop all processes and delete "
                f"the keys that begin with {self._prefix}"
            )
        generation = StoreGeneration(int(first), rest)
        return ServerIdentity(store, generation, generation == self._incomplete, evicts)

    async def clock_ms(self) -> int:
        seconds, micros = await self._send("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def claim(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttls_s: Sequence[int] = (),
    ) -> list[Claim]:
        packed = [id + fp for id, fp in asked]
        runs: list[int | bytes] = []
        if not ttls_s:
            runs += (self._retention_ms, b"".join(packed))
        for ttl_s, run in groupby(zip(ttls_s, packed, strict=True) if ttls_s else (), itemgetter(0)):
            runs += (self._ttl_ms(ttl_s), b"".join([pair for _, pair in run]))
        count, *answers = await self._call_in(generation, "claim", slot, term, self._least_left_ms, *runs)
        self._note_claims(generation, count)
        if b"E" in answers:
            self._errors.labels(ERRORS[StoreAway]).inc()
        at_of, new = AT.unpack_from, Outcome.NEW
        return [
            Claim(new, Claimed(slot, term, at_of(answer, 1)[0], fp))  # the usual case, without a call
            if answer.startswith(b"N")
            else self._claim(answer, slot, term, id, fp)
            for answer, (id, fp) in zip(answers, asked, strict=True)
        ]

    async def claim_all(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttl_s: int = 0,
    ) -> Claim:
        blob = b"".join([id + fp for id, fp in asked])
        count, answer = await self._call_in(
            generation, "claim_all", slot, term, self._least_left_ms, self._ttl_ms(ttl_s), blob
        )
        self._note_claims(generation, count)
        if answer == b"E":
            self._errors.labels(ERRORS[StoreAway]).inc()
        return self._claim(answer, slot, term, *asked[0])

    def _claim(self, answer: bytes, slot: int, term: int, id: bytes, fp: bytes) -> Claim:
        """Decode a script's reply to one claim; UNREADABLE, logged and counted, for a state that cannot be decoded."""
        try:
            return unpack_claim(answer, slot, term, fp)
        except CorruptState as error:
            self._bug(f"claim of {id.hex()}: {error}")
            return Claim(Outcome.UNREADABLE, Claimed(slot, term, 0, fp))

    async def mark(
        self, generation: StoreGeneration, slot: int, term: int, previous: int, offset: int, rows: Sequence[Row]
    ) -> int:
        head = ("mark", slot, term, previous, offset)
        (untouched,) = await self._call_in(generation, *head, *self._rows.packed(rows))
        return int(untouched)

    async def release(self, generation: StoreGeneration, slot: int, term: int, ids: Sequence[bytes]) -> None:
        await self._call_in(generation, "release", slot, term, b"".join(ids))

    async def find(self, generation: StoreGeneration, id: bytes) -> Found:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._finding.acquire()
        except TimeoutError as error:
            raise StoreAway(f"Redis: more than {FINDS_AT_ONCE} look-ups wait for their answers") from error
        try:
            answer = await self._call_in(generation, "find", id)  # has a timeout, and errors, of its own
        finally:
            self._finding.release()
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
        *others, last = chunks(rows)
        for chunk in others:
            await self._call_in(generation, "replay", "", "", *self._rows.packed(chunk))
        await self._call_in(generation, "replay", *(free or ("", "")), *self._rows.packed(last))

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

    async def recover(self, seen: ServerIdentity, nonce: str) -> bool:
        held = "" if seen.generation is None else f"{seen.generation.number} {seen.generation.store}"
        (first,) = await self._call("recover", seen.store, nonce, self._nonce_ttl_ms, held)
        return bool(first)

    async def recover_read(self, store: str, nonce: str, slots: int) -> list[int | None]:
        offsets = await self._call("recover_read", store, nonce, self._nonce_ttl_ms, slots)
        return [None if offset < 0 else int(offset) for offset in offsets]

    async def recover_replay(self, store: str, nonce: str, rows: Sequence[Row]) -> None:
        packed = self._rows.packed(rows)
        del rows  # packed rows take a fifth of the memory while they wait
        async with self._replaying:
            await self._call("recover_replay", store, nonce, self._nonce_ttl_ms, *packed)

    async def recover_end(self, store: str, nonce: str, number: int, freed: Sequence[int]) -> None:
        pairs = [number for slot_and_offset in enumerate(freed) for number in slot_and_offset]
        await self._call("recover_end", store, nonce, number, *pairs)

    async def recover_abandon(self, store: str, nonce: str) -> None:
        await self._call("recover_abandon", store, nonce)

    def _ttl_ms(self, ttl_s: int) -> int:
        """Return a key's retention in ms; the service's own for 0."""
        return ttl_s * 1000 or self._retention_ms

    @property
    def _nonce_ttl_ms(self) -> int:
        # A recovery renews the nonce with each script; a dead recovery's expires soon after its leases.
        return 5 * self._lease_ttl_ms

    # ------------------------------------------------------------------------------------------------- rates

    async def take_tokens(self, asks: Sequence[Ask]) -> list[Granted]:
        """Take tokens of buckets that all processes share, in one script. Raises StoreAway, StoreUnanswered."""
        words = [word for ask in asks for word in (ask.id, repr(ask.rate), repr(ask.burst), repr(ask.spent), ask.want)]
        try:
            answer = await self._send("EVALSHA", self._rates_sha, 1, self._prefix, *words)
        except (NoScriptError, StoreMoved) as error:  # nothing ran
            answer = await self._send_whole(error, self._rates_script, *words)
        return [Granted(int(tokens), float(left)) for tokens, left in zip(answer[::2], answer[1::2], strict=True)]

    # ----------------------------------------------------------------------------------------------- transport

    async def _info(self, *sections: str) -> dict[str, str]:
        """Read sections of INFO, as text by name."""
        found: dict[str, str] = {}
        for section in sections:  # INFO takes several sections since Redis 7
            lines = (await self._send("INFO", section)).decode().splitlines()
            parts = (line.partition(":") for line in lines if ":" in line)
            found |= {name: value.strip() for name, _, value in parts}
        return found

    async def _call_in(self, generation: StoreGeneration, operation: str, *arguments: str | int | bytes) -> list[Any]:
        """Run an operation in a generation, with the highest number of claiming calls seen in it."""
        of, count = self._claims_seen
        seen = count if of == generation else 0
        try:
            return await self._call(operation, f"{generation.number} {generation.store}", seen, *arguments)
        except StoreIncomplete:
            self._incomplete = generation
            raise

    def _note_claims(self, generation: StoreGeneration, count: int) -> None:
        """Note the number of claiming calls in a reply; replies may come late, and of an earlier generation."""
        of, seen = self._claims_seen
        if of == generation:
            self._claims_seen = generation, max(seen, count)
        elif of is None or of.number < generation.number:
            self._claims_seen = generation, count

    async def _call(self, operation: str, *arguments: str | int | bytes) -> list[Any]:
        """Run an operation of claims.lua; returns its reply after OK. Counts failures."""
        try:
            return await self._run(operation, *arguments)
        except StoreBug as error:
            self._bugs.add(error, bug=True)
            self._errors.labels(ERRORS[StoreBug]).inc()
            raise
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            kind = next(kind for kind in type(error).__mro__ if kind in ERRORS)
            self._errors.labels(ERRORS[kind]).inc()
            raise

    async def _run(self, operation: str, *arguments: str | int | bytes) -> list[Any]:
        """Run an operation of claims.lua; returns its reply after OK. Raises what its other replies mean."""
        try:
            answer = await self._send("EVALSHA", self._sha, 1, self._prefix, operation, *arguments)
        except (NoScriptError, StoreMoved) as error:  # nothing ran
            answer = await self._send_whole(error, self._script, operation, *arguments)
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

    async def _send_whole(self, error: NoScriptError | StoreMoved, script: str, *words: str | int | bytes) -> Any:
        """Send a script as a whole: the server does not have it, or another node of the cluster has the keys."""
        if isinstance(error, StoreMoved) and not await self._connections.lead_to(error.primary):
            raise error
        return await self._send("EVAL", script, 1, self._prefix, *words)

    def _unpack(self, id: bytes, state: bytes) -> Claimed | Delivered | DeliveredBatch:
        """Decode a key's state. Raises StoreBug where that is impossible."""
        try:
            return unpack(state)
        except CorruptState as error:
            raise self._bug(f"{id.hex()}: {error}") from error

    def _bug(self, text: str) -> StoreBug:
        """Log and count a value in Redis that no script writes."""
        error = StoreBug(text)
        self._bugs.add(error, bug=True)
        self._errors.labels(ERRORS[StoreBug]).inc()
        return error

    async def _send(self, *command: str | int | bytes) -> Any:
        """Send one command and read its reply, on a connection that has no other command meanwhile.

        Raises StoreAway where nothing was run, StoreUnanswered where the command may run or have run, and StoreBug for
        an error of the script.
        """
        connection = await self._connections.take()
        answered = False  # whether the reply was read in full; else the next command would read its rest
        try:
            with self._command_timeout.wait():
                packed = pack_command(command)  # type: ignore[arg-type]  # its stub takes one word
                await connection.send_packed_command(packed, check_health=False)
                answer = await connection.read_response()
            answered = True
            return answer
        except (NoScriptError, ReadOnlyError, AskError, TryAgainError, ClusterDownError) as error:
            answered = True
            if isinstance(error, NoScriptError):
                raise
            raise _refused_by(error, connection) from error
        except ResponseError as error:
            answered = True
            if _TAKES_NO_WRITES.search(str(error)):
                raise StoreAway(f"Redis: {error}") from error
            failed = StoreBug if _is_bug(str(error)) else StoreUnanswered
            raise failed(f"Redis: {error}") from error
        except BusyLoadingError as error:
            raise StoreAway(f"Redis: {error}") from error
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnanswered(f"Redis did not answer: {str(error) or type(error).__name__}") from error
        finally:
            await self._connections.give_back(connection, usable=answered)


def _refused_by(error: ResponseError, connection: Connection) -> StoreAway:
    """Explain an error before anything ran. The texts of these classes lack the code of the reply.

    ASK is not followed: while a hash slot is moved key by key, its keys are on two servers. A script on either would
    not see the others, and what it wrote for a key that is still to be moved would be overwritten by the older one.
    """
    match error:
        case MovedError():
            primary = (error.host or connection.host, error.port)
            return StoreMoved(f"Redis: the keys are on {primary[0]}:{primary[1]} of its cluster", primary)
        case AskError() | TryAgainError():
            return StoreAway(f"Redis: the hash slot of the keys is being moved to another node ({error})")
    return StoreAway(f"Redis: {error}")


def _sha_of(script: str) -> str:
    """Return the name by which EVALSHA knows a script."""
    return hashlib.sha1(script.encode()).hexdigest()  # noqa: S324


def _is_bug(error: str) -> bool:
    """Whether an error text is of the script itself or of a key with another type, and not of the server's state."""
    return "user_script" in error and error.startswith(("ERR", "WRONGTYPE", "user_script", "Error running", "@user"))
