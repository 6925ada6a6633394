"""Writes the scripts of some seeds to a real broker: one namespace, with topics and slots for each seed."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import Header
from service.contract.wire.journal import encode_answer, encode_answers
from service.contract.wire.ledger import LedgerRecord
from service.contract.wire.ledger_entries import Entry
from service.contract.wire.names import ledger_topic, requests_topic
from tests.spark.generator import Script
from tests.spark.history import TIMEOUT_S, History, Writer
from tests.spark.oracle import Plants, Record
from tests.spark.script import CALLERS, LEDGER_BEGINS_MS, SLOTS, Answer, Stage, Transaction

# The scripts' timestamps are long ago: retention must not delete their records.
FOREVER = {
    "retention.ms": "-1",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": str(2**62),
}


class World:
    """The topics of the scripts. `write` writes one stage; the run of a stage is at its FROZEN_MS."""

    def __init__(self, bootstrap: str, namespace: str, seeds: Sequence[int], timeout_ms: int = 600_000) -> None:
        self.history = History(
            bootstrap, namespace, slots=SLOTS * len(seeds), internal=FOREVER, begun_ms=LEDGER_BEGINS_MS
        )
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
        """Return the rules of the run of a stage, as TOML."""
        once, idempotent = 'guarantee = "exactly_once"', 'guarantee = "idempotent"'
        settings = {
            "foreign": once,
            "telemetry": idempotent,
            "stricter": idempotent if stage == 1 else once,
            "looser": once if stage == 1 else idempotent,
            "sink": once,
            "mirror": "derived = true",
            "toggles": "client_duplicates = false",
        }
        # For this namespace only: other worlds on the broker have the same ids.
        topics = (
            f'[[topics]]\npattern = "{self.history.namespace}-*.{name}"\n{setting}\n'
            for name, setting in settings.items()
        )
        callers = (
            f'[[callers]]\nname = "{name}"\ntoken_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name in CALLERS
        )
        return "".join((*topics, *callers))

    def _open_logs(self, script: Script) -> None:
        """Begin every log with an aborted record, before the times of the script."""
        producer = self._producer(script)
        producer.begin_transaction()
        for name, partitions in script.topics.items():
            for partition in range(partitions):
                self.history.raw(producer, name, b"", partition, key=b"first", timestamp=LEDGER_BEGINS_MS)
        producer.abort_transaction(TIMEOUT_S)

    def diverged(self, stage: int) -> dict[tuple[str, int], int]:
        """Return the offsets from which logs differ from the last stage: a single broker has no other leader that could
        truncate a log.

        The records from there on are deleted; tests/spark/test_truncation.py has a log that really grows again.
        """
        return self._diverged if stage == 2 else {}

    def plants(self) -> Plants:
        """Return what all scripts planted."""
        whole = Plants()
        for script in self.scripts:
            one = script.plants
            whole.ids += one.ids
            whole.retried += one.retried
            whole.unkeyed += one.unkeyed
            whole.unread_gaps += one.unread_gaps
            whole.undecoded += one.undecoded
            whole.answers += one.answers
            for stage, partitions in one.blocked.items():
                whole.blocked.setdefault(stage, set()).update(partitions)
        return whole

    def write(self, stage: int) -> None:
        """Write a stage of every script."""
        for script in self.scripts:
            if stage == 2:
                self._change_after_first_run(script)
            self._stage(script, script.stages[stage - 1])
            if stage == 1:
                self._delete_before_first_run(script)
            if stage == 2:
                self._recreate(script)

    # ------------------------------------------------------------------------------------------- topics

    def _delete_before_first_run(self, script: Script) -> None:
        """Delete records and topics before the first run reads them."""
        history = self.history
        history.delete_before(script.archive, 0, script.archived.offset)
        for name in (script.absent, script.recreated_late, script.recreated_early):
            history.remove(name)
        history.topic(script.recreated_early, 1, FOREVER)
        self._main.pop(script.slot, None)
        self._transaction(script, Transaction([script.recreated_early_first], "committed"))
        # The ledger of one slot begins with the record that is written now, not with the marker before it.
        script.kept.stage = script.kept.visible = 1
        self._transaction(script, Transaction([script.kept], "committed"))
        assert script.kept.writer is not None
        history.delete_before(script.ledger, script.trimmed_slot, self._entered[script.kept.writer.producer_id])

    def _change_after_first_run(self, script: Script) -> None:
        """Change topics, and end the open transactions, after the first run."""
        history = self.history
        for of, producer in self._open:
            if of is script:
                (producer.commit_transaction if script.commits else producer.abort_transaction)(TIMEOUT_S)
        history.grow(script.orders, 5)
        for name in (script.fresh, script.recreated_late):
            history.topic(name, 1, FOREVER)
        self._ends = {name: self._end(name, 0) for name in (script.expiring, script.recreated)}
        end = self._end(script.truncated_topic, 0)
        history.delete_before(script.truncated_topic, 0, end)
        self._diverged[script.truncated_topic, 0] = script.truncated_from.offset
        script.unread_gap(script.truncated_topic, "truncated", script.truncated_from.offset, end, 2)
        # A transactional producer does not look again for a partition that was missing.
        self._main.pop(script.slot, None)
        self._transaction(script, Transaction([script.recreated_late_first], "committed"))

    def _recreate(self, script: Script) -> None:
        """Delete records unread, and recreate a topic, before the second run."""
        history = self.history
        history.delete_before(script.expiring, 0, script.expired_to.offset)
        script.unread_gap(script.expiring, "retention", self._ends[script.expiring], script.expired_to.offset, 2)
        history.remove(script.recreated)
        history.topic(script.recreated, 1, FOREVER)
        end = self._ends[script.recreated]
        script.unread_gap(script.recreated, "recreated", end, end, 2)
        self._main.pop(script.slot, None)
        self._transaction(script, Transaction([script.recreated_after], "committed"))

    def _end(self, topic: str, partition: int) -> int:
        consumer = Consumer({"bootstrap.servers": self.history.bootstrap, "group.id": "ends"})
        try:
            ends = consumer.get_watermark_offsets(TopicPartition(topic, partition), TIMEOUT_S)
        finally:
            consumer.close()
        assert ends is not None
        return int(ends[1])

    # ------------------------------------------------------------------------------------------- logs

    def _stage(self, script: Script, stage: Stage) -> None:
        order = ("aborted", "fenced", "open", "committed")
        for transaction in sorted(stage.transactions, key=lambda one: order.index(one.outcome)):
            self._transaction(script, transaction)
        plain = self.history.plain
        self._send(plain, stage.bare)
        if stage.entries:
            producer = self._producer(script)
            producer.begin_transaction()
            for entry in stage.entries:
                one = entry.planted
                fp = one.copies[0].fp if one.copies else bytes(8)
                made = Entry(one.id, fp, entry.at, *entry.coordinates(), entry.at)
                ids = self.history.topic_ids([made.topic])
                if entry.topic_id is not None:
                    ids = {made.topic: entry.topic_id} if entry.topic_id else {}
                self._ledger(producer, Writer(entry.slot, 1), [made], entry.ts, ids)
            producer.commit_transaction(TIMEOUT_S)
        self._journal(plain, stage.answers)
        self._send(plain, stage.raw)

    def _transaction(self, script: Script, transaction: Transaction) -> None:
        if transaction.outcome == "open":
            producer = self.history.transactional(Writer(script.blocked_slot, 0), timeout_ms=self._timeout_ms)
            self._open.append((script, producer))
        elif transaction.outcome == "fenced":
            producer = self.history.transactional(Writer(script.slot + 1, 0))
        else:
            producer = self._producer(script)
        producer.begin_transaction()
        self._send(producer, transaction.records)
        writers: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
        for record in transaction.records:
            writer = record.writer
            assert writer is not None
            writers[writer.slot, writer.producer_id, writer.epoch, writer.instance].append(record)
        for head, records in writers.items():
            ids = self.history.topic_ids([one.topic for one in records if one.named])
            entries = [one.entry() for one in records]
            self._ledger(producer, Writer(*head), entries, max(one.ts for one in records), ids)
        producer.flush(TIMEOUT_S)
        if transaction.outcome == "committed":
            producer.commit_transaction(TIMEOUT_S)
        elif transaction.outcome == "aborted":
            producer.abort_transaction(TIMEOUT_S)
        elif transaction.outcome == "fenced":
            self.history.transactional(Writer(script.slot + 1, 0))
            try:
                producer.commit_transaction(TIMEOUT_S)
            except KafkaException:
                return
            raise AssertionError("a fenced producer committed")

    def _producer(self, script: Script) -> Producer:
        if script.slot not in self._main:
            self._main[script.slot] = self.history.transactional(Writer(script.slot, 0))
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
            headers: list[Header] = []
            if record.key is not None:
                headers.append((KEY_HEADER, record.key.encode()))
            if (writer := record.writer) is not None:
                fingerprint, producer_fields = (
                    (record.forwarded or record).fp,
                    (writer.slot, writer.producer_id, writer.epoch, writer.instance),
                )
                header = Stamp(record.id, fingerprint, record.at, *producer_fields)
                headers.append((STAMP_HEADER, header.encode()))
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
        self, producer: Producer, writer: Writer, entries: Sequence[Entry], ts: int, topic_ids: dict[str, str]
    ) -> None:
        record = LedgerRecord(writer.slot, writer.producer_id, writer.epoch, writer.instance, entries, topic_ids)
        ledger = ledger_topic(self.history.namespace)

        def landed(error: Any, message: Message) -> None:
            assert error is None, error
            self._entered[writer.producer_id] = message.offset() or 0

        producer.produce(ledger, record.encode(), partition=writer.slot, timestamp=ts, on_delivery=landed)

    def _journal(self, producer: Producer, answers: Iterable[Answer]) -> None:
        """Write one journal record for all answers with the same timestamp."""
        moments: dict[int, list[str]] = defaultdict(list)
        for one in answers:
            topic, partition, offset = one.coordinates() if one.coordinates else (one.topic, None, None)
            code = None if one.status == 201 else "outcome-unknown"
            fields = (one.id, one.fp, one.at, one.status, code, one.replayed, 1.5, topic, partition, offset)
            moments[one.ts].append(encode_answer(*fields))
        for ts, encoded in moments.items():
            record = encode_answers("host:8000", encoded)
            producer.produce(requests_topic(self.history.namespace), record, partition=ts % 2, timestamp=ts)
