"""The interface of a store of claims and results, and the values that it takes and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from service.claims.states import Claim, KeyState, Row

# Entries in one script call of a replay: some 10 ms of Redis's time, between which other calls are served.
REPLAY_CHUNK: Final = 2_000


class StoreGeneration(msgspec.Struct, frozen=True):
    """A generation: its number (the offset of its control record) and its store (run_id/master_replid).

    A script for a generation writes nothing into any other.
    """

    number: int
    store: str


@dataclass(frozen=True, slots=True)
class ServerIdentity:
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
    """A key's state, read without claiming it. `dead`: it is a claim whose event was never written."""

    state: KeyState
    dead: bool = False
    leased: bool = True


# A slot in a heartbeat's result. Its lease is the caller's or another's, or nobody has it: because the slot was never
# taken or was given back clean, or because its holder died (the slot must be recovered).
MINE: Final = "m"
TAKEN: Final = "t"
FREE: Final = "f"
DEAD: Final = "d"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The result of a heartbeat: the number of live processes, a character for each slot, `freed` of the slots held.

    A slot is MINE, TAKEN, FREE or DEAD. `slots` also has slots beyond SLOTS_MAX that a process with a higher SLOTS_MAX
    has taken.
    """

    members: int
    slots: str
    freed: Mapping[int, int] = field(default_factory=dict)


class Keys(Protocol):
    """The claims and results in a store. The service's store is Redis; the tests' in-memory one passes the same suite.

    All calls but `who` raise StoreLost where the server is not the store of the generation, or lacks keys of it:
    nothing was written. They raise StoreAway where the server refused before writing, StoreUnanswered where the script
    may still run later, and StoreBug for an answer or a state that this version does not know.

    An id has 16 bytes, a fingerprint 8. `slot` is the slot's number, `term` its term; `token` names a process.
    """

    async def who(self) -> ServerIdentity:
        """Ask which server answers, and which generation it holds. Raises NewerVersion for keys of a later layout."""

    async def clock_ms(self) -> int:
        """Read the store's clock, ms since the Unix epoch, by which accepted_at and expiry are set."""

    async def resolve_again(self) -> None:
        """Close all idle connections, so that the next call resolves the address of the primary again."""

    async def claim(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttls_s: Sequence[int] = (),
    ) -> list[Claim]:
        """Claim (id, fingerprint) pairs in one script, in order. Raises Fenced if `freed` of the slot is not `term`.

        `ttls_s`: the retention of each pair's key in seconds, 0 for the store's own; empty if all have that.

        A store that is full takes no more writes: it finds the present states, and returns NOT_CLAIMED for new ids.
        """

    async def claim_all(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttl_s: int = 0,
    ) -> Claim:
        """Claim an atomic batch, all or nothing: the whole's pair first, then its members'. Raises as `claim`."""

    async def mark(
        self, generation: StoreGeneration, slot: int, term: int, previous: int, offset: int, rows: Sequence[Row]
    ) -> int:
        """Mark rows of the ledger record at `offset`; `previous` is the one before. Returns how many were kept."""

    async def release(self, generation: StoreGeneration, slot: int, term: int, ids: Sequence[bytes]) -> None:
        """Delete the claims of this slot and term on these ids. Other states stay as they are."""

    async def find(self, generation: StoreGeneration, id: bytes) -> Found:
        """Read the state of a key. Raises StoreAway where too many look-ups wait."""

    async def find_all(self, generation: StoreGeneration, ids: Sequence[bytes]) -> list[KeyState]:
        """Read the states of keys, in their order."""

    async def applied(self, generation: StoreGeneration, slot: int) -> int | None:
        """Read the ledger offset below which every record of the slot is marked; None if the store has none."""

    async def replay(
        self, generation: StoreGeneration, rows: Sequence[Row], free: tuple[int, int] | None = None
    ) -> None:
        """Write rows of the ledger; with the last of them, raise `freed` and `applied` of a (slot, term) to the term.

        Raises Fenced if a later term of the slot has been freed.
        """

    async def take(self, generation: StoreGeneration, slot: int, token: str) -> bool:
        """Take or renew the lease of a slot; False if another process has it."""

    async def give_back(self, generation: StoreGeneration, slot: int, token: str, clean: bool) -> None:
        """Return the lease of a slot, if the process has it. Unless `clean`, the slot is then dead."""

    async def heartbeat(
        self, generation: StoreGeneration, token: str, slots: int, held: Mapping[int, int]
    ) -> Heartbeat:
        """Renew leases. `held`: by slot, the `applied` that its holder knows, -1 if it knows none."""

    async def leave(self, generation: StoreGeneration, token: str) -> None:
        """Count the process no longer among the live ones."""

    async def recover(self, seen: ServerIdentity, nonce: str) -> bool:
        """Begin a store recovery; False if another is in progress, or has ended since `seen` was read.

        Each call below raises StoreLost without the nonce.
        """

    async def recover_read(self, store: str, nonce: str, slots: int) -> list[int | None]:
        """Read `applied` of the first `slots` slots, as `applied` does; None for all if keys were evicted."""

    async def recover_replay(self, store: str, nonce: str, rows: Sequence[Row]) -> None:
        """Write at most REPLAY_CHUNK rows of the ledger. Concurrent calls wait for each other."""

    async def recover_end(self, store: str, nonce: str, number: int, freed: Sequence[int]) -> None:
        """Raise `freed` of each slot, then set the generation to `number`, if it is newer than the present one."""

    async def recover_abandon(self, store: str, nonce: str) -> None:
        """Delete the nonce, so that another recovery can begin at once. Never raises StoreLost."""


def chunks(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Split rows into chunks for one script call each; at least one, as the last call also raises `freed`."""
    return [rows[start : start + REPLAY_CHUNK] for start in range(0, len(rows), REPLAY_CHUNK)] or [()]
