"""The scripts of some seeds, written to a real broker: one namespace, topics and slots for each, and a run a stage."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from service.contract import wire
from tests.spark.generator import Script
from tests.spark.history import TIMEOUT_S, History, Life
from tests.spark.oracle import Plants, Record
from tests.spark.script import BEGUN_MS, CALLERS, FROZEN_MS, SLOTS, Answer, Stage, Transaction

# The history's clock stands where the scripts say, long ago: nothing may age out of a log because of it.
FOREVER = {
    "retention.ms": "-1",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": str(2**62),
}


class World:
    """Kafka as the scripts leave it. `write` carries one stage out; the run for it is at FROZEN_MS of that stage."""

    def __init__(self, bootstrap: str, namespace: str, seeds: Sequence[int], timeout_ms: int = 600_000) -> None:
        self.history = History(bootstrap, namespace, slots=SLOTS * len(seeds), internal=FOREVER, begun_ms=BEGUN_MS)
        self.scripts = [Script(seed, f"{namespace}-s{seed}", namespace, nth * SLOTS) for nth, seed in enumerate(seeds)]
        self._timeout_ms = timeout_ms
        self._open: list[tuple[Script, Producer]] = []
        self._main: dict[int, Producer] = {}
        self._entered: dict[int, int] = {}
        self._diverged: dict[tuple[str, int], int] = {}
        for script in self.scripts:
            for name, partitions in script.topics.items():
                policy = {"cleanup.policy": "compact"} if name == script.compact else {}
                self.history.topic(name, partitions, FOREVER | policy)
            self._open_logs(script)

    def rules(self, stage: int) -> str:
        """The rules that a stage's run is told, as TOML."""
        once, idempotent = 'guarantee = "exactly_once"', 'guarantee = "idempotent"'
        told = {
            "foreign": once,
            "telemetry": idempotent,
            "stricter": idempotent if stage == 1 else once,
            "looser": once if stage == 1 else idempotent,
            "sink": once,
            "mirror": "derived = true",
            "toggles": "client_duplicates = false",
        }
        # Of this namespace alone: other worlds on the broker have the same ids.
        topics = (
            f'[[topics]]\npattern = "{self.history.namespace}-*.{name}"\n{setting}\n' for name, setting in told.items()
        )
        callers = (
            f'[[callers]]\nname = "{name}"\ntoken_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name in CALLERS
        )
        return "".join((*topics, *callers))

    def _open_logs(self, script: Script) -> None:
        """Have every log begin before all that is told of it, with a record that nobody ever sees."""
        producer = self._producer(script)
        producer.begin_transaction()
        for name, partitions in script.topics.items():
            for partition in range(partitions):
                self.history.raw(producer, name, b"", partition, key=b"first", timestamp=BEGUN_MS)
        producer.abort_transaction(TIMEOUT_S)

    def diverged(self, stage: int) -> dict[tuple[str, int], int]:
        """From where on logs are others than at the stage before: one broker has no other leader that could say so.

        What had been there is gone for good; tests/spark/test_truncation.py has a log that really grows again.
        """
        return self._diverged if stage == 2 else {}

    def plants(self) -> Plants:
        """What the scripts planted, together."""
        whole = Plants()
        for script in self.scripts:
            one = script.plants
            whole.ids += one.ids
            whole.retried += one.retried
            whole.unkeyed += one.unkeyed
            whole.gone += one.gone
            whole.rejects += one.rejects
            whole.answers += one.answers
            for stage, places in one.held.items():
                whole.held.setdefault(stage, set()).update(places)
        return whole

    def write(self, stage: int) -> None:
        """Write a stage of every script."""
        for script in self.scripts:
            if stage == 2:
                self._between(script)
            self._stage(script, script.stages[stage - 1])
            if stage == 1:
                self._take_away(script)
            if stage == 2:
                self._make_anew(script)

    # ------------------------------------------------------------------------------------------- to the topics

    def _take_away(self, script: Script) -> None:
        """What is gone before the first run sees it."""
        history = self.history
        history.delete_before(script.archive, 0, script.archived.offset)
        for name in (script.absent, script.returned, script.reborn):
            history.remove(name)
        history.topic(script.reborn, 1, FOREVER)
        self._main.pop(script.slot, None)
        self._transaction(script, Transaction([script.reborn_first], "committed"))
        # The ledger of one slot begins with the record that is written now: not with the marker before it.
        script.kept.stage = script.kept.visible = 1
        self._transaction(script, Transaction([script.kept], "committed"))
        assert script.kept.life is not None
        history.delete_before(script.ledger, script.cut_slot, self._entered[script.kept.life.producer_id])

    def _between(self, script: Script) -> None:
        """What happens to topics and transactions after the first run."""
        history = self.history
        for of, producer in self._open:
            if of is script:
                (producer.commit_transaction if script.commits else producer.abort_transaction)(TIMEOUT_S)
        history.grow(script.orders, 5)
        for name in (script.fresh, script.returned):
            history.topic(name, 1, FOREVER)
        self._ends = {name: self._end(name, 0) for name in (script.eaten, script.anew)}
        end = self._end(script.cut_off, 0)
        history.delete_before(script.cut_off, 0, end)
        self._diverged[script.cut_off, 0] = script.cut_from.offset
        script.gone(script.cut_off, "truncated", script.cut_from.offset, end, 2)
        # Transactional producers do not look for partitions that they know to be absent.
        self._main.pop(script.slot, None)
        self._transaction(script, Transaction([script.returned_first], "committed"))

    def _make_anew(self, script: Script) -> None:
        """What is taken away, unread, before the second run."""
        history = self.history
        history.delete_before(script.eaten, 0, script.eaten_to.offset)
        script.gone(script.eaten, "retention", self._ends[script.eaten], script.eaten_to.offset, 2)
        history.remove(script.anew)
        history.topic(script.anew, 1, FOREVER)
        end = self._ends[script.anew]
        script.gone(script.anew, "recreated", end, end, 2)
        self._main.pop(script.slot, None)
        self._transaction(script, Transaction([script.anew_after], "committed"))

    def _end(self, topic: str, partition: int) -> int:
        consumer = Consumer({"bootstrap.servers": self.history.bootstrap, "group.id": "ends"})
        try:
            ends = consumer.get_watermark_offsets(TopicPartition(topic, partition), TIMEOUT_S)
        finally:
            consumer.close()
        assert ends is not None
        return int(ends[1])

    # ------------------------------------------------------------------------------------------- into the logs

    def _stage(self, script: Script, stage: Stage) -> None:
        order = ("aborted", "fenced", "open", "committed")
        for transaction in sorted(stage.transactions, key=lambda one: order.index(one.fate)):
            self._transaction(script, transaction)
        plain = self.history.plain
        self._send(plain, stage.bare)
        if stage.entries:
            producer = self._producer(script)
            producer.begin_transaction()
            for entry in stage.entries:
                one = entry.planted
                fp = one.copies[0].fp if one.copies else bytes(8)
                made = wire.Entry(one.id, fp, entry.at, *entry.place(), entry.at)
                ids = self.history.topic_ids([made.topic])
                if entry.topic_id is not None:
                    ids = {made.topic: entry.topic_id} if entry.topic_id else {}
                self._ledger(producer, Life(entry.slot, 1), [made], entry.ts, ids)
            producer.commit_transaction(TIMEOUT_S)
        self._journal(plain, stage.answers)
        for topic, partition, value, headers in stage.raw:
            plain.produce(topic, value, partition=partition, headers=list(headers), timestamp=FROZEN_MS[0] - 1)
        plain.flush(TIMEOUT_S)

    def _transaction(self, script: Script, transaction: Transaction) -> None:
        if transaction.fate == "open":
            producer = self.history.transactional(Life(script.held_slot, 0), timeout_ms=self._timeout_ms)
            self._open.append((script, producer))
        elif transaction.fate == "fenced":
            producer = self.history.transactional(Life(script.slot + 1, 0))
        else:
            producer = self._producer(script)
        producer.begin_transaction()
        self._send(producer, transaction.records)
        lives: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
        for record in transaction.records:
            life = record.life
            assert life is not None
            lives[life.slot, life.producer_id, life.epoch, life.instance].append(record)
        for head, records in lives.items():
            ids = self.history.topic_ids([one.topic for one in records if one.named])
            entries = [one.entry() for one in records]
            self._ledger(producer, Life(*head), entries, max(one.ts for one in records), ids)
        producer.flush(TIMEOUT_S)
        if transaction.fate == "committed":
            producer.commit_transaction(TIMEOUT_S)
        elif transaction.fate == "aborted":
            producer.abort_transaction(TIMEOUT_S)
        elif transaction.fate == "fenced":
            self.history.transactional(Life(script.slot + 1, 0))
            try:
                producer.commit_transaction(TIMEOUT_S)
            except KafkaException:
                return
            raise AssertionError("a fenced producer committed")

    def _producer(self, script: Script) -> Producer:
        if script.slot not in self._main:
            self._main[script.slot] = self.history.transactional(Life(script.slot, 0))
        return self._main[script.slot]

    def _send(self, producer: Producer, records: Iterable[Record]) -> None:
        def landed(record: Record) -> Any:
            def callback(error: Any, message: Message) -> None:
                if error is not None:
                    raise AssertionError(f"{record.topic}: {error}")
                offset = message.offset()
                assert offset is not None
                record.offset = offset

            return callback

        for record in records:
            headers: list[wire.Header] = []
            if record.key is not None:
                headers.append((wire.KEY_HEADER, record.key.encode()))
            if (life := record.life) is not None:
                writer = (life.slot, life.producer_id, life.epoch, life.instance)
                stamp = wire.Stamp(record.id, (record.forwarded or record).fp, record.at, *writer)
                headers.append((wire.STAMP_HEADER, stamp.encode()))
            producer.produce(
                record.topic,
                value=record.value,
                key=record.record_key,
                headers=[*headers, *record.headers],
                partition=record.partition,
                timestamp=record.ts,
                on_delivery=landed(record),
            )
            producer.poll(0)
        producer.flush(TIMEOUT_S)

    def _ledger(
        self, producer: Producer, life: Life, entries: Sequence[wire.Entry], ts: int, topic_ids: dict[str, str]
    ) -> None:
        record = wire.LedgerRecord(life.slot, life.producer_id, life.epoch, life.instance, entries, topic_ids)
        ledger = wire.ledger_topic(self.history.namespace)

        def landed(error: Any, message: Message) -> None:
            assert error is None, error
            self._entered[life.producer_id] = message.offset() or 0

        producer.produce(ledger, record.encode(), partition=life.slot, timestamp=ts, on_delivery=landed)

    def _journal(self, producer: Producer, answers: Iterable[Answer]) -> None:
        """One record for all answers of a moment."""
        moments: dict[int, list[str]] = defaultdict(list)
        for one in answers:
            topic, partition, offset = one.place() if one.place else (one.topic, None, None)
            code = None if one.status == 201 else "outcome-unknown"
            told = (one.id, one.fp, one.at, one.status, code, one.replayed, 1.5, topic, partition, offset)
            moments[one.ts].append(wire.encode_answer(*told))
        for ts, told_then in moments.items():
            record = wire.encode_answers("host:8000", told_then)
            producer.produce(wire.requests_topic(self.history.namespace), record, partition=ts % 2, timestamp=ts)
