"""Stories with known faults, from a seed: every kind of finding, every cause, and several of them on one id."""

from collections.abc import Callable
from typing import Any

from service.contract import wire
from tests.spark.copies import Copies
from tests.spark.history import Life
from tests.spark.oracle import LOST, PENDING, THERE, Claim, Place, Planted, Record, Said
from tests.spark.script import (
    ALWAYS_LOST,
    BEGUN_MS,
    DUAL,
    EXPIRED,
    FOREIGN,
    FROZEN_MS,
    GRACE_MS,
    HELD_MS,
    HOUR_MS,
    RESTART,
    SETTLE_MS,
    WILD_MS,
    WINDOW_MS,
    Transaction,
)


class Script(Copies):
    """One seed's stories."""

    def __init__(self, seed: int, prefix: str, namespace: str, first_slot: int) -> None:
        super().__init__(seed, prefix, namespace, first_slot)
        for story in (
            self.healthy,
            self.batches,
            self.aborted,
            self.fenced,
            self.copies,
            self.several_causes,
            self.conflicts,
            self.others_topics,
            self.client_duplicates,
            self.no_client_duplicates,
            self.forwarded,
            self.bare_keys,
            self.changed_rules,
            self.lost,
            self.held_up,
            self.unsure,
            self.phantoms,
            self.idempotent,
            self.gaps,
            self.unreadable,
            self.windows,
            self.later,
        ):
            story()
        for stage in self.stages:
            self.chance.shuffle(stage.transactions)

    def lost(self) -> None:
        def missing(n: int = 1_000_000) -> Callable[[], Place]:
            offset = n + self.chance.randrange(1000)
            return lambda: (self.orders, 0, offset)

        there = self.delivered(self.plant("there"), self.past())
        self.claim(self.plant("lost-taken"), lambda: there.place, ALWAYS_LOST)
        self.claim(self.plant("lost-beyond"), missing(), ALWAYS_LOST)
        self.claim(self.plant("lost-aborted"), lambda: self.hole.place, ALWAYS_LOST)
        # The marker behind the aborted record: an offset that no record has.
        self.claim(
            self.plant("lost-marker"),
            lambda: (self.hole.topic, self.hole.partition, self.hole.place[2] + 1),
            ALWAYS_LOST,
        )

        def answered(planted: Planted, place: Callable[[], Place], fates: Said = ALWAYS_LOST, **more: Any) -> None:
            planted.claims.append(Claim("answer", place, fates))
            self.answer(planted, 201, place=place, **more)

        answered(self.plant("lost-answer"), missing())
        # Both name the same place: one promise. Two places: two.
        both, place = self.plant("lost-both"), missing()
        self.claim(both, place, ALWAYS_LOST)
        self.answer(both, 201, 201, place=place)
        two = self.plant("lost-two")
        self.claim(two, missing(), ALWAYS_LOST)
        answered(two, missing(2_000_000))
        # There, but not where the answer says.
        beside = self.plant("lost-beside")
        self.delivered(beside, self.past())
        answered(beside, missing())
        # Twice there and once not; changed and not there.
        self.claim(self.repeat("lost-repeated", [RESTART, FOREIGN]), missing(), ALWAYS_LOST)
        self.claim(self.repeat("lost-conflict", [DUAL], others=[True]), missing(), ALWAYS_LOST)
        # Not yet: by the millisecond.
        for early, fate in ((1, LOST), (0, PENDING), (-SETTLE_MS // 2, PENDING)):
            seen = FROZEN_MS[0] - SETTLE_MS - early
            self.claim(self.plant("lost-young"), missing(), (fate, LOST, LOST), at=seen)
            answered(self.plant("lost-young-answer"), missing(), (fate, LOST, LOST), at=seen, ts=seen + 5000)
        # Accepted long ago, entered or answered just now: what tells of it gets the grace.
        for early, fate in ((1, LOST), (0, PENDING), (1000 - GRACE_MS, PENDING)):
            seen, fates = FROZEN_MS[0] - GRACE_MS - early, (fate, LOST, LOST)
            self.claim(self.plant("lost-late-entry"), missing(), fates, at=self.past(), seen=seen)
            answered(self.plant("lost-late-answer"), missing(), fates, at=self.past(), ts=seen)
        waits = self.repeat("pending-repeated", [RESTART], late=0)
        self.claim(waits, missing(), (PENDING, LOST, LOST), at=FROZEN_MS[0] - 1000)

    def held_up(self) -> None:
        """A transaction that is open at the first run, and what lies behind it in its partition."""
        topic, partition = self.held
        opened = []
        for nth in range(self.chance.randrange(1, 4)):
            fates: Said = (PENDING, None, None) if self.commits else (PENDING, "stuck", "stuck")
            planted = self.plant("open", otherwise=fates, stuck="202" if nth else "504")
            life = self.life(self.held_slot, "held:1")
            copy = self.record(planted, life, HELD_MS, ts=HELD_MS, topic=topic, partition=partition)
            copy.visible = 2 if self.commits else None
            opened.append(copy)
            self.answer(planted, 202 if nth else 504, ts=HELD_MS + 9000)
            if self.commits:
                self.answer(planted, 201, ts=FROZEN_MS[1] - HOUR_MS // 2, stage=2)
        self.stages[0].transactions.append(Transaction(opened, "open"))
        self.plants.held[1] = {self.held, (self.ledger, self.held_slot)}
        behind = self.plant("behind")
        copy = self.record(behind, self.life(), self.past(), topic=topic, partition=partition)
        copy.visible = 2
        self.behind = copy
        behind.claims.append(Claim("ledger", lambda: copy.place, (PENDING, THERE, THERE)))
        self.answer(behind, 201)
        repeated = self.plant("behind-again")
        value = self.content()
        self.delivered(repeated, copy.at, life=self.life(self.slot), value=value)
        again = self.record(
            repeated,
            self.life(self.slot),
            copy.at,
            ts=copy.at + 9000,
            topic=topic,
            partition=partition,
            value=value,
            visible=2,
            cause=RESTART,
        )
        repeated.claims.append(Claim("ledger", lambda: again.place, (PENDING, THERE, THERE)))
        self.stages[0].transactions.append(Transaction([copy, again], "committed"))
        # What is promised at the very place where all waits, and beyond everything.
        self.claim(self.plant("behind-first"), lambda: opened[0].place, (PENDING, LOST, LOST))
        nothing = self.plant("behind-nothing")
        # Past the end of a log that is held up, it is not proven yet that it never was.
        self.claim(nothing, lambda: (topic, partition, 5_000_000), (PENDING, LOST, LOST))
        # Where the ledger of the writer's slot is held up, nobody knows yet, however old it looks.
        for ts in (HELD_MS - SETTLE_MS, HELD_MS - SETTLE_MS + 1, self.past(), FROZEN_MS[0] - 40 * HOUR_MS):
            for at in (ts, ts - HOUR_MS // 6):
                unheard = self.plant("unheard", accepted=False, phantom=(PENDING, "phantom", "phantom"))
                self.send(self.record(unheard, self.life(self.held_slot), at, ts=ts, value=self.content()))

    def unsure(self) -> None:
        """Answered 202 or 504, and never more. As long as a ledger is held up, it may hold the answer."""
        stuck: Said = ("stuck", "stuck", "stuck")
        later: Said = (PENDING, "stuck", "stuck")
        for ts, fates in (
            (self.past(), stuck),
            (HELD_MS - SETTLE_MS, stuck),
            (HELD_MS - SETTLE_MS + 1, later),
            (FROZEN_MS[0] - 1000, later),
        ):
            for status in (504, 202):
                for at in (ts - 1, ts - HOUR_MS // 6):
                    self.answer(self.plant("stuck", otherwise=fates, stuck=str(status)), status, 409, at=at, ts=ts)
        self.answer(self.plant("stuck-both", otherwise=stuck), 202, 504)
        # Answered in another hour than the acceptance: what became of it lies in that one.
        for stage, before in ((1, None), (2, "stuck")):
            elsewhere = self.plant("told-elsewhere", otherwise=(before, None, None))
            self.delivered(elsewhere, self.past(), stage=stage)
            self.answer(elsewhere, 504, at=FROZEN_MS[0] - 4 * HOUR_MS)
        freed = self.plant("freed-elsewhere", accepted=False)
        self.answer(freed, 504, at=FROZEN_MS[0] - 4 * HOUR_MS)
        self.answer(freed, 503, at=FROZEN_MS[0] - 2 * HOUR_MS)
        again = self.plant("freed-before", otherwise=stuck)
        self.answer(again, 503, at=FROZEN_MS[0] - 4 * HOUR_MS)
        self.answer(again, 504, at=FROZEN_MS[0] - 2 * HOUR_MS)
        self.answer(self.plant("freed-202", accepted=False), 202, 503)
        # A 503 that came before it takes nothing back; one that comes later does, in whatever run.
        self.answer(self.plant("stuck-after", otherwise=stuck), 503, 503, 504)
        self.answer(self.plant("freed-again", accepted=False), 503, 504, 503)
        at = self.past()
        tried = self.plant("stuck-tried", otherwise=stuck, stuck="202")
        self.answer(tried, 503, at=at, ts=at + 10)
        self.answer(tried, 202, at=at, ts=at + 11)
        freed = self.plant("freed-later", accepted=False)
        self.answer(freed, 504, at=at, ts=at + 10)
        self.answer(freed, 503, at=at, ts=at + 11)
        # A stranger's record under the same key, in the same hour or another, is no delivery of ours.
        here, hour_before = FROZEN_MS[0] - HOUR_MS, FROZEN_MS[0] - 2 * HOUR_MS
        for story, statuses, accepted in (("stuck-strange", (504,), True), ("freed-strange", (504, 503), False)):
            for copied, answered in ((here, here), (here, hour_before), (hour_before, here)):
                strange = self.plant(story, otherwise=stuck, accepted=accepted)
                self.send(self.record(strange, None, copied, topic=self.foreign))
                self.answer(strange, *statuses, at=answered)
        self.answer(self.plant("refused", accepted=False), 422)
        self.answer(self.plant("not-written", accepted=False), 503, 503)
        # A 504 that a later try made good, and one that a later run sees made good.
        late = self.plant("stuck-then-there", otherwise=(PENDING, PENDING, PENDING))
        self.delivered(late, FROZEN_MS[0] - 5000, stage=2, ts=FROZEN_MS[0] + 60_000)
        self.answer(late, 504, ts=FROZEN_MS[0] - 1000)
        self.answer(late, 201, stage=2)
        revised = self.plant("stuck-revised", otherwise=("stuck", None, None))
        self.delivered(revised, self.past(), stage=2)
        self.answer(revised, 504)
        # On the border of the second run's patience.
        for early, fate in ((0, "stuck"), (-1, PENDING)):
            ts = FROZEN_MS[1] - SETTLE_MS - early
            self.answer(self.plant("stuck-border", otherwise=(None, fate, "stuck")), 504, at=ts, ts=ts, stage=2)
            told, late = FROZEN_MS[1] - GRACE_MS - early, self.plant("stuck-late", otherwise=(None, fate, "stuck"))
            self.answer(late, 504, at=FROZEN_MS[1] - 2 * SETTLE_MS, ts=told, stage=2)

    def phantoms(self) -> None:
        always: Said = ("phantom", "phantom", "phantom")

        def sent(planted: Planted, at: int, life: Life | None = None, **more: Any) -> Record:
            record = self.record(planted, life or self.life(), at, **{"ts": at, "value": self.content()} | more)
            self.send(record)
            return record

        sent(self.plant("phantom", accepted=False, phantom=always), self.past())
        # A header that says 2096 is none of ours; a timestamp of that year came when a run read it.
        sent(self.plant("phantom-forged", accepted=False, phantom=always), WILD_MS, ts=self.past())
        after: Said = (PENDING, "phantom", "phantom")
        sent(self.plant("phantom-wild", accepted=False, phantom=after), self.past(), self.life(self.slot), ts=WILD_MS)
        forged = self.plant("forged")
        first = self.delivered(forged, self.past(), value=self.content())
        copied = self.record(forged, first.life, WILD_MS, ts=first.ts + 9, value=first.value, cause=FOREIGN)
        self.send(copied)
        # Of a slot beyond the ledger's partitions nothing is known.
        gap: Said = ("evidence_gap",) * 3
        sent(self.plant("phantom-slot", accepted=False, phantom=gap), self.past(), self.life(10_000))
        # The journal names its very place; and another one.
        told = self.plant("phantom-answered")
        sent(told, self.past())
        self.answer(told, 201)
        beside = self.plant("phantom-beside", phantom=always)
        sent(beside, self.past())
        beside.claims.append(Claim("answer", lambda: (self.orders, 0, 8_000_000), ALWAYS_LOST))
        self.answer(beside, 201, place=beside.claims[0].place)
        twice, life, value = self.plant("phantom-twice", accepted=False, phantom=always), self.life(), self.content()
        at = self.past()
        sent(twice, at, life, value=value)
        sent(twice, at, life, ts=at + 10, value=value, cause=FOREIGN)
        for age, fate in ((SETTLE_MS, "phantom"), (SETTLE_MS - 1, PENDING), (0, PENDING)):
            young = self.plant("phantom-young", accepted=False, phantom=(fate, "phantom", "phantom"))
            sent(young, FROZEN_MS[0] - age, self.life(self.slot))
        for age, fate in ((GRACE_MS, "phantom"), (GRACE_MS - 1, PENDING)):
            late = self.plant("phantom-late", accepted=False, phantom=(fate, "phantom", "phantom"))
            sent(late, self.past(), self.life(self.slot), ts=FROZEN_MS[0] - age)
        # Mirrored with its headers into a cluster whose ledger, or journal, is younger than that.
        for at, fates in ((BEGUN_MS - 1, gap), (BEGUN_MS, always)):
            for topic in (self.orders, self.telemetry):
                sent(self.plant("mirrored", accepted=False, phantom=fates), at, ts=self.past(), topic=topic)
        # The ledger of this slot begins with `kept`: what is older cannot be judged by it.
        at = FROZEN_MS[0] - 2 * HOUR_MS
        for _ in range(self.chance.randrange(1, 4)):
            planted = self.plant("entry-gone", accepted=False, phantom=("evidence_gap",) * 3)
            self.delivered(planted, at, life=self.life(self.cut_slot), partition=1, ts=at)
        self.kept_ms = at + 60_000
        kept = self.plant("kept")
        self.kept = self.record(kept, self.life(self.cut_slot), self.kept_ms, ts=self.kept_ms)
        # By its acceptance: its timestamp may be one that the client gave it.
        for near, other, fates in ((-1, 0, gap), (1, 0, always), (1, -HOUR_MS, always), (-1, HOUR_MS // 2, gap)):
            unheard = self.plant("phantom-cut", accepted=False, phantom=fates)
            at = self.kept_ms + near
            sent(unheard, at, self.life(self.cut_slot), partition=1, ts=at + other)

    def idempotent(self) -> None:
        """A topic without a ledger: the answers say what went where."""

        def sent(planted: Planted, *, stage: int = 1, **more: Any) -> Record:
            at = planted.copies[0].at if planted.copies else self.past()
            values = {"topic": self.telemetry, "partition": self.chance.randrange(2), "value": b"21.5"}
            record = self.record(planted, more.pop("life", None) or self.life(), at, **values | more)
            self.send(record, stage=stage)
            return record

        for _ in range(4):
            fine = self.plant("t-once")
            sent(fine, value=self.content())
            self.answer(fine, *self.chance.choice(((201,), (504, 201), (201, 201))))
        again, life = self.plant("t-again"), self.life(self.slot)
        first = sent(again, life=life)
        retried = sent(again, life=self.life(self.slot, life.instance), ts=first.ts + 4000, cause=RESTART)
        self.answer(again, 504, 201, place=lambda: retried.place)
        crossed = self.plant("t-crossed")
        first = sent(crossed, life=self.life(self.slot))
        sent(crossed, life=self.life(self.slot + 1), ts=first.ts + 4000, cause=DUAL, stage=self.chance.choice((1, 2)))
        self.answer(crossed, 201)
        # A crash between send and journal: nobody was told.
        sent(self.plant("t-unheard", accepted=False, phantom=("phantom",) * 3))
        unsure = self.plant("t-unsure")
        sent(unsure)
        self.answer(unsure, 504)
        gone = self.plant("t-lost")
        gone.claims.append(Claim("answer", lambda: (self.telemetry, 0, 3_000_000), ALWAYS_LOST))
        self.answer(gone, 201, topic=self.telemetry, place=gone.claims[0].place)
        self.answer(self.plant("t-stuck", otherwise=("stuck",) * 3), 504, topic=self.telemetry)

    def gaps(self) -> None:
        """Evidence that is gone: below the log's start, eaten between runs, with its topic, or compacted."""

        def always(cause: str, since: int = 1) -> Said:
            first, second, third = (cause if stage >= since else None for stage in (1, 2, 3))
            return first, second, third

        def filled(topic: str, n: int, stage: int, life: Life | None = None) -> list[Record]:
            records = []
            for _ in range(n):
                at = self.past() if stage == 1 else FROZEN_MS[1] - HOUR_MS // 2
                planted = self.plant(topic.rsplit(".", 1)[-1])
                records.append(self.record(planted, life or self.life(), at, topic=topic, value=self.content()))
                records[-1].stage, records[-1].visible = stage, stage
            self.stages[stage - 1].transactions.append(Transaction(records, "committed"))
            return records

        def unread(record: Record, cause: str) -> None:
            record.visible = None
            fates = always(cause, record.stage)
            planted = next(one for one in self.plants.ids if record in one.copies)
            planted.claims.append(Claim("ledger", lambda: record.place, fates))

        old = filled(self.archive, 5, 1)
        cut = old[: self.chance.randrange(1, 4)]
        for record in cut:
            unread(record, "below_start")
        # An expired key whose first delivery is gone: the second one is there, the first cannot be proven.
        half = next(one for one in self.plants.ids if cut[0] in one.copies)
        self.delivered(half, cut[0].at, value=self.content(), cause=EXPIRED)
        self.archived = old[len(cut)]
        # Another's place, at the very start of what is left.
        self.claim(self.plant("archive-taken"), lambda: self.archived.place, ALWAYS_LOST)

        filled(self.eaten, 3, 1)
        taken = filled(self.eaten, 4, 2)
        kept = self.chance.randrange(1, 4)
        for record in taken[:kept]:
            unread(record, "retention")
        self.eaten_to = taken[kept]
        at = FROZEN_MS[1] - HOUR_MS // 2
        self.claim(self.plant("eaten-taken"), lambda: self.eaten_to.place, (None, LOST, LOST), at=at, stage=2)

        self.anew_before = filled(self.anew, 2, 1)
        self.anew_unread = filled(self.anew, self.chance.randrange(1, 3), 2)
        for record in self.anew_unread:
            unread(record, "recreated")
        # Written after the topic was made anew.
        again = self.plant("anew-again")
        self.anew_after = self.record(
            again, self.life(), FROZEN_MS[1] - HOUR_MS // 3, topic=self.anew, value=self.content()
        )
        self.anew_after.stage = self.anew_after.visible = 2

        self.made_anew(filled)
        self.truncated(filled)
        for record in filled(self.absent, 2, 1):
            unread(record, "topic_gone")
        young = self.plant("absent-young", accepted=True)
        self.claim(young, lambda: (self.absent, 0, 77), (PENDING, "topic_gone", "topic_gone"), at=FROZEN_MS[0] - 1000)

        first, second = filled(self.compact, 2, 1)
        for record in (first, second):
            record.record_key = self.content()
        self.claim(self.plant("compacted"), lambda: first.place, always("compacted"))
        # Beyond the end there was nothing for compaction to take.
        self.claim(self.plant("compact-beyond"), lambda: (self.compact, 0, 4_000_000), ALWAYS_LOST)
        # The log goes on past the place later, where compaction may take records: not what was never there.
        self.claim(self.plant("compact-passed"), lambda: (self.compact, 0, 8), ALWAYS_LOST)
        for record in filled(self.compact, 10, 2):
            record.record_key = self.content()
        # Lost for sure and gone in part: lost is what can be said.
        torn = self.plant("torn")
        self.claim(torn, lambda: second.place, always("compacted"))
        self.claim(torn, lambda: (self.orders, 0, 4_000_000), ALWAYS_LOST)

    def made_anew(self, filled: Callable[[str, int, int], list[Record]]) -> None:
        """Topics of whose former life no run has seen anything: what was promised in it nobody can know."""
        always: Said = ("recreated", "recreated", "recreated")
        since: Said = ("topic_gone", "recreated", "recreated")
        after = FROZEN_MS[0] - HOUR_MS // 2

        def promised(topic: str, fates: Said) -> None:
            """By entries with the topic's id and without, as by earlier releases; some of them by answers as well."""
            records = filled(topic, self.chance.randrange(2, 5), 1)
            for nth, record in enumerate(records):
                record.visible, record.named = None, bool(nth % 2)
                planted = next(one for one in self.plants.ids if record in one.copies)
                planted.claims.append(Claim("ledger", lambda record=record: record.place, fates))  # type: ignore[misc]
                self.answer(planted, *self.chance.choice(((), (201,))))
            # The answer of a topic that has no ledger.
            told = self.plant("answered-before")
            told.claims.append(Claim("answer", lambda: (topic, 0, 700), fates))
            self.answer(told, 201, at=records[0].at, topic=topic, place=told.claims[0].place)

        def began(topic: str, ts: int, stage: int) -> Record:
            """The first record of its new life."""
            first = self.record(self.plant("anew-first"), self.life(), ts, ts=ts, topic=topic, value=self.content())
            first.stage = first.visible = stage
            return first

        promised(self.reborn, always)
        self.reborn_first = began(self.reborn, after, 1)

        # Its new life's first record may have a later timestamp than what was promised in it: the id tells.
        def missing(n: int) -> Callable[[], Place]:
            return lambda: (self.reborn, 0, n)

        self.claim(self.plant("reborn-lost"), missing(6_000_000), (None, LOST, LOST), at=after - 9, stage=2)
        self.claim(
            self.plant("reborn-unnamed"),
            missing(6_000_001),
            (None, "recreated", "recreated"),
            at=after - 9,
            stage=2,
            topic_id="",
        )
        self.claim(
            self.plant("reborn-later"), missing(6_000_002), (None, LOST, LOST), at=after + 9, stage=2, topic_id=""
        )
        self.claim(
            self.plant("reborn-other"),
            missing(6_000_003),
            (None, "recreated", "recreated"),
            at=after + 9,
            stage=2,
            topic_id="AAAAAAAAQACAAAAAAAAAAQ",
        )
        promised(self.returned, since)
        self.returned_first = began(self.returned, FROZEN_MS[1] - HOUR_MS // 2, 2)

    def truncated(self, filled: Callable[[str, int, int], list[Record]]) -> None:
        """A log of which a new leader has only the beginning: what was read beyond is no evidence."""
        records = filled(self.cut_off, self.chance.randrange(3, 6), 1)
        self.cut_from = records[self.chance.randrange(1, len(records))]
        fates: Said = (THERE, "truncated", "truncated")
        for record in records[records.index(self.cut_from) :]:
            record.vanished = 2
            planted = next(one for one in self.plants.ids if record in one.copies)
            planted.claims.append(Claim("ledger", lambda record=record: record.place, fates))  # type: ignore[misc]
        # Neither promised nor named by anybody; and another copy of what stays.
        nobody = Record(self.cut_off, 0, self.past(), self.past(), entered=False, vanished=2)
        self.plants.unkeyed.append(nobody)
        stranger = self.record(self.plant("cut-strange", accepted=False), None, self.past(), topic=self.cut_off)
        first = records[0]
        again = next(one for one in self.plants.ids if first in one.copies)
        copied = self.record(again, None, first.at, topic=self.cut_off, value=first.value, cause=FOREIGN)
        copied.ts = first.ts + 9
        stranger.vanished = copied.vanished = 2
        self.send(nobody, stranger, copied)
        # What comes later is judged as ever.
        at = FROZEN_MS[1] - HOUR_MS // 2
        filled(self.cut_off, 2, 2)
        self.claim(self.plant("cut-below"), lambda: first.place, (None, LOST, LOST), at=at, stage=2)
        self.claim(self.plant("cut-lost"), lambda: (self.cut_off, 0, 7_000_000), (None, LOST, LOST), at=at, stage=2)

    def unreadable(self) -> None:
        stage = self.chance.choice((1, 2))
        requests = self.ledger.removesuffix("ledger") + "requests"
        raw = [
            (self.orders, 0, b"x", [(wire.STAMP_HEADER, b"1;nonsense")]),
            (self.orders, 1, b"x", [(wire.STAMP_HEADER, b"")]),
            (self.ledger, self.slot, b"{", []),
            (self.ledger, self.slot, b'{"v":3,"slot":0,"pid":1,"epoch":0,"instance":"x","entries":[]}', []),
            (requests, 0, b"\xff\xfe", []),
            (requests, 1, b'{"v":1,"instance":"x","answers":[{"id":"12","fp":"","at":1,"status":201}]}', []),
        ]
        self.stages[stage - 1].raw += raw
        self.plants.rejects[stage] += len(raw)

    def windows(self) -> None:
        """What is older than the window is not told, and leaves the report when its time has come."""
        for age, until in ((WINDOW_MS + 30 * HOUR_MS, 0), (WINDOW_MS - HOUR_MS // 2, 1)):
            at, value = FROZEN_MS[0] - age, self.content()
            planted = self.plant("old", until=until)
            self.delivered(planted, at, ts=at, life=self.life(self.slot), value=value)
            self.delivered(planted, at, ts=at + 50, life=self.life(self.slot), value=value, cause=RESTART)

        # The window begins with a whole hour, for what is found as for the balance; also where a clock is behind.
        edge = (FROZEN_MS[1] - WINDOW_MS) // HOUR_MS * HOUR_MS
        for at, until in ((edge - 1, 1), (edge, 2), (edge + HOUR_MS // 6, 2)):
            for seen in (at, at - 5000):
                self.claim(
                    self.plant("edge", until=until), lambda: (self.orders, 0, 7_000_000), ALWAYS_LOST, at=at, seen=seen
                )

        # What a replay brings into the log with its old timestamp is told when it comes.
        at, value = FROZEN_MS[0] - WINDOW_MS - 30 * HOUR_MS, self.content()
        planted = self.plant("replayed", until=0, again=2)
        self.delivered(planted, at, ts=at, value=value)
        self.send(self.record(planted, None, at + 50, ts=at + 50, value=value, cause=FOREIGN), stage=2)

    def later(self) -> None:
        """What only the second run sees: more of everything, a partition and a topic that were not there."""
        at = FROZEN_MS[1] - HOUR_MS // 2
        for topic, partition in ((self.orders, 0), (self.orders, 4), (self.fresh, 0), self.held):
            for _ in range(self.chance.randrange(1, 3)):
                planted = self.plant("later")
                self.delivered(planted, at, stage=2, topic=topic, partition=partition, value=self.content())
                self.answer(planted, 201, stage=2)
        planted = self.plant("later-lost")
        self.claim(planted, lambda: (self.fresh, 0, 9_000_000), (None, LOST, LOST), at=at, stage=2)
        planted = self.plant("later-young")
        self.claim(planted, lambda: (self.orders, 4, 9_000_000), (None, PENDING, LOST), at=FROZEN_MS[1] - 1000, stage=2)
        young = self.plant("later-phantom", accepted=False, phantom=(None, PENDING, "phantom"))
        at = FROZEN_MS[1] - 1000
        self.send(self.record(young, self.life(), at, ts=at, value=self.content()), stage=2)
