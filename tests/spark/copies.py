"""Stories of events that are there: once, several times, changed, under several keys."""

from collections.abc import Sequence
from typing import Any

from service.contract import wire
from tests.spark.history import Life
from tests.spark.oracle import Planted, Record, Retried, Said
from tests.spark.script import (
    CAUSES,
    DUAL,
    EXPIRED,
    FOREIGN,
    FROZEN_MS,
    HOUR_MS,
    RESTART,
    REWRITE,
    TTL_MS,
    Words,
)


class Copies(Words):
    """What healthy and unhealthy writers left in the topics."""

    def healthy(self) -> None:
        answers = [(201,), (201, 201), (409, 201), (504, 201), (202, 201), (201, 422), (503, 201), (504, 503, 201), ()]
        for statuses in [*answers, *self.chance.choices(answers, k=6)]:
            planted = self.plant("once", scope=self.chance.choice(("", "", "caller")))
            self.delivered(planted, self.past(), **self.shape())
            self.answer(planted, *statuses)
        # A tombstone, and headers that others put behind ours.
        planted = self.plant("tombstone")
        self.delivered(planted, self.past(), value=None, record_key=self.content())
        behind = wire.Stamp(bytes(16), bytes(8), self.past(), 1, 1, 1, "other:1").encode()
        planted = self.plant("twice")
        headers = ((wire.STAMP_HEADER, behind), (wire.KEY_HEADER, b"other"))
        self.delivered(planted, self.past(), headers=headers)

    def batches(self) -> None:
        key, at, life = self.key("batch"), self.past(), self.life()
        members = []
        for member in range(self.chance.randrange(2, 5)):
            planted = Planted(wire.member_id(key, member), key)
            self.plants.ids.append(planted)
            topic = self.chance.choice((self.orders, self.spare))
            batch = (wire.event_id(key), member)
            members.append(self.record(planted, life, at, topic=topic, value=self.content(), batch=batch))
            self.answer(planted, 201)
        self.commit(*members)

    def aborted(self) -> None:
        """Transactions that the broker aborted: nothing of them was ever delivered."""

        def cut_off(planted: Planted, **more: Any) -> Record:
            copy = self.record(planted, self.life(), self.past(), visible=None, **more)
            self.commit(copy, fate="aborted")
            return copy

        again = self.plant("aborted-again")
        first = cut_off(again, **self.shape())
        self.delivered(again, first.at, ts=first.ts + 9, value=first.value)
        self.answer(again, 503, 201, place=lambda: again.copies[1].place)
        unsure = self.plant("aborted-unsure", otherwise=("stuck", "stuck", "stuck"))
        cut_off(unsure)
        self.answer(unsure, 504, 409)
        freed = self.plant("aborted-freed", accepted=False)
        cut_off(freed)
        self.answer(freed, 504, 503)
        silent = self.plant("aborted-silent", accepted=False)
        self.hole = cut_off(silent, partition=3)

    def fenced(self) -> None:
        """A zombie whose transaction the next owner's epoch aborts; the next owner delivers."""
        at, slot = self.past(), self.slot
        planted = [self.plant("zombie") for _ in range(3)]
        zombie, owner = self.life(slot, "zombie:1"), self.life(slot, "owner:1")
        records = [self.record(one, zombie, at, visible=None, value=self.content()) for one in planted]
        self.commit(*records, fate="fenced")
        for one, record in zip(planted, records, strict=True):
            copy = self.record(one, owner, at, ts=record.ts + 5, value=record.value)
            self.commit(copy)
            self.answer(one, 201, place=lambda copy=copy: copy.place)  # type: ignore[misc]

    def repeat(
        self,
        story: str,
        causes: Sequence[str],
        *,
        others: Sequence[bool] = (),
        shape: dict[str, Any] | None = None,
        late: float = 0.3,
        base: Life | None = None,
    ) -> Planted:
        """An id with a copy for each cause after its first one; `others` says which have another fingerprint.

        Copies that the ledger knows come first, whatever their offsets; the others are sent in between.
        """
        causes = sorted(causes, key=lambda cause: (cause == FOREIGN) - (cause == DUAL))
        planted = self.plant(story)
        shape = self.shape() if shape is None else shape
        at = FROZEN_MS[0] - 56 * HOUR_MS + self.chance.randrange(20 * 60_000) if EXPIRED in causes else self.past()
        first = self.record(planted, base or self.life(), at, **shape)
        self.commit(first)
        self.answer(planted, 201)
        earlier = [first]
        for nth, cause in enumerate(causes):
            more = dict(shape)
            other = bool(others) and others[nth]
            if other:
                change = self.chance.choice(("value", "record_key", "headers", "asked", "topic"))
                changes: dict[str, dict[str, Any]] = {
                    "value": {"value": self.content()},
                    "record_key": {"record_key": b"another"},
                    "headers": {"headers": (("another", b"1"),)},
                    "asked": {"asked": 0, "partition": 0} if shape["asked"] is None else {"asked": None},
                    "topic": {"topic": self.spare, "partition": 0, "asked": None},
                }
                more |= changes["value" if cause == FOREIGN else change]
            elif shape["asked"] is None:
                more["partition"] = self.chance.randrange(3)
            # Whatever comes before an expiry leaves time for it.
            latest = FROZEN_MS[0] - (30 * HOUR_MS if EXPIRED in causes[nth:] else HOUR_MS // 2)
            copy = self._another(planted, cause, earlier, more, latest)
            copy.other, copy.cause = other, cause
            # A copy's cause may be any earlier one: none comes before what it follows.
            stage = 2 if earlier[-1].stage == 2 or self.chance.random() < late else 1
            (self.commit if copy.entered else self.send)(copy, stage=stage)
            earlier.append(copy)
        return planted

    def _another(
        self, planted: Planted, cause: str, earlier: Sequence[Record], more: dict[str, Any], latest: int
    ) -> Record:
        ours = [copy for copy in earlier if copy.life is not None and copy.entered]
        model = self.chance.choice(ours)
        assert model.life is not None
        last_at, last_ts = max(copy.at for copy in ours), max(copy.ts for copy in ours)
        # A retry carries the acceptance of the first claim, unless the store was lost in between.
        at = last_at + self.chance.choice([0, *(ms for ms in (1, 50 * 60_000) if last_at + ms < latest)])
        life: Life | None
        if cause == RESTART:
            slot, instance, number = model.life.slot, model.life.instance, model.life.producer_id
            self._lives += 1
            new = self.slot * 1000 + self._lives
            life = self.chance.choice(
                [
                    Life(slot, number, model.life.epoch + 1 + self._lives, instance),
                    Life(slot, new, 0, instance),
                    Life(slot, new, 0, f"moved-{new}:1"),
                    Life(self.slot + (slot - self.slot + 1) % 4, new, 0, instance),
                ]
            )
        elif cause == DUAL:
            taken = {copy.life.slot for copy in ours if copy.life}
            free = [n for n in range(self.slot, self.slot + 4) if n not in taken]
            life = self.life(self.chance.choice(free))
        elif cause == REWRITE:
            life = model.life
            at += self.chance.choice((0, TTL_MS)) if at + TTL_MS < latest else 0
        elif cause == EXPIRED:
            life = self.life(self.chance.choice([None, model.life.slot]))
            at = last_at + TTL_MS + self.chance.choice((0, 1, 60_000))
        else:
            life = self.chance.choice([None, model.life])
            at = model.at
        if cause == FOREIGN:
            ts = min(at + self.chance.randrange(-2000, HOUR_MS), FROZEN_MS[0] - 1)
            if life is None:
                at = ts
                noise = (("traceparent", b"00-1"),) if self.chance.random() < 0.5 else ()
                # Headers that are ours or the tracer's are none of the client's.
                copy = self.record(planted, None, at, **more | {"ts": ts})
                copy.headers = copy.headers + noise
                copy.entered = False
                return copy
        else:
            ts = max(last_ts, at) + self.chance.randrange(1, 5000)
        copy = self.record(planted, life, at, **more | {"ts": ts})
        copy.entered = cause != FOREIGN
        return copy

    def copies(self) -> None:
        for cause in CAUSES:
            for _ in range(2):
                self.repeat(f"again-{cause}", [cause])
        # Asked for with a partition: a bare copy in it is the same request.
        placed = {"partition": 2, "asked": 2, "value": self.content()}
        planted = self.repeat("placed", [], shape=placed)
        bare = self.record(planted, None, self.past(), **placed | {"asked": None})
        bare.cause = FOREIGN
        bare.headers += (("traceparent", b"00-1"),)  # in every seed: it is none of what was asked for
        self.send(bare)
        # Two producers of one number: that slot or instance is the same, but neither number nor epoch is another.
        planted, life, at = self.plant("namesake"), self.life(), self.past()
        self.delivered(planted, at, life=life)
        twin = Life(life.slot, life.producer_id, life.epoch, "elsewhere:1")
        self.delivered(planted, at, life=twin, ts=at + 5000, cause=DUAL)
        # The same place in time: partitions and offsets decide which copy is the first.
        planted, life, at, value = self.plant("ties"), self.life(), self.past(), self.content()
        for partition in self.chance.sample((0, 1, 2, 2, 1, 0), 6):
            self.delivered(planted, at, life=life, ts=at + 7, partition=partition, value=value, cause=REWRITE)
        # Almost as long as the retention, and exactly as long.
        for apart, cause in ((TTL_MS - 1, DUAL), (TTL_MS, EXPIRED)):
            planted, at, value = self.plant("apart"), FROZEN_MS[0] - 30 * HOUR_MS, self.content()
            first = self.delivered(planted, at, life=self.life(self.slot), value=value)
            self.delivered(
                planted, at + apart, life=self.life(self.slot + 1), ts=first.ts + apart, value=value, cause=cause
            )
        # Not in the ledger, but of another producer: what a crash left, under the causes of any other copy.
        planted, at, value = self.plant("unentered"), self.past(), self.content()
        first = self.delivered(planted, at, life=self.life(self.slot), value=value)
        for nth, (life, cause) in enumerate(((self.life(self.slot), RESTART), (self.life(self.slot + 1), DUAL))):
            self.send(self.record(planted, life, at, ts=first.ts - 500 + nth, value=value, cause=cause))
        # Bare and then stamped, neither in the ledger: the first has no acceptance to be far from.
        planted, at, value = self.plant("bare-first", accepted=False), self.past(), self.content()
        planted.phantom = ("phantom", "phantom", "phantom")
        self.send(self.record(planted, None, at, ts=at, value=value))
        self.send(self.record(planted, self.life(), at, ts=at + 10, value=value, cause=DUAL))

    def several_causes(self) -> None:
        for _ in range(4):
            causes = self.chance.choices((RESTART, REWRITE, FOREIGN), k=self.chance.randrange(2, 5))
            causes += self.chance.choice(([], [DUAL], [EXPIRED], [DUAL, DUAL], [EXPIRED, DUAL]))
            self.chance.shuffle(causes)
            base = self.life(self.slot)
            self.repeat("several", causes, base=base)

    def conflicts(self) -> None:
        for cause in CAUSES:
            self.repeat(f"conflict-{cause}", [cause], others=[True])
        causes = self.chance.choices((RESTART, REWRITE, FOREIGN), k=4)
        causes.sort(key=lambda cause: cause == FOREIGN)
        others = [self.chance.random() < 0.5 for _ in causes]
        others[self.chance.randrange(4)] = True
        self.repeat("conflict-several", causes, others=others)
        # A bare copy in another partition than the one that was asked for is another request.
        placed = {"partition": 1, "asked": 1, "value": self.content()}
        planted = self.repeat("misplaced", [], shape=placed)
        bare = self.record(planted, None, self.past(), **placed | {"asked": None, "partition": 2})
        bare.cause, bare.other = FOREIGN, True
        self.send(bare)

    def others_topics(self) -> None:
        """Topics that others write: ids without any request of ours."""

        def bare(planted: Planted, n: int, **more: Any) -> None:
            for nth in range(n):
                values = {"topic": self.foreign, "partition": self.chance.randrange(2), "cause": FOREIGN}
                at = self.past()
                self.send(self.record(planted, None, at, **values | {"ts": at} | more), stage=1 + (nth == 3 and n < 9))

        bare(self.plant("f-once", accepted=False), 1)
        bare(self.plant("f-again", accepted=False), self.chance.randrange(2, 6))
        bare(self.plant("f-hundred", accepted=False), 100 if self.seed % 5 else 140, value=self.content())
        odd = self.plant("f-conflict", accepted=False)
        bare(odd, 2)
        bare(odd, 1, value=b"2", other=True)
        for topic in (self.foreign, self.orders):
            for partition in range(2):
                for _ in range(self.chance.randrange(1, 4)):
                    stage = self.chance.choice((1, 2))
                    record = Record(topic, partition, self.past(), 0, value=self.chance.choice((b"", b"x", None)))
                    record.record_key = b"k"
                    self.send(record, stage=stage)
                    self.plants.unkeyed.append(record)

    def client_duplicates(self) -> None:
        def group(*ats: int, stage: int = 1, scope: str = "", **more: Any) -> list[Planted]:
            shape = {"value": self.content(), "record_key": self.content(), **more}
            members = []
            for nth, at in enumerate(ats):
                planted = self.plant("client", scope=scope)
                last = nth == len(ats) - 1
                self.delivered(planted, at, stage=stage if last else 1, **shape)
                members.append(planted)
            return members

        at = FROZEN_MS[0] - 2 * HOUR_MS
        self.plants.retried.append(Retried(group(at, at + self.chance.randrange(HOUR_MS), partition=1)))
        self.plants.retried.append(Retried(group(at, at, at + 5, headers=(("h", b"1"),))))
        self.plants.retried.append(Retried(group(at, at + HOUR_MS, stage=2)))
        early = FROZEN_MS[0] - 30 * HOUR_MS
        self.plants.retried.append(Retried(group(early, early + TTL_MS - 1)))
        self.plants.retried.append(Retried(group(at, at + 1000, scope="caller")))
        # With a timestamp of the client's own, the same in both.
        self.plants.retried.append(Retried(group(at, at + 1000, ts=at - 5000)))
        # What happens to another record key is no matter.
        key, value = self.content(), self.content()
        first = group(at, record_key=key, value=value)
        group(at + 500)
        self.plants.retried.append(Retried(first + group(at + 1000, record_key=key, value=value)))
        # As far apart as the retention, without a record key, with another one: no retry of anybody's.
        group(early, early + TTL_MS)
        group(at, at + 1, record_key=None)
        one, two = group(at), group(at)
        two[0].copies[0].value = one[0].copies[0].value
        two[0].copies[0].record_key = b"another"

    def no_client_duplicates(self) -> None:
        """What repeats without being anybody's retry."""
        start = FROZEN_MS[0] - 90 * 60_000

        def written(planted: Planted, nth: int, key: bytes, value: bytes | None, **more: Any) -> Record:
            at = start + nth * 1000
            return self.delivered(planted, at, record_key=key, value=value, **{"ts": at + 7} | more)

        def repeated(story: str, *values: bytes | None, **more: Any) -> None:
            key = self.content()
            for nth, value in enumerate(values):
                written(self.plant(story), nth, key, value, **more)

        opened, closed = self.content(), self.content()
        repeated("toggle", opened, closed, opened)
        repeated("tombstones", None, self.content(), None)
        # A stranger's record in between changes the state as well.
        key, value = self.content(), self.content()
        written(self.plant("passed"), 0, key, value)
        at = start + 500
        between = Record(self.orders, 0, at, at, value=b"x", record_key=key)
        self.send(between)
        self.plants.unkeyed.append(between)
        written(self.plant("passed"), 1, key, value)
        # Readings of one value, each with its own time.
        key, value = self.content(), self.content()
        for nth in range(3):
            written(self.plant("reading"), nth, key, value, ts=start - 3_600_000 + nth * 10_000)
        late = (start + 1_000_000, start + 2_000_000)
        key = self.content()
        for nth, ts in enumerate(late):
            written(self.plant("forecast"), nth, key, value, ts=ts)
        # Two callers who write the same; one whom the rules do not know any more.
        key, value = self.content(), self.content()
        for nth, scope in enumerate(("caller", "other", "")):
            written(self.plant("same", scope=scope), nth, key, value)
        key = self.content()
        for nth in range(2):
            written(self.plant("unknown", scope="gone"), nth, key, value)
        # Equal members of one atomic batch.
        name, at, life = self.key("equal"), start, self.life()
        key, members = self.content(), []
        for member in range(3):
            planted = Planted(wire.member_id(name, member), name)
            self.plants.ids.append(planted)
            batch = (wire.event_id(name), member)
            members.append(self.record(planted, life, at, ts=at + 5, record_key=key, value=b"equal", batch=batch))
        self.commit(*members)
        # A topic whose rule says that contents repeat.
        repeated("rule", value, value, topic=self.toggles)

    def forwarded(self) -> None:
        """Records that a program sends with the headers of those that it read."""

        def forward(planted: Planted, of: Record, **more: Any) -> Record:
            values: dict[str, Any] = {"topic": of.topic, "partition": 0, "ts": of.ts + 10}
            record = Record(**values | more, at=of.at)
            record.key, record.id, record.life, record.forwarded = planted.key, planted.id, of.life, of
            return record

        for stage in (1, 2):
            for topic in (self.sink, self.mirror):
                planted = self.plant("forwarded", meant={self.mirror})
                first = self.delivered(planted, self.past(), **self.shape())
                for _ in range(self.chance.randrange(1, 3)):
                    value = self.chance.choice((first.value, self.content()))
                    made = forward(planted, first, topic=topic, value=value, record_key=first.record_key)
                    planted.derived.append(made)
                    self.send(made, stage=stage)
        # A duplicate in its own topic is one still.
        both = self.repeat("forwarded-too", [RESTART], late=0)
        made = forward(both, both.copies[0], topic=self.sink, value=b"made of it")
        both.derived.append(made)
        self.send(made)
        # Back into the topic, with another content under the header of the first one.
        for more in ({"value": b"changed"}, {"headers": (("by", b"me"),)}):
            planted = self.plant("sent-back")
            first = self.delivered(planted, self.past(), value=self.content())
            again = forward(planted, first, **{"value": first.value} | more)
            again.other, again.cause = True, FOREIGN
            planted.copies.append(again)
            self.send(again)

    def bare_keys(self) -> None:
        """Copies that have only the key: whose key it is shows in what they are copies of."""

        def copied(planted: Planted, first: Record, *, stage: int = 1, **more: Any) -> None:
            for later in (9, 2 * HOUR_MS)[: self.chance.randrange(1, 3)]:
                ts = min(first.ts + later, FROZEN_MS[0] - 1)
                names = ("topic", "value", "record_key", "headers")
                shape = {name: getattr(first, name) for name in names} | {"partition": first.partition}
                self.send(self.record(planted, None, ts, **shape | {"ts": ts, "cause": FOREIGN} | more), stage=stage)

        trace = (("traceparent", b"00-of-the-client"),)
        for stage, more in ((1, {}), (2, {}), (1, {"headers": trace}), (1, {"headers": (*trace, ("a", b"1"))})):
            for scope in ("", "caller"):
                planted = self.plant("bare", scope=scope)
                first = self.delivered(planted, self.past(), **self.shape() | more)
                copied(planted, first, stage=stage)
        name, at, life = self.key("whole"), self.past(), self.life()
        members = []
        for member in range(3):
            planted = Planted(wire.member_id(name, member, "caller"), name)
            self.plants.ids.append(planted)
            batch = (wire.event_id(name, "caller"), member)
            members.append(self.record(planted, life, at, value=self.content(), batch=batch))
        self.commit(*members)
        for planted, first in zip(self.plants.ids[-3:], members, strict=True):
            copied(planted, first)

    def changed_rules(self) -> None:
        """Topics whose guarantee is another one from the second run on: what was written before keeps its own."""

        def sent(topic: str, stage: int, *statuses: int, **more: Any) -> None:
            at = self.past() if stage == 1 else FROZEN_MS[stage - 1] - HOUR_MS // 2
            planted = self.plant("ruled", **more)
            self.send(self.record(planted, self.life(), at, topic=topic, ts=at, value=self.content()), stage=stage)
            self.answer(planted, *statuses, stage=stage)

        for stage in (1, 2, 3):
            sent(self.stricter, stage, 201)
            sent(self.looser, stage, 504, 201)
            # Between two runs nobody knows when the service began to follow the new rule.
            late: Said = (None, None, "phantom") if stage == 3 else (None, None, None)
            sent(self.stricter, stage, 504, phantom=late)
            early: Said = ("phantom",) * 3 if stage == 1 else (None, None, None)
            sent(self.looser, stage, 504, phantom=early)
