"""The words in which stories with known faults are told: records, answers, ledger entries, and facts about them.

A `Script` is what one seed tells, in three stages, each of which ends with a run of the job. It is a plan: records
without offsets, and the oracle's facts about them. tests/spark/world.py writes it to Kafka.

Times are the history's own: the job is told when "now" is, and every topic takes the writer's timestamps.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from service.contract import wire
from tests.spark.history import Life
from tests.spark.oracle import LOST, Claim, Gone, Place, Planted, Plants, Record, Said

HOUR_MS: Final = 3_600_000
TTL_MS: Final = 86_400_000
SETTLE_MS: Final = 80_000
"""Request timeout, transaction timeout and grace, as the runs are told: 10 s, 10 s and 60 s."""
GRACE_MS: Final = 60_000
WINDOW_MS: Final = 168 * HOUR_MS

FROZEN_MS: Final = tuple(1_750_000_800_000 + n * HOUR_MS for n in range(3))  # 2025-06-15 15:20:00 and an hour each
BEGUN_MS: Final = FROZEN_MS[0] - 100 * HOUR_MS
"""When the namespace's ledger and journal begin: what was accepted before was written under others."""
HELD_MS: Final = FROZEN_MS[0] - 20 * 60_000
"""When the transactions began that are open at the first run."""

WILD_MS: Final = 4_000_000_000_000
"""A time of the year 2096."""

SLOTS: Final = 6
"""Slots of a seed. The fifth has a ledger whose beginning is gone, the sixth one that an open transaction holds up."""

CALLERS: Final = ("caller", "other")
"""Those whose names are scopes of keys, besides the empty one."""

RESTART, DUAL, REWRITE = "producer_restart", "dual_producer", "rewrite"
EXPIRED, FOREIGN = "expired_key", "foreign_writer"
CAUSES: Final = (RESTART, DUAL, REWRITE, EXPIRED, FOREIGN)

ALWAYS_LOST: Final[Said] = (LOST, LOST, LOST)


@dataclass(eq=False)
class Answer:
    """One answer of the journal. `place` is where a 201 says that the event is."""

    id: bytes
    fp: bytes
    at: int
    status: int
    topic: str
    ts: int
    place: Callable[[], Place] | None = None
    replayed: bool = False


@dataclass(eq=False)
class Entry:
    """A ledger entry beside those of the records themselves; `ts` is its ledger record's.

    `topic_id` is the id that the record names of the entry's topic: None for the one that it has, "" for none.
    """

    slot: int
    planted: Planted
    at: int
    ts: int
    place: Callable[[], Place]
    topic_id: str | None = None


@dataclass(eq=False)
class Transaction:
    """Records that a producer sends in one transaction, with a ledger record for each life among them."""

    records: list[Record]
    fate: str  # committed, aborted, open, or fenced: the next owner's epoch aborts it


@dataclass
class Stage:
    """What is written before a run, in this order, but that aborted and open transactions come first."""

    transactions: list[Transaction] = field(default_factory=list)
    bare: list[Record] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    raw: list[tuple[str, int, bytes, list[wire.Header]]] = field(default_factory=list)


