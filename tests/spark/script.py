"""The parts of scenarios with known faults: records, answers, ledger entries, and the facts that the oracle needs.

A `Script` has the scenarios of one seed, in three stages; after each stage the job runs. A script is a plan: records
without offsets, and the oracle's facts about them. tests/spark/world.py writes a script to Kafka.

Times are in the past: the job gets the time of its run as an argument, and every topic takes the writer's timestamps.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from service.contract.wire.ids import event_id
from service.contract.wire.names import ledger_topic
from tests.spark.history import Writer
from tests.spark.oracle import LOST, ByStage, Claim, Coordinates, Planted, Plants, Record, UnreadGap
from tests.spark.times import DAY_MS, HOUR_MS, MINUTE_MS, WINDOW_H

TTL_MS: Final = DAY_MS
MAX_SETTLE_MS: Final = 80_000
"""Request timeout, transaction timeout and grace of the runs: 10 s, 10 s and 60 s."""
GRACE_MS: Final = MINUTE_MS
WINDOW_MS: Final = WINDOW_H * HOUR_MS

FROZEN_MS: Final = tuple(1_750_000_800_000 + n * HOUR_MS for n in range(3))  # 2025-06-15 15:20:00 and an hour each
LEDGER_BEGINS_MS: Final = FROZEN_MS[0] - 100 * HOUR_MS
"""When ledger and journal of the namespace begin."""
BLOCKED_SINCE_MS: Final = FROZEN_MS[0] - 20 * 60_000
"""When the transactions that are open at the first run began."""

SLOTS: Final = 6
"""Slots of a seed. The fifth slot has a ledger whose beginning was deleted, the sixth a ledger that an open transaction
blocks."""

CALLERS: Final = ("caller", "other")
"""Callers whose names are scopes of keys, besides the empty scope."""

RESTART, DUAL, REWRITE = "producer_restart", "dual_producer", "rewrite"
EXPIRED, FOREIGN = "expired_key", "foreign_writer"
CAUSES: Final = (RESTART, DUAL, REWRITE, EXPIRED, FOREIGN)

ALWAYS_LOST: Final[ByStage] = (LOST, LOST, LOST)


@dataclass(eq=False)
class Answer:
    """One answer of the journal. `coordinates` are those that a 201 names."""

    id: bytes
    fp: bytes
    at: int
    status: int
    topic: str
    ts: int
    coordinates: Callable[[], Coordinates] | None = None
    replayed: bool = False


@dataclass(eq=False)
class Entry:
    """A ledger entry without a record of its own; `ts` is the timestamp of the ledger record.

    `topic_id` is the id of the entry's topic in the ledger record: None for the topic's present id, "" for no id.
    """

    slot: int
    planted: Planted
    at: int
    ts: int
    coordinates: Callable[[], Coordinates]
    topic_id: str | None = None


@dataclass(eq=False)
class Transaction:
    """Records that a producer sends in one transaction, with a ledger record for each writer among them."""

    records: list[Record]
    outcome: str  # committed, aborted, open, or fenced: the next owner's epoch aborts it


@dataclass
class Stage:
    """What is written before a run, in this order; aborted and open transactions come first."""

    transactions: list[Transaction] = field(default_factory=list)
    bare: list[Record] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    raw: list[Record] = field(default_factory=list)


class Builder:
    """Builds the scenarios of a seed. `first_slot`: the first of its SLOTS; `commits`: whether its open transaction
    commits after the first run, or aborts."""

    def __init__(self, seed: int, prefix: str, namespace: str, first_slot: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.plants = Plants()
        self.stages = (Stage(), Stage(), Stage())
        self.slot = first_slot
        self.trimmed_slot, self.blocked_slot = first_slot + 4, first_slot + 5
        self.ledger = ledger_topic(namespace)
        self.commits = self.chance.random() < 0.5
        self._writers = 0
        self._keys = 0
        self._prefix = prefix
        self.orders, self.foreign, self.telemetry = (self.name(n) for n in ("orders", "foreign", "telemetry"))
        self.archive, self.expiring, self.recreated = (self.name(n) for n in ("archive", "expiring", "recreated"))
        self.absent, self.compact, self.fresh = (self.name(n) for n in ("absent", "compact", "fresh"))
        self.spare = self.name("spare")
        self.recreated_early, self.recreated_late = self.name("recreated-early"), self.name("recreated-late")
        self.truncated_topic = self.name("truncated")
        self.stricter, self.looser = self.name("stricter"), self.name("looser")
        self.sink, self.mirror, self.toggles = self.name("sink"), self.name("mirror"), self.name("toggles")
        self.topics = {
            self.orders: 4,
            self.foreign: 2,
            self.telemetry: 2,
            self.archive: 1,
            self.expiring: 1,
            self.recreated: 1,
            self.absent: 1,
            self.compact: 1,
            self.spare: 1,
            self.stricter: 1,
            self.looser: 1,
            self.truncated_topic: 1,
            self.recreated_early: 1,
            self.recreated_late: 1,
            self.sink: 2,
            self.mirror: 1,
            self.toggles: 1,
        }
        self.blocked = (self.orders, 3)

    # -------------------------------------------------------------------------------------------------- values

    def name(self, word: str) -> str:
        return f"{self._prefix}.{word}"

    def key(self, story: str) -> str:
        self._keys += 1
        return f"s{self.seed}-{story}-{self._keys}"

    def new_writer(self, slot: int | None = None, instance: str | None = None) -> Writer:
        """Return a writer with a new producer id, and a new instance unless one is given."""
        self._writers += 1
        number = self.slot * 1000 + self._writers
        where = self.slot + self.chance.randrange(4) if slot is None else slot
        return Writer(where, number, 0, instance or f"host-{number}:8000")

    def past(self) -> int:
        """Return a time before the first run that is settled, in one of two hours: each hour adds files to a run."""
        return FROZEN_MS[0] - self.chance.randrange(HOUR_MS, 2 * HOUR_MS)

    def content(self) -> bytes:
        """Return a value that no other record has."""
        self._keys += 1
        filler = b"x" * self.chance.choice((0, 0, 0, 1, 300))
        return b"%d-%d" % (self.seed, self._keys) + filler

    def shape(self) -> dict[str, Any]:
        """Return the parts of a request besides its topic: value, record key, headers, and a partition."""
        partition = self.chance.randrange(3)
        return {
            "value": self.content(),
            "record_key": self.chance.choice((None, b"customer-%d" % self.chance.randrange(10**9))),
            "headers": self.chance.choice(((), (("h", b"1"),), (("b", b"2"), ("a", b"1"), ("a", b"")))),
            "partition": partition,
            "asked": self.chance.choice((None, partition)),
        }

    # -------------------------------------------------------------------------------------------------- parts

    def plant(self, story: str, *, scope: str = "", **more: Any) -> Planted:
        key = self.key(story)
        planted = Planted(event_id(key, scope), key, **more)
        self.plants.ids.append(planted)
        return planted

    def record(self, planted: Planted, writer: Writer | None, at: int, **more: Any) -> Record:
        """Add a copy of an id, which is not sent yet."""
        values: dict[str, Any] = {"topic": self.orders, "partition": 0, "ts": at + self.chance.randrange(1, 2000)}
        copy = Record(**values | more, at=at, key=planted.key, id=planted.id, writer=writer)
        planted.copies.append(copy)
        return copy

    def commit(self, *records: Record, stage: int = 1, outcome: str = "committed") -> None:
        """Send these records in a transaction; most share the transaction of other records."""
        transactions = self.stages[stage - 1].transactions
        for record in records:
            record.stage = stage
            record.visible = stage if record.visible == 1 else record.visible
        if outcome == "committed" and transactions and self.chance.random() < 0.9:
            last = transactions[-1]
            if last.outcome == outcome and len(last.records) < 40:
                last.records += records
                return
        transactions.append(Transaction(list(records), outcome))

    def send(self, *records: Record, stage: int = 1) -> None:
        """Send these records outside any transaction, without ledger entries."""
        for record in records:
            record.stage, record.visible, record.entered = stage, stage, False
        self.stages[stage - 1].bare += records

    def delivered(
        self, planted: Planted, at: int, *, stage: int = 1, writer: Writer | None = None, **more: Any
    ) -> Record:
        """Add a copy that is committed with its ledger entry."""
        copy = self.record(planted, writer or self.new_writer(), at, **more)
        self.commit(copy, stage=stage)
        return copy

    def answer(
        self,
        planted: Planted,
        *statuses: int,
        at: int | None = None,
        ts: int | None = None,
        topic: str | None = None,
        coordinates: Callable[[], Coordinates] | None = None,
        stage: int = 1,
    ) -> None:
        """Journal answers about an id; a 201 names its first copy, unless `coordinates` are given."""
        first = planted.copies[0] if planted.copies else None
        fp = first.fp if first else bytes(8)
        accepted_at = at if at is not None else first.at if first else self.past()
        seen = 0
        for status in statuses:
            named = coordinates or (lambda: first.coordinates if first else ("", 0, 0)) if status == 201 else None
            where = topic or (first.topic if first else self.orders)
            when = accepted_at + 3000 if ts is None else ts
            replayed = status == 201 and seen > 0
            self.stages[stage - 1].answers.append(
                Answer(planted.id, fp, accepted_at, status, where, when, named, replayed)
            )
            seen += status == 201
            if status in (202, 504):
                planted.in_doubt.append(accepted_at)
            self.plants.answers[stage, str(status) if status in (201, 202, 503, 504) else "other"] += 1
            if replayed:
                self.plants.answers[stage, "replayed"] += 1

    def claim(
        self,
        planted: Planted,
        coordinates: Callable[[], Coordinates],
        outcomes: ByStage,
        *,
        at: int | None = None,
        seen: int | None = None,
        stage: int = 1,
        slot: int | None = None,
        topic_id: str | None = None,
    ) -> Claim:
        """Add a ledger entry without a record of its own; `seen` is the time when the entry was written."""
        at = self.past() if at is None else at
        seen = at if seen is None else seen
        slot = self.slot + self.chance.randrange(4) if slot is None else slot
        self.stages[stage - 1].entries.append(Entry(slot, planted, at, seen, coordinates, topic_id))
        made = Claim("ledger", coordinates, outcomes)
        planted.claims.append(made)
        return made

    def unread_gap(self, topic: str, cause: str, first: int, last: int, stage: int) -> None:
        """Note the offsets of a log that were deleted unread."""
        self.plants.unread_gaps.append(UnreadGap(topic, 0, cause, first, last, stage))
