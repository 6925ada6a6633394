"""Scenarios of delivered events: once, several times, changed, under several keys."""

from collections.abc import Sequence
from typing import Any

from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id, member_id
from tests.spark.history import Writer
from tests.spark.oracle import ByStage, Planted, Record, Retried
from tests.spark.script import CAUSES, DUAL, EXPIRED, FOREIGN, FROZEN_MS, RESTART, REWRITE, TTL_MS, Builder
from tests.spark.times import HOUR_MS


class Copies(Builder):
    """Records of healthy and faulty writers."""

    def healthy(self) -> None:
        answers = [(201,), (201, 201), (409, 201), (504, 201), (202, 201), (201, 422), (503, 201), (504, 503, 201), ()]
        for statuses in [*answers, *self.chance.choices(answers, k=6)]:
            planted = self.plant("once", scope=self.chance.choice(("", "", "caller")))
            self.delivered(planted, self.past(), **self.shape())
            self.answer(planted, *statuses)
        # A tombstone, and headers that another program has added after Fencepost's.
        planted = self.plant("tombstone")
        self.delivered(planted, self.past(), value=None, record_key=self.content())
        behind = Stamp(bytes(16), bytes(8), self.past(), 1, 1, 1, "other:1").encode()
        planted = self.plant("twice")
        headers = ((STAMP_HEADER, behind), (KEY_HEADER, b"other"))
        self.delivered(planted, self.past(), headers=headers)

    def batches(self) -> None:
        key, at, writer = self.key("batch"), self.past(), self.new_writer()
        members = []
        for member in range(self.chance.randrange(2, 5)):
            planted = Planted(member_id(key, member), key)
            self.plants.ids.append(planted)
            topic = self.chance.choice((self.orders, self.spare))
            batch = (event_id(key), member)
            members.append(self.record(planted, writer, at, topic=topic, value=self.content(), batch=batch))
            self.answer(planted, 201)
        self.commit(*members)

    def aborted(self) -> None:
        """Aborted transactions, whose records were never delivered."""

        def truncated_topic(planted: Planted, **more: Any) -> Record:
            copy = self.record(planted, self.new_writer(), self.past(), visible=None, **more)
            self.commit(copy, outcome="aborted")
            return copy

        again = self.plant("aborted-again")
        first = truncated_topic(again, **self.shape())
        self.delivered(again, first.at, ts=first.ts + 9, value=first.value)
        self.answer(again, 503, 201, coordinates=lambda: again.copies[1].coordinates)
        in_doubt = self.plant("aborted-in-doubt", default_category=("stuck", "stuck", "stuck"))
        truncated_topic(in_doubt)
        self.answer(in_doubt, 504, 409)
        freed = self.plant("aborted-freed", accepted=False)
        truncated_topic(freed)
        self.answer(freed, 504, 503)
        silent = self.plant("aborted-silent", accepted=False)
        self.aborted_record = truncated_topic(silent, partition=3)

    def fenced(self) -> None:
        """A zombie whose transaction is aborted by the epoch of the next owner, which delivers the events."""
        at, slot = self.past(), self.slot
        planted = [self.plant("zombie") for _ in range(3)]
        zombie, owner = self.new_writer(slot, "zombie:1"), self.new_writer(slot, "owner:1")
        records = [self.record(one, zombie, at, visible=None, value=self.content()) for one in planted]
        self.commit(*records, outcome="fenced")
        for one, record in zip(planted, records, strict=True):
            copy = self.record(one, owner, at, ts=record.ts + 5, value=record.value)
            self.commit(copy)
            self.answer(one, 201, coordinates=lambda copy=copy: copy.coordinates)  # type: ignore[misc]

    def repeat(
        self,
        story: str,
        causes: Sequence[str],
        *,
        others: Sequence[bool] = (),
        shape: dict[str, Any] | None = None,
        late: float = 0.3,
        base: Writer | None = None,
    ) -> Planted:
        """Plant an id with a further copy for each cause; `others` says which of these have another fingerprint.

        Copies that the ledger knows come first, whatever their offsets; the others are sent in between.
        """
        causes = sorted(causes, key=lambda cause: (cause == FOREIGN) - (cause == DUAL))
        planted = self.plant(story)
        shape = self.shape() if shape is None else shape
        at = FROZEN_MS[0] - 56 * HOUR_MS + self.chance.randrange(20 * 60_000) if EXPIRED in causes else self.past()
        first = self.record(planted, base or self.new_writer(), at, **shape)
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
            # Copies before an expiry leave time for the expiry.
            latest = FROZEN_MS[0] - (30 * HOUR_MS if EXPIRED in causes[nth:] else HOUR_MS // 2)
            copy = self._another(planted, cause, earlier, more, latest)
            copy.other, copy.cause = other, cause
            # The cause of a copy refers to earlier copies, so the copy is in the same stage or a later one.
            stage = 2 if earlier[-1].stage == 2 or self.chance.random() < late else 1
            (self.commit if copy.entered else self.send)(copy, stage=stage)
            earlier.append(copy)
        return planted

    def _another(
        self, planted: Planted, cause: str, earlier: Sequence[Record], more: dict[str, Any], latest: int
    ) -> Record:
        ours = [copy for copy in earlier if copy.writer is not None and copy.entered]
        model = self.chance.choice(ours)
        assert model.writer is not None
        last_at, last_ts = max(copy.at for copy in ours), max(copy.ts for copy in ours)
        # A retry carries the acceptance of the first claim, unless the store was lost in between.
        at = last_at + self.chance.choice([0, *(ms for ms in (1, 50 * 60_000) if last_at + ms < latest)])
        writer: Writer | None
        if cause == RESTART:
            slot, instance, number = model.writer.slot, model.writer.instance, model.writer.producer_id
            self._writers += 1
            new = self.slot * 1000 + self._writers
            writer = self.chance.choice(
                [
                    Writer(slot, number, model.writer.epoch + 1 + self._writers, instance),
                    Writer(slot, new, 0, instance),
                    Writer(slot, new, 0, f"moved-{new}:1"),
                    Writer(self.slot + (slot - self.slot + 1) % 4, new, 0, instance),
                ]
            )
        elif cause == DUAL:
            taken = {copy.writer.slot for copy in ours if copy.writer}
            free = [n for n in range(self.slot, self.slot + 4) if n not in taken]
            writer = self.new_writer(self.chance.choice(free))
        elif cause == REWRITE:
            writer = model.writer
            at += self.chance.choice((0, TTL_MS)) if at + TTL_MS < latest else 0
        elif cause == EXPIRED:
            writer = self.new_writer(self.chance.choice([None, model.writer.slot]))
            at = last_at + TTL_MS + self.chance.choice((0, 1, 60_000))
        else:
            writer = self.chance.choice([None, model.writer])
            at = model.at
        if cause == FOREIGN:
            ts = min(at + self.chance.randrange(-2000, HOUR_MS), FROZEN_MS[0] - 1)
            if writer is None:
                at = ts
                noise = (("traceparent", b"00-1"),) if self.chance.random() < 0.5 else ()
                # Fencepost's and the tracer's headers are not part of the request.
                copy = self.record(planted, None, at, **more | {"ts": ts})
                copy.headers = copy.headers + noise
                copy.entered = False
                return copy
        else:
            ts = max(last_ts, at) + self.chance.randrange(1, 5000)
        copy = self.record(planted, writer, at, **more | {"ts": ts})
        copy.entered = cause != FOREIGN
        return copy

    def copies(self) -> None:
        for cause in CAUSES:
            for _ in range(2):
                self.repeat(f"again-{cause}", [cause])
        # Requested with a partition: a copy without header in that partition is the same request.
        placed = {"partition": 2, "asked": 2, "value": self.content()}
        planted = self.repeat("placed", [], shape=placed)
        bare = self.record(planted, None, self.past(), **placed | {"asked": None})
        bare.cause = FOREIGN
        bare.headers += (("traceparent", b"00-1"),)  # not part of the request
        self.send(bare)
        # Two producers with one slot, producer id and epoch, but another instance.
        planted, writer, at = self.plant("namesake"), self.new_writer(), self.past()
        self.delivered(planted, at, writer=writer)
        twin = Writer(writer.slot, writer.producer_id, writer.epoch, "elsewhere:1")
        self.delivered(planted, at, writer=twin, ts=at + 5000, cause=DUAL)
        # Equal timestamps: partition and offset decide which copy is the first.
        planted, writer, at, value = self.plant("ties"), self.new_writer(), self.past(), self.content()
        for partition in self.chance.sample((0, 1, 2, 2, 1, 0), 6):
            self.delivered(planted, at, writer=writer, ts=at + 7, partition=partition, value=value, cause=REWRITE)
        # One millisecond less than the key retention apart, and exactly the key retention.
        for apart, cause in ((TTL_MS - 1, DUAL), (TTL_MS, EXPIRED)):
            planted, at, value = self.plant("apart"), FROZEN_MS[0] - 30 * HOUR_MS, self.content()
            first = self.delivered(planted, at, writer=self.new_writer(self.slot), value=value)
            self.delivered(
                planted,
                at + apart,
                writer=self.new_writer(self.slot + 1),
                ts=first.ts + apart,
                value=value,
                cause=cause,
            )
        # Not in the ledger, but of another producer, as after a crash: the causes are those of any other copy.
        planted, at, value = self.plant("unentered"), self.past(), self.content()
        first = self.delivered(planted, at, writer=self.new_writer(self.slot), value=value)
        for nth, (writer, cause) in enumerate(
            ((self.new_writer(self.slot), RESTART), (self.new_writer(self.slot + 1), DUAL))
        ):
            self.send(self.record(planted, writer, at, ts=first.ts - 500 + nth, value=value, cause=cause))
        # First without header, then with header, both not in the ledger: the first copy has no acceptance to compare.
        planted, at, value = self.plant("bare-first", accepted=False), self.past(), self.content()
        planted.phantom = ("phantom", "phantom", "phantom")
        self.send(self.record(planted, None, at, ts=at, value=value))
        self.send(self.record(planted, self.new_writer(), at, ts=at + 10, value=value, cause=DUAL))

    def several_causes(self) -> None:
        for _ in range(4):
            causes = self.chance.choices((RESTART, REWRITE, FOREIGN), k=self.chance.randrange(2, 5))
            causes += self.chance.choice(([], [DUAL], [EXPIRED], [DUAL, DUAL], [EXPIRED, DUAL]))
            self.chance.shuffle(causes)
            base = self.new_writer(self.slot)
            self.repeat("several", causes, base=base)

    def conflicts(self) -> None:
        for cause in CAUSES:
            self.repeat(f"conflict-{cause}", [cause], others=[True])
        causes = self.chance.choices((RESTART, REWRITE, FOREIGN), k=4)
        causes.sort(key=lambda cause: cause == FOREIGN)
        others = [self.chance.random() < 0.5 for _ in causes]
        others[self.chance.randrange(4)] = True
        self.repeat("conflict-several", causes, others=others)
        # A copy without header in another partition than the requested one is another request.
        placed = {"partition": 1, "asked": 1, "value": self.content()}
        planted = self.repeat("misplaced", [], shape=placed)
        bare = self.record(planted, None, self.past(), **placed | {"asked": None, "partition": 2})
        bare.cause, bare.other = FOREIGN, True
        self.send(bare)

    def others_topics(self) -> None:
        """Topics of other programs: ids without any request to Fencepost."""

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
        # With a timestamp that the client set, the same in both.
        self.plants.retried.append(Retried(group(at, at + 1000, ts=at - 5000)))
        # Records of another record key in between do not count.
        key, value = self.content(), self.content()
        first = group(at, record_key=key, value=value)
        group(at + 500)
        self.plants.retried.append(Retried(first + group(at + 1000, record_key=key, value=value)))
        # No retries: the key retention apart, without a record key, with another record key.
        group(early, early + TTL_MS)
        group(at, at + 1, record_key=None)
        one, two = group(at), group(at)
        two[0].copies[0].value = one[0].copies[0].value
        two[0].copies[0].record_key = b"another"

    def no_client_duplicates(self) -> None:
        """Contents that repeat without being retries."""
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
        # A record of another program in between changes the state too.
        key, value = self.content(), self.content()
        written(self.plant("passed"), 0, key, value)
        at = start + 500
        between = Record(self.orders, 0, at, at, value=b"x", record_key=key)
        self.send(between)
        self.plants.unkeyed.append(between)
        written(self.plant("passed"), 1, key, value)
        # Readings of one value, each with a timestamp of its own.
        key, value = self.content(), self.content()
        for nth in range(3):
            written(self.plant("reading"), nth, key, value, ts=start - HOUR_MS + nth * 10_000)
        late = (start + 1_000_000, start + 2_000_000)
        key = self.content()
        for nth, ts in enumerate(late):
            written(self.plant("forecast"), nth, key, value, ts=ts)
        # Callers that write the same content; a caller that is no longer in the rules.
        key, value = self.content(), self.content()
        for nth, scope in enumerate(("caller", "other", "")):
            written(self.plant("same", scope=scope), nth, key, value)
        key = self.content()
        for nth in range(2):
            written(self.plant("unknown", scope="gone"), nth, key, value)
        # Equal members of one atomic batch.
        name, at, writer = self.key("equal"), start, self.new_writer()
        key, members = self.content(), []
        for member in range(3):
            planted = Planted(member_id(name, member), name)
            self.plants.ids.append(planted)
            batch = (event_id(name), member)
            members.append(self.record(planted, writer, at, ts=at + 5, record_key=key, value=b"equal", batch=batch))
        self.commit(*members)
        # A topic with client_duplicates = false.
        repeated("rule", value, value, topic=self.toggles)

    def forwarded(self) -> None:
        """Records that a program sends with the headers of the records that it has read."""

        def forward(planted: Planted, of: Record, **more: Any) -> Record:
            values: dict[str, Any] = {"topic": of.topic, "partition": 0, "ts": of.ts + 10}
            record = Record(**values | more, at=of.at)
            record.key, record.id, record.writer, record.forwarded = planted.key, planted.id, of.writer, of
            return record

        for stage in (1, 2):
            for topic in (self.sink, self.mirror):
                planted = self.plant("forwarded", expected_in={self.mirror})
                first = self.delivered(planted, self.past(), **self.shape())
                for _ in range(self.chance.randrange(1, 3)):
                    value = self.chance.choice((first.value, self.content()))
                    made = forward(planted, first, topic=topic, value=value, record_key=first.record_key)
                    planted.derived.append(made)
                    self.send(made, stage=stage)
        # A duplicate in its own topic, with a forwarded copy besides.
        both = self.repeat("forwarded-too", [RESTART], late=0)
        made = forward(both, both.copies[0], topic=self.sink, value=b"made of it")
        both.derived.append(made)
        self.send(made)
        # Sent back into the topic with the header of the first copy and another content.
        for more in ({"value": b"changed"}, {"headers": (("by", b"me"),)}):
            planted = self.plant("sent-back")
            first = self.delivered(planted, self.past(), value=self.content())
            again = forward(planted, first, **{"value": first.value} | more)
            again.other, again.cause = True, FOREIGN
            planted.copies.append(again)
            self.send(again)

    def bare_keys(self) -> None:
        """Copies with only the key: the event with the same content in the topic identifies the id."""

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
        name, at, writer = self.key("whole"), self.past(), self.new_writer()
        members = []
        for member in range(3):
            planted = Planted(member_id(name, member, "caller"), name)
            self.plants.ids.append(planted)
            batch = (event_id(name, "caller"), member)
            members.append(self.record(planted, writer, at, value=self.content(), batch=batch))
        self.commit(*members)
        for planted, first in zip(self.plants.ids[-3:], members, strict=True):
            copied(planted, first)

    def changed_rules(self) -> None:
        """Topics with another guarantee from the second run on; earlier records keep their guarantee."""

        def sent(topic: str, stage: int, *statuses: int, **more: Any) -> None:
            at = self.past() if stage == 1 else FROZEN_MS[stage - 1] - HOUR_MS // 2
            planted = self.plant("ruled", **more)
            self.send(
                self.record(planted, self.new_writer(), at, topic=topic, ts=at, value=self.content()), stage=stage
            )
            self.answer(planted, *statuses, stage=stage)

        for stage in (1, 2, 3):
            sent(self.stricter, stage, 201)
            sent(self.looser, stage, 504, 201)
            # The time at which the service began to follow the new rule is unknown between two runs.
            late: ByStage = (None, None, "phantom") if stage == 3 else (None, None, None)
            sent(self.stricter, stage, 504, phantom=late)
            early: ByStage = ("phantom",) * 3 if stage == 1 else (None, None, None)
            sent(self.looser, stage, 504, phantom=early)