class Words:
    """What a seed's stories are told with. `first_slot` is where its SLOTS begin; `commits`: what becomes of its open
    transaction."""

    def __init__(self, seed: int, prefix: str, namespace: str, first_slot: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.plants = Plants()
        self.stages = (Stage(), Stage(), Stage())
        self.slot = first_slot
        self.cut_slot, self.held_slot = first_slot + 4, first_slot + 5
        self.ledger = wire.ledger_topic(namespace)
        self.commits = self.chance.random() < 0.5
        self._lives = 0
        self._keys = 0
        self._prefix = prefix
        self.orders, self.foreign, self.telemetry = (self.name(n) for n in ("orders", "foreign", "telemetry"))
        self.archive, self.eaten, self.anew = (self.name(n) for n in ("archive", "eaten", "anew"))
        self.absent, self.compact, self.fresh = (self.name(n) for n in ("absent", "compact", "fresh"))
        self.spare = self.name("spare")
        self.reborn, self.returned = self.name("reborn"), self.name("returned")
        self.cut_off = self.name("cut-off")
        self.stricter, self.looser = self.name("stricter"), self.name("looser")
        self.sink, self.mirror, self.toggles = self.name("sink"), self.name("mirror"), self.name("toggles")
        self.topics = {
            self.orders: 4,
            self.foreign: 2,
            self.telemetry: 2,
            self.archive: 1,
            self.eaten: 1,
            self.anew: 1,
            self.absent: 1,
            self.compact: 1,
            self.spare: 1,
            self.stricter: 1,
            self.looser: 1,
            self.cut_off: 1,
            self.reborn: 1,
            self.returned: 1,
            self.sink: 2,
            self.mirror: 1,
            self.toggles: 1,
        }
        self.held = (self.orders, 3)

    # -------------------------------------------------------------------------------------------------- words

    def name(self, word: str) -> str:
        return f"{self._prefix}.{word}"

    def key(self, story: str) -> str:
        self._keys += 1
        return f"s{self.seed}-{story}-{self._keys}"

    def life(self, slot: int | None = None, instance: str | None = None) -> Life:
        """A producer that nobody had before: its number is new, and so is its instance where none is given."""
        self._lives += 1
        number = self.slot * 1000 + self._lives
        where = self.slot + self.chance.randrange(4) if slot is None else slot
        return Life(where, number, 0, instance or f"host-{number}:8000")

    def past(self) -> int:
        """A time long enough before the first run, in one of two hours: each hour costs a run files of its own."""
        return FROZEN_MS[0] - self.chance.randrange(HOUR_MS, 2 * HOUR_MS)

    def content(self) -> bytes:
        """A value that no other record has."""
        self._keys += 1
        filler = b"x" * self.chance.choice((0, 0, 0, 1, 300))
        return b"%d-%d" % (self.seed, self._keys) + filler

    def shape(self) -> dict[str, Any]:
        """What a request may ask for, besides its topic: value, record key, headers, and a partition."""
        partition = self.chance.randrange(3)
        return {
            "value": self.content(),
            "record_key": self.chance.choice((None, b"customer-%d" % self.chance.randrange(10**9))),
            "headers": self.chance.choice(((), (("h", b"1"),), (("b", b"2"), ("a", b"1"), ("a", b"")))),
            "partition": partition,
            "asked": self.chance.choice((None, partition)),
        }

    # -------------------------------------------------------------------------------------------------- hands

    def plant(self, story: str, *, scope: str = "", **more: Any) -> Planted:
        key = self.key(story)
        planted = Planted(wire.event_id(key, scope), key, **more)
        self.plants.ids.append(planted)
        return planted

    def record(self, planted: Planted, life: Life | None, at: int, **more: Any) -> Record:
        """A copy of an id, not sent yet."""
        values: dict[str, Any] = {"topic": self.orders, "partition": 0, "ts": at + self.chance.randrange(1, 2000)}
        copy = Record(**values | more, at=at, key=planted.key, id=planted.id, life=life)
        planted.copies.append(copy)
        return copy

    def commit(self, *records: Record, stage: int = 1, fate: str = "committed") -> None:
        """Send these in a transaction; most share one with others."""
        transactions = self.stages[stage - 1].transactions
        for record in records:
            record.stage = stage
            record.visible = stage if record.visible == 1 else record.visible
        if fate == "committed" and transactions and self.chance.random() < 0.9:
            last = transactions[-1]
            if last.fate == fate and len(last.records) < 40:
                last.records += records
                return
        transactions.append(Transaction(list(records), fate))

    def send(self, *records: Record, stage: int = 1) -> None:
        """Send these outside of any transaction; the ledger does not know them."""
        for record in records:
            record.stage, record.visible, record.entered = stage, stage, False
        self.stages[stage - 1].bare += records

    def delivered(self, planted: Planted, at: int, *, stage: int = 1, life: Life | None = None, **more: Any) -> Record:
        """A copy that is committed with its entry."""
        copy = self.record(planted, life or self.life(), at, **more)
        self.commit(copy, stage=stage)
        return copy

    def answer(
        self,
        planted: Planted,
        *statuses: int,
        at: int | None = None,
        ts: int | None = None,
        topic: str | None = None,
        place: Callable[[], Place] | None = None,
        stage: int = 1,
    ) -> None:
        """Journal answers about an id; a 201 names its first copy unless told where."""
        first = planted.copies[0] if planted.copies else None
        fp = first.fp if first else bytes(8)
        told = at if at is not None else first.at if first else self.past()
        seen = 0
        for status in statuses:
            named = place or (lambda: first.place if first else ("", 0, 0)) if status == 201 else None
            where = topic or (first.topic if first else self.orders)
            when = told + 3000 if ts is None else ts
            replayed = status == 201 and seen > 0
            self.stages[stage - 1].answers.append(Answer(planted.id, fp, told, status, where, when, named, replayed))
            seen += status == 201
            if status in (202, 504):
                planted.unsure.append(told)
            self.plants.answers[stage, str(status) if status in (201, 202, 503, 504) else "other"] += 1
            if replayed:
                self.plants.answers[stage, "replayed"] += 1

    def claim(
        self,
        planted: Planted,
        place: Callable[[], Place],
        fates: Said,
        *,
        at: int | None = None,
        seen: int | None = None,
        stage: int = 1,
        slot: int | None = None,
        topic_id: str | None = None,
    ) -> Claim:
        """A ledger entry of its own, without a record of its own; `seen` is when it was written."""
        at = self.past() if at is None else at
        seen = at if seen is None else seen
        slot = self.slot + self.chance.randrange(4) if slot is None else slot
        self.stages[stage - 1].entries.append(Entry(slot, planted, at, seen, place, topic_id))
        made = Claim("ledger", place, fates)
        planted.claims.append(made)
        return made

    def gone(self, topic: str, cause: str, first: int, last: int, stage: int) -> None:
        """The world's word on what it took away."""
        self.plants.gone.append(Gone(topic, 0, cause, first, last, stage))
