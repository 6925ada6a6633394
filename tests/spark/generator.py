"""Scenarios with known faults, from a seed: every kind of finding, every cause, and several of these on one id."""

from collections.abc import Callable
from typing import Any

from service.contract.wire.headers import STAMP_HEADER
from service.contract.wire.ids import Header
from tests.spark.copies import Copies
from tests.spark.history import Writer
from tests.spark.oracle import LOST, PENDING, THERE, ByStage, Claim, Coordinates, Planted, Record
from tests.spark.script import (
    ALWAYS_LOST,
    BLOCKED_SINCE_MS,
    DUAL,
    EXPIRED,
    FOREIGN,
    FROZEN_MS,
    GRACE_MS,
    LEDGER_BEGINS_MS,
    MAX_SETTLE_MS,
    RESTART,
    WINDOW_MS,
    Transaction,
)
from tests.spark.times import FAR_FUTURE_MS, HOUR_MS


class Script(Copies):
    """The scenarios of one seed."""

    def __init__(self, seed: int, prefix: str, namespace: str, first_slot: int) -> None:
        super().__init__(seed, prefix, namespace, first_slot)
        for scenario in (
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
            self.blocked_partition,
            self.in_doubt,
            self.phantoms,
            self.idempotent,
            self.gaps,
            self.unreadable,
            self.windows,
            self.later,
        ):
            scenario()
        for stage in self.stages:
            self.chance.shuffle(stage.transactions)

    def lost(self) -> None:
        def missing(n: int = 1_000_000) -> Callable[[], Coordinates]:
            offset = n + self.chance.randrange(1000)
            return lambda: (self.orders, 0, offset)

        there = self.delivered(self.plant("there"), self.past())
        self.claim(self.plant("lost-taken"), lambda: there.coordinates, ALWAYS_LOST)
        self.claim(self.plant("lost-beyond"), missing(), ALWAYS_LOST)
        self.claim(self.plant("lost-aborted"), lambda: self.aborted_record.coordinates, ALWAYS_LOST)
        # The offset of the marker after the aborted record, which no record has.
        self.claim(
            self.plant("lost-marker"),
            lambda: (self.aborted_record.topic, self.aborted_record.partition, self.aborted_record.coordinates[2] + 1),
            ALWAYS_LOST,
        )

        def answered(
            planted: Planted, coordinates: Callable[[], Coordinates], outcomes: ByStage = ALWAYS_LOST, **more: Any
        ) -> None:
            planted.claims.append(Claim("answer", coordinates, outcomes))
            self.answer(planted, 201, coordinates=coordinates, **more)

        answered(self.plant("lost-answer"), missing())
        # Ledger and answer name the same coordinates: one claim. Different coordinates: two claims.
        both, coordinates = self.plant("lost-both"), missing()
        self.claim(both, coordinates, ALWAYS_LOST)
        self.answer(both, 201, 201, coordinates=coordinates)
        two = self.plant("lost-two")
        self.claim(two, missing(), ALWAYS_LOST)
        answered(two, missing(2_000_000))
        # Delivered, but not at the coordinates of the answer.
        beside = self.plant("lost-beside")
        self.delivered(beside, self.past())
        answered(beside, missing())
        # A duplicate, and a conflict, each with a further claim without a record.
        self.claim(self.repeat("lost-repeated", [RESTART, FOREIGN]), missing(), ALWAYS_LOST)
        self.claim(self.repeat("lost-conflict", [DUAL], others=[True]), missing(), ALWAYS_LOST)
        # Settled or not, to the millisecond.
        for early, outcome in ((1, LOST), (0, PENDING), (-MAX_SETTLE_MS // 2, PENDING)):
            seen = FROZEN_MS[0] - MAX_SETTLE_MS - early
            self.claim(self.plant("lost-young"), missing(), (outcome, LOST, LOST), at=seen)
            answered(self.plant("lost-young-answer"), missing(), (outcome, LOST, LOST), at=seen, ts=seen + 5000)
        # Accepted long ago, entered or answered just now: the grace starts at the evidence.
        for early, outcome in ((1, LOST), (0, PENDING), (1000 - GRACE_MS, PENDING)):
            seen, outcomes = FROZEN_MS[0] - GRACE_MS - early, (outcome, LOST, LOST)
            self.claim(self.plant("lost-late-entry"), missing(), outcomes, at=self.past(), seen=seen)
            answered(self.plant("lost-late-answer"), missing(), outcomes, at=self.past(), ts=seen)
        waits = self.repeat("pending-repeated", [RESTART], late=0)
        self.claim(waits, missing(), (PENDING, LOST, LOST), at=FROZEN_MS[0] - 1000)

    def blocked_partition(self) -> None:
        """A transaction that is open at the first run, and records after it in its partition."""
        topic, partition = self.blocked
        opened = []
        for nth in range(self.chance.randrange(1, 4)):
            outcomes: ByStage = (PENDING, None, None) if self.commits else (PENDING, "stuck", "stuck")
            planted = self.plant("open", default_category=outcomes, stuck="202" if nth else "504")
            writer = self.new_writer(self.blocked_slot, "held:1")
            copy = self.record(planted, writer, BLOCKED_SINCE_MS, ts=BLOCKED_SINCE_MS, topic=topic, partition=partition)
            copy.visible = 2 if self.commits else None
            opened.append(copy)
            self.answer(planted, 202 if nth else 504, ts=BLOCKED_SINCE_MS + 9000)
            if self.commits:
                self.answer(planted, 201, ts=FROZEN_MS[1] - HOUR_MS // 2, stage=2)
        self.stages[0].transactions.append(Transaction(opened, "open"))
        self.plants.blocked[1] = {self.blocked, (self.ledger, self.blocked_slot)}
        behind = self.plant("behind")
        copy = self.record(behind, self.new_writer(), self.past(), topic=topic, partition=partition)
        copy.visible = 2
        self.behind = copy
        behind.claims.append(Claim("ledger", lambda: copy.coordinates, (PENDING, THERE, THERE)))
        self.answer(behind, 201)
        repeated = self.plant("behind-again")
        value = self.content()
        self.delivered(repeated, copy.at, writer=self.new_writer(self.slot), value=value)
        again = self.record(
            repeated,
            self.new_writer(self.slot),
            copy.at,
            ts=copy.at + 9000,
            topic=topic,
            partition=partition,
            value=value,
            visible=2,
            cause=RESTART,
        )
        repeated.claims.append(Claim("ledger", lambda: again.coordinates, (PENDING, THERE, THERE)))
        self.stages[0].transactions.append(Transaction([copy, again], "committed"))
        # Claims on the first undecided offset, and past the end of the log.
        self.claim(self.plant("behind-first"), lambda: opened[0].coordinates, (PENDING, LOST, LOST))
        nothing = self.plant("behind-nothing")
        # Past the end of a blocked log, the loss is not proven yet.
        self.claim(nothing, lambda: (topic, partition, 5_000_000), (PENDING, LOST, LOST))
        # If the ledger of the writer's slot is blocked, the verdict is open, however old the record looks.
        for ts in (
            BLOCKED_SINCE_MS - MAX_SETTLE_MS,
            BLOCKED_SINCE_MS - MAX_SETTLE_MS + 1,
            self.past(),
            FROZEN_MS[0] - 40 * HOUR_MS,
        ):
            for at in (ts, ts - HOUR_MS // 6):
                unclaimed = self.plant("unclaimed", accepted=False, phantom=(PENDING, "phantom", "phantom"))
                self.send(self.record(unclaimed, self.new_writer(self.blocked_slot), at, ts=ts, value=self.content()))

    def in_doubt(self) -> None:
        """Answered 202 or 504 only. A blocked ledger may still have the entry."""
        stuck: ByStage = ("stuck", "stuck", "stuck")
        later: ByStage = (PENDING, "stuck", "stuck")
        for ts, outcomes in (
            (self.past(), stuck),
            (BLOCKED_SINCE_MS - MAX_SETTLE_MS, stuck),
            (BLOCKED_SINCE_MS - MAX_SETTLE_MS + 1, later),
            (FROZEN_MS[0] - 1000, later),
        ):
            for status in (504, 202):
                for at in (ts - 1, ts - HOUR_MS // 6):
                    self.answer(
                        self.plant("stuck", default_category=outcomes, stuck=str(status)), status, 409, at=at, ts=ts
                    )
        self.answer(self.plant("stuck-both", default_category=stuck), 202, 504)
        # Answered in another hour than the acceptance: a row of the hour of acceptance settles the answer.
        for stage, category in ((1, None), (2, "stuck")):
            other_hour = self.plant("settled-elsewhere", default_category=(category, None, None))
            self.delivered(other_hour, self.past(), stage=stage)
            self.answer(other_hour, 504, at=FROZEN_MS[0] - 4 * HOUR_MS)
        freed = self.plant("freed-elsewhere", accepted=False)
        self.answer(freed, 504, at=FROZEN_MS[0] - 4 * HOUR_MS)
        self.answer(freed, 503, at=FROZEN_MS[0] - 2 * HOUR_MS)
        again = self.plant("freed-before", default_category=stuck)
        self.answer(again, 503, at=FROZEN_MS[0] - 4 * HOUR_MS)
        self.answer(again, 504, at=FROZEN_MS[0] - 2 * HOUR_MS)
        self.answer(self.plant("freed-202", accepted=False), 202, 503)
        # A 503 before the 504 does not free the key; a later 503 does, in any run.
        self.answer(self.plant("stuck-after", default_category=stuck), 503, 503, 504)
        self.answer(self.plant("freed-again", accepted=False), 503, 504, 503)
        at = self.past()
        tried = self.plant("stuck-tried", default_category=stuck, stuck="202")
        self.answer(tried, 503, at=at, ts=at + 10)
        self.answer(tried, 202, at=at, ts=at + 11)
        freed = self.plant("freed-later", accepted=False)
        self.answer(freed, 504, at=at, ts=at + 10)
        self.answer(freed, 503, at=at, ts=at + 11)
        # A record of another program under the same key, in the same hour or another, settles nothing.
        here, hour_before = FROZEN_MS[0] - HOUR_MS, FROZEN_MS[0] - 2 * HOUR_MS
        for story, statuses, accepted in (("stuck-strange", (504,), True), ("freed-strange", (504, 503), False)):
            for copied, answered in ((here, here), (here, hour_before), (hour_before, here)):
                strange = self.plant(story, default_category=stuck, accepted=accepted)
                self.send(self.record(strange, None, copied, topic=self.foreign))
                self.answer(strange, *statuses, at=answered)
        self.answer(self.plant("refused", accepted=False), 422)
        self.answer(self.plant("not-written", accepted=False), 503, 503)
        # A 504 whose event is delivered by a later attempt, or read by a later run.
        late = self.plant("stuck-then-there", default_category=(PENDING, PENDING, PENDING))
        self.delivered(late, FROZEN_MS[0] - 5000, stage=2, ts=FROZEN_MS[0] + 60_000)
        self.answer(late, 504, ts=FROZEN_MS[0] - 1000)
        self.answer(late, 201, stage=2)
        revised = self.plant("stuck-revised", default_category=("stuck", None, None))
        self.delivered(revised, self.past(), stage=2)
        self.answer(revised, 504)
        # Settled or not at the second run, to the millisecond.
        for early, outcome in ((0, "stuck"), (-1, PENDING)):
            ts = FROZEN_MS[1] - MAX_SETTLE_MS - early
            self.answer(
                self.plant("stuck-border", default_category=(None, outcome, "stuck")), 504, at=ts, ts=ts, stage=2
            )
            answered_ms, late = (
                FROZEN_MS[1] - GRACE_MS - early,
                self.plant("stuck-late", default_category=(None, outcome, "stuck")),
            )
            self.answer(late, 504, at=FROZEN_MS[1] - 2 * MAX_SETTLE_MS, ts=answered_ms, stage=2)

    def phantoms(self) -> None:
        always: ByStage = ("phantom", "phantom", "phantom")

        def sent(planted: Planted, at: int, writer: Writer | None = None, **more: Any) -> Record:
            record = self.record(planted, writer or self.new_writer(), at, **{"ts": at, "value": self.content()} | more)
            self.send(record)
            return record

        sent(self.plant("phantom", accepted=False, phantom=always), self.past())
        # An acceptance in 2096 is not plausible; a timestamp of that year counts as the time of the run that read it.
        sent(self.plant("phantom-forged", accepted=False, phantom=always), FAR_FUTURE_MS, ts=self.past())
        after: ByStage = (PENDING, "phantom", "phantom")
        sent(
            self.plant("phantom-wild", accepted=False, phantom=after),
            self.past(),
            self.new_writer(self.slot),
            ts=FAR_FUTURE_MS,
        )
        forged = self.plant("forged")
        first = self.delivered(forged, self.past(), value=self.content())
        copied = self.record(forged, first.writer, FAR_FUTURE_MS, ts=first.ts + 9, value=first.value, cause=FOREIGN)
        self.send(copied)
        # A slot without a ledger partition.
        gap: ByStage = ("evidence_gap",) * 3
        sent(self.plant("phantom-slot", accepted=False, phantom=gap), self.past(), self.new_writer(10_000))
        # The journal names these coordinates; and other coordinates.
        answered = self.plant("phantom-answered")
        sent(answered, self.past())
        self.answer(answered, 201)
        beside = self.plant("phantom-beside", phantom=always)
        sent(beside, self.past())
        beside.claims.append(Claim("answer", lambda: (self.orders, 0, 8_000_000), ALWAYS_LOST))
        self.answer(beside, 201, coordinates=beside.claims[0].coordinates)
        twice, writer, value = (
            self.plant("phantom-twice", accepted=False, phantom=always),
            self.new_writer(),
            self.content(),
        )
        at = self.past()
        sent(twice, at, writer, value=value)
        sent(twice, at, writer, ts=at + 10, value=value, cause=FOREIGN)
        for age, outcome in ((MAX_SETTLE_MS, "phantom"), (MAX_SETTLE_MS - 1, PENDING), (0, PENDING)):
            young = self.plant("phantom-young", accepted=False, phantom=(outcome, "phantom", "phantom"))
            sent(young, FROZEN_MS[0] - age, self.new_writer(self.slot))
        for age, outcome in ((GRACE_MS, "phantom"), (GRACE_MS - 1, PENDING)):
            late = self.plant("phantom-late", accepted=False, phantom=(outcome, "phantom", "phantom"))
            sent(late, self.past(), self.new_writer(self.slot), ts=FROZEN_MS[0] - age)
        # Mirrored with its headers into a cluster with a younger ledger, or journal.
        for at, outcomes in ((LEDGER_BEGINS_MS - 1, gap), (LEDGER_BEGINS_MS, always)):
            for topic in (self.orders, self.telemetry):
                sent(self.plant("mirrored", accepted=False, phantom=outcomes), at, ts=self.past(), topic=topic)
        # The ledger of this slot begins with `kept`: older records are unprovable.
        at = FROZEN_MS[0] - 2 * HOUR_MS
        for _ in range(self.chance.randrange(1, 4)):
            planted = self.plant("entry-gone", accepted=False, phantom=("evidence_gap",) * 3)
            self.delivered(planted, at, writer=self.new_writer(self.trimmed_slot), partition=1, ts=at)
        self.kept_ms = at + 60_000
        kept = self.plant("kept")
        self.kept = self.record(kept, self.new_writer(self.trimmed_slot), self.kept_ms, ts=self.kept_ms)
        # The acceptance decides, not the timestamp, which a client may set.
        for near, other, outcomes in ((-1, 0, gap), (1, 0, always), (1, -HOUR_MS, always), (-1, HOUR_MS // 2, gap)):
            unclaimed = self.plant("phantom-cut", accepted=False, phantom=outcomes)
            at = self.kept_ms + near
            sent(unclaimed, at, self.new_writer(self.trimmed_slot), partition=1, ts=at + other)

    def idempotent(self) -> None:
        """A topic without a ledger: the answers name the coordinates."""

        def sent(planted: Planted, *, stage: int = 1, **more: Any) -> Record:
            at = planted.copies[0].at if planted.copies else self.past()
            values = {"topic": self.telemetry, "partition": self.chance.randrange(2), "value": b"21.5"}
            record = self.record(planted, more.pop("writer", None) or self.new_writer(), at, **values | more)
            self.send(record, stage=stage)
            return record

        for _ in range(4):
            fine = self.plant("t-once")
            sent(fine, value=self.content())
            self.answer(fine, *self.chance.choice(((201,), (504, 201), (201, 201))))
        again, writer = self.plant("t-again"), self.new_writer(self.slot)
        first = sent(again, writer=writer)
        retried = sent(again, writer=self.new_writer(self.slot, writer.instance), ts=first.ts + 4000, cause=RESTART)
        self.answer(again, 504, 201, coordinates=lambda: retried.coordinates)
        crossed = self.plant("t-crossed")
        first = sent(crossed, writer=self.new_writer(self.slot))
        sent(
            crossed,
            writer=self.new_writer(self.slot + 1),
            ts=first.ts + 4000,
            cause=DUAL,
            stage=self.chance.choice((1, 2)),
        )
        self.answer(crossed, 201)
        # A crash between send and journal: there is no answer.
        sent(self.plant("t-unclaimed", accepted=False, phantom=("phantom",) * 3))
        in_doubt = self.plant("t-in-doubt")
        sent(in_doubt)
        self.answer(in_doubt, 504)
        gone = self.plant("t-lost")
        gone.claims.append(Claim("answer", lambda: (self.telemetry, 0, 3_000_000), ALWAYS_LOST))
        self.answer(gone, 201, topic=self.telemetry, coordinates=gone.claims[0].coordinates)
        self.answer(self.plant("t-stuck", default_category=("stuck",) * 3), 504, topic=self.telemetry)

    def gaps(self) -> None:
        """Evidence that no longer exists: below the log's start, deleted between runs, with its topic, or compacted."""

        def always(cause: str, since: int = 1) -> ByStage:
            first, second, third = (cause if stage >= since else None for stage in (1, 2, 3))
            return first, second, third

        def filled(topic: str, n: int, stage: int, writer: Writer | None = None) -> list[Record]:
            records = []
            for _ in range(n):
                at = self.past() if stage == 1 else FROZEN_MS[1] - HOUR_MS // 2
                planted = self.plant(topic.rsplit(".", 1)[-1])
                records.append(self.record(planted, writer or self.new_writer(), at, topic=topic, value=self.content()))
                records[-1].stage, records[-1].visible = stage, stage
            self.stages[stage - 1].transactions.append(Transaction(records, "committed"))
            return records

        def unread(record: Record, cause: str) -> None:
            record.visible = None
            outcomes = always(cause, record.stage)
            planted = next(one for one in self.plants.ids if record in one.copies)
            planted.claims.append(Claim("ledger", lambda: record.coordinates, outcomes))

        old = filled(self.archive, 5, 1)
        cut = old[: self.chance.randrange(1, 4)]
        for record in cut:
            unread(record, "below_start")
        # An expired key whose first delivery is gone: the second one is there, the first cannot be proven.
        half = next(one for one in self.plants.ids if cut[0] in one.copies)
        self.delivered(half, cut[0].at, value=self.content(), cause=EXPIRED)
        self.archived = old[len(cut)]
        # A claim on the coordinates of another record, at the start of the log.
        self.claim(self.plant("archive-taken"), lambda: self.archived.coordinates, ALWAYS_LOST)

        filled(self.expiring, 3, 1)
        taken = filled(self.expiring, 4, 2)
        kept = self.chance.randrange(1, 4)
        for record in taken[:kept]:
            unread(record, "retention")
        self.expired_to = taken[kept]
        at = FROZEN_MS[1] - HOUR_MS // 2
        self.claim(self.plant("expired-taken"), lambda: self.expired_to.coordinates, (None, LOST, LOST), at=at, stage=2)

        self.recreated_before = filled(self.recreated, 2, 1)
        self.recreated_unread = filled(self.recreated, self.chance.randrange(1, 3), 2)
        for record in self.recreated_unread:
            unread(record, "recreated")
        # Written after the topic was recreated.
        again = self.plant("recreated-again")
        self.recreated_after = self.record(
            again, self.new_writer(), FROZEN_MS[1] - HOUR_MS // 3, topic=self.recreated, value=self.content()
        )
        self.recreated_after.stage = self.recreated_after.visible = 2

        self.recreated_topics(filled)
        self.truncated(filled)
        for record in filled(self.absent, 2, 1):
            unread(record, "topic_gone")
        young = self.plant("absent-young", accepted=True)
        self.claim(young, lambda: (self.absent, 0, 77), (PENDING, "topic_gone", "topic_gone"), at=FROZEN_MS[0] - 1000)

        first, second = filled(self.compact, 2, 1)
        for record in (first, second):
            record.record_key = self.content()
        self.claim(self.plant("compacted"), lambda: first.coordinates, always("compacted"))
        # Past the end there was no record for compaction to delete.
        self.claim(self.plant("compact-beyond"), lambda: (self.compact, 0, 4_000_000), ALWAYS_LOST)
        # The log grows past the offset later. Compaction cannot have deleted a record that was never written.
        self.claim(self.plant("compact-passed"), lambda: (self.compact, 0, 8), ALWAYS_LOST)
        for record in filled(self.compact, 10, 2):
            record.record_key = self.content()
        # One claim is lost, another is unprovable: the id is lost.
        torn = self.plant("torn")
        self.claim(torn, lambda: second.coordinates, always("compacted"))
        self.claim(torn, lambda: (self.orders, 0, 4_000_000), ALWAYS_LOST)

    def recreated_topics(self, filled: Callable[[str, int, int], list[Record]]) -> None:
        """Topics that were recreated before a run read them: claims on the earlier topic are unprovable."""
        always: ByStage = ("recreated", "recreated", "recreated")
        since: ByStage = ("topic_gone", "recreated", "recreated")
        after = FROZEN_MS[0] - HOUR_MS // 2

        def claimed(topic: str, outcomes: ByStage) -> None:
            """Claim records by entries with and without the topic id (earlier releases wrote none), some by answers."""
            records = filled(topic, self.chance.randrange(2, 5), 1)
            for nth, record in enumerate(records):
                record.visible, record.named = None, bool(nth % 2)
                planted = next(one for one in self.plants.ids if record in one.copies)
                planted.claims.append(Claim("ledger", lambda record=record: record.coordinates, outcomes))  # type: ignore[misc]
                self.answer(planted, *self.chance.choice(((), (201,))))
            # An answer in a topic without ledger.
            answered = self.plant("answered-before")
            answered.claims.append(Claim("answer", lambda: (topic, 0, 700), outcomes))
            self.answer(answered, 201, at=records[0].at, topic=topic, coordinates=answered.claims[0].coordinates)

        def began(topic: str, ts: int, stage: int) -> Record:
            """Write the first record of the recreated topic."""
            first = self.record(
                self.plant("recreated-first"), self.new_writer(), ts, ts=ts, topic=topic, value=self.content()
            )
            first.stage = first.visible = stage
            return first

        claimed(self.recreated_early, always)
        self.recreated_early_first = began(self.recreated_early, after, 1)

        # The first record of the present topic may have a later timestamp than a claim on it: the topic id decides.
        def missing(n: int) -> Callable[[], Coordinates]:
            return lambda: (self.recreated_early, 0, n)

        self.claim(self.plant("recreated-lost"), missing(6_000_000), (None, LOST, LOST), at=after - 9, stage=2)
        self.claim(
            self.plant("recreated-unnamed"),
            missing(6_000_001),
            (None, "recreated", "recreated"),
            at=after - 9,
            stage=2,
            topic_id="",
        )
        self.claim(
            self.plant("recreated-later"), missing(6_000_002), (None, LOST, LOST), at=after + 9, stage=2, topic_id=""
        )
        self.claim(
            self.plant("recreated-other"),
            missing(6_000_003),
            (None, "recreated", "recreated"),
            at=after + 9,
            stage=2,
            topic_id="AAAAAAAAQACAAAAAAAAAAQ",
        )
        claimed(self.recreated_late, since)
        self.recreated_late_first = began(self.recreated_late, FROZEN_MS[1] - HOUR_MS // 2, 2)

    def truncated(self, filled: Callable[[str, int, int], list[Record]]) -> None:
        """A log whose new leader has only its beginning: the later records, which were read, are no evidence."""
        records = filled(self.truncated_topic, self.chance.randrange(3, 6), 1)
        self.truncated_from = records[self.chance.randrange(1, len(records))]
        outcomes: ByStage = (THERE, "truncated", "truncated")
        for record in records[records.index(self.truncated_from) :]:
            record.vanished = 2
            planted = next(one for one in self.plants.ids if record in one.copies)
            planted.claims.append(Claim("ledger", lambda record=record: record.coordinates, outcomes))  # type: ignore[misc]
        # Records without a claim, and a copy of a record that stays.
        nobody = Record(self.truncated_topic, 0, self.past(), self.past(), entered=False, vanished=2)
        self.plants.unkeyed.append(nobody)
        stranger = self.record(self.plant("cut-strange", accepted=False), None, self.past(), topic=self.truncated_topic)
        first = records[0]
        again = next(one for one in self.plants.ids if first in one.copies)
        copied = self.record(again, None, first.at, topic=self.truncated_topic, value=first.value, cause=FOREIGN)
        copied.ts = first.ts + 9
        stranger.vanished = copied.vanished = 2
        self.send(nobody, stranger, copied)
        # Later records are audited as in any log.
        at = FROZEN_MS[1] - HOUR_MS // 2
        filled(self.truncated_topic, 2, 2)
        self.claim(self.plant("cut-below"), lambda: first.coordinates, (None, LOST, LOST), at=at, stage=2)
        self.claim(
            self.plant("cut-lost"), lambda: (self.truncated_topic, 0, 7_000_000), (None, LOST, LOST), at=at, stage=2
        )

    def unreadable(self) -> None:
        stage = self.chance.choice((1, 2))
        requests = self.ledger.removesuffix("ledger") + "requests"
        raw: list[tuple[str, int, bytes, tuple[Header, ...]]] = [
            (self.orders, 0, b"x", ((STAMP_HEADER, b"1;nonsense"),)),
            (self.orders, 1, b"x", ((STAMP_HEADER, b""),)),
            (self.ledger, self.slot, b"{", ()),
            (self.ledger, self.slot, b'{"v":0,"slot":0,"pid":1,"epoch":0,"instance":"x","entries":[]}', ()),
            (requests, 0, b"\xff\xfe", ()),
            (requests, 1, b'{"v":1,"instance":"x","answers":[{"id":"12","fp":"","at":1,"status":201}]}', ()),
        ]
        ts = FROZEN_MS[0] - 1
        undecoded = [
            Record(topic, partition, ts, ts, value=value, headers=headers, stage=stage)
            for topic, partition, value, headers in raw
        ]
        self.stages[stage - 1].raw += undecoded
        self.plants.undecoded += undecoded

    def windows(self) -> None:
        """Findings older than the window are not in the report, and leave the report when the window has moved on."""
        for age, shown_until in ((WINDOW_MS + 30 * HOUR_MS, 0), (WINDOW_MS - HOUR_MS // 2, 1)):
            at, value = FROZEN_MS[0] - age, self.content()
            planted = self.plant("old", shown_until=shown_until)
            self.delivered(planted, at, ts=at, writer=self.new_writer(self.slot), value=value)
            self.delivered(planted, at, ts=at + 50, writer=self.new_writer(self.slot), value=value, cause=RESTART)

        # The window of findings and balance begins with a whole hour, also if a clock is slow.
        edge = (FROZEN_MS[1] - WINDOW_MS) // HOUR_MS * HOUR_MS
        for at, shown_until in ((edge - 1, 1), (edge, 2), (edge + HOUR_MS // 6, 2)):
            for seen in (at, at - 5000):
                self.claim(
                    self.plant("edge", shown_until=shown_until),
                    lambda: (self.orders, 0, 7_000_000),
                    ALWAYS_LOST,
                    at=at,
                    seen=seen,
                )

        # A record that is written again with its old timestamp is in the report of the run that reads it.
        at, value = FROZEN_MS[0] - WINDOW_MS - 30 * HOUR_MS, self.content()
        planted = self.plant("replayed", shown_until=0, shown_from=2)
        self.delivered(planted, at, ts=at, value=value)
        self.send(self.record(planted, None, at + 50, ts=at + 50, value=value, cause=FOREIGN), stage=2)

    def later(self) -> None:
        """Records that only the second run reads, also in a new partition and a new topic."""
        at = FROZEN_MS[1] - HOUR_MS // 2
        for topic, partition in ((self.orders, 0), (self.orders, 4), (self.fresh, 0), self.blocked):
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
        self.send(self.record(young, self.new_writer(), at, ts=at, value=self.content()), stage=2)
