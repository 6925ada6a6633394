"""The command `repair` on a real broker and a real service: lost and missing events, surplus copies, and kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession

from deploy import places
from deploy.stack import Kafka, Redis
from service.contract import SharedSettings
from service.contract.wire.headers import KEY_HEADER
from service.contract.wire.ids import event_id, fingerprint
from service.contract.wire.ledger_entries import Entry
from service.contract.wire.names import ledger_topic, requests_topic
from spark.cli.command_line import parse_repair
from spark.errors import CannotRun
from spark.repair import command, copier, entries
from spark.repair.invocation import Outcome
from spark.settings import RepairOptions
from tests.integration.client import Client
from tests.integration.conftest import Stage, staged
from tests.spark.conftest import Audit
from tests.spark.history import TIMEOUT_S, History, Writer
from tests.spark.runs import BRIEF_JAVA_OPTIONS

WRITER: Final = Writer(3, 400, 0, "writer:1")
EVENTS: Final = 600
CHILD_S: Final = 300.0
# As the service demands.
RETENTION_MS: Final = "777600000"

# Commits are many and small, so that the kill comes amid them.
CHILD: Final = f"""
import sys
from service.contract import SharedSettings
from spark.repair import command, copier
from spark.engine.session import INTERPRETED, open_session, settings
from spark.cli.command_line import parse_repair
copier.RECORDS_A_TRANSACTION = 2
session = open_session({{"FENCEPOST_JARS": {str(places.jars("spark"))!r}}}, {BRIEF_JAVA_OPTIONS!r})
with settings(session, INTERPRETED):
    command.carry_out(session, SharedSettings.from_env(), parse_repair(sys.argv[1:], 0), print)
"""

Record = tuple[int, bytes | None, bytes | None, int, tuple[tuple[str, bytes], ...]]
"""Partition, key, value, timestamp and headers."""


def records(bootstrap: str, topic: str, partitions: int) -> list[Record]:
    """Read the committed records of a topic, by partition and offset."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "repair", "isolation.level": "read_committed"})
    found: list[Record] = []
    try:
        for number in range(partitions):
            start, end = consumer.get_watermark_offsets(TopicPartition(topic, number), TIMEOUT_S) or (0, 0)
            consumer.assign([TopicPartition(topic, number, start)])
            while consumer.position([TopicPartition(topic, number)])[0].offset < end and start < end:
                for message in consumer.consume(1_000, 0.2):
                    assert not message.error()
                    headers = tuple(message.headers() or ())
                    found.append((number, message.key(), message.value(), message.timestamp()[1], headers))  # type: ignore[arg-type]
    finally:
        consumer.close()
    return found


def key_of(record: Record) -> str:
    return dict(record[4])[KEY_HEADER].decode()


class Killed(BaseException):
    """Stands for SIGKILL: nothing that follows is carried out."""


class KilledBehindFirst(httpx.HTTPTransport):
    """Kills the process when the service has answered the first request, before the answer is read."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        super().handle_request(request).read()
        raise Killed


@pytest.fixture
async def stage(tmp_path: Path, kafka: Kafka, redis: Redis, namespace: str) -> Any:
    async with Client() as client:
        with staged(Stage(tmp_path, kafka, redis, namespace, client)) as stage:
            yield stage


@pytest.fixture
def repaired(spark: SparkSession, history: History, tmp_path: Path) -> Any:
    """Return the function that carries out the command with these arguments."""
    shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace)

    def carry_out(*arguments: str, **more: Any) -> Outcome:
        options = parse_repair(["--lake", str(tmp_path / "lake"), *arguments], 0)
        return command.carry_out(spark, shared, options, lambda line: None, **more)

    return carry_out


class Faults:
    """Events that are lost, and one that a sink lacks.

    The service remembers one lost event as delivered and has never known of the others, as after a loss of ledger and
    store. Nobody has the bytes of one.
    """

    value = b'{"total": 1.50}'

    def __init__(self, history: History, producer: Any, folder: Path) -> None:
        self.history = history
        self.topic, self.into = (history.topic(f"{history.namespace}-{name}", 2) for name in ("orders", "again"))
        keys, value = ["present", "unsunk"], b'"$key"'
        history.deliver(producer, WRITER, self.topic, keys, partition=1, record_key=b"customer", value=value)
        producer.begin_transaction()
        self.claim_nothing(producer, "remembered")
        producer.commit_transaction(TIMEOUT_S)
        ledger, journal = ledger_topic(history.namespace), requests_topic(history.namespace)
        for name in (ledger, journal):
            history.configure(name, "retention.ms", RETENTION_MS)
        history.grow(journal, 8)
        self.bodies, self.out = folder / "bodies.ndjson", folder / "out.ndjson"
        envelope = '{"topic": "%s", "key": "customer", "value": {"total": 1.50}, "idempotency_key": "%s"}\n'
        self.bodies.write_text(
            "".join(envelope % (self.topic, key) for key in ("remembered", "forgotten", "unrelated"))
        )
        self.arguments = ("--bodies", str(self.bodies), "--into", self.into, "--bodies-out", str(self.out))

    def claim_nothing(self, producer: Any, key: str) -> None:
        """Write a ledger entry whose record does not exist, as after a loss of the topic's newest records."""
        at, id = self.history.now_ms, event_id(key)
        fp = fingerprint(self.topic, None, b"customer", [], self.value)
        self.history.ledger(producer, WRITER, [Entry(id, fp, at, self.topic, 0, 1_000_000, at)])

    def claim_after_recovery(self) -> None:
        """Write ledger entries that the service has not read."""
        for key in ("forgotten", "nobody's"):
            self.claim_nothing(self.history.plain, key)

    def sink(self, spark: SparkSession, folder: Path) -> Path:
        """Make a sink with one of the two events; returns the rules that name it."""
        rows = [{"event": event_id("present").hex(), "at": self.history.now_ms}]
        spark.createDataFrame(rows, "event string, at bigint").write.parquet(str(folder / "sink"))
        rules = folder / "rules.toml"
        rules.write_text(
            f'[[sinks]]\nname = "warehouse"\ntopics = ["{self.topic}"]\nformat = "parquet"\n'
            f'path = "{folder / "sink"}"\nid = "event"\nevent_time = "at"\nlate_s = 60\n'
        )
        return rules

    def check_plan(self, repaired: Any) -> None:
        """A plan sends nothing."""
        planned = repaired(*self.arguments)
        assert {entry.id: (entry.action, entry.reason) for entry in planned.entries} == {
            event_id("remembered").hex(): (entries.SEND, None),
            event_id("forgotten").hex(): (entries.SEND, None),
            event_id("nobody's").hex(): (entries.NONE, entries.NO_BYTES),
            event_id("unsunk").hex(): (entries.COPY, None),
        }
        assert planned.is_left
        (line,) = self.out.read_text().splitlines()
        assert json.loads(line)["idempotency_key"] == "unsunk"
        self.before = records(self.history.bootstrap, self.topic, 2)
        assert sorted(map(key_of, self.before)) == ["present", "unsunk"]
        assert records(self.history.bootstrap, self.into, 2) == []

    def check_execution(self, repaired: Any, url: str) -> None:
        """Each event is written once, though the process was killed when it had copied, and when it had sent one."""
        execute = (*self.arguments, "--execute", "--new-keys", "--url", url)
        copy = copier.Copier.copy

        def killed_behind_copy(copies: copier.Copier, *arguments: Any) -> None:
            copy(copies, *arguments)
            raise Killed

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(copier.Copier, "copy", killed_behind_copy)
            with pytest.raises(Killed):
                repaired(*execute)
        repaired(*self.arguments)  # a later plan, before the copies of this one are finished
        with pytest.raises(Killed):
            repaired(*execute, transport=KilledBehindFirst())
        done = repaired(*execute)
        assert {entry.id: entry.outcome or entry.reason for entry in done.entries} == {
            event_id("remembered").hex(): entries.WRITTEN,
            event_id("forgotten").hex(): entries.WRITTEN,
            event_id("nobody's").hex(): entries.NO_BYTES,
            event_id("unsunk").hex(): entries.REPAIRED,
        }
        again = repaired(*execute)
        assert {entry.action for entry in again.entries} == {entries.NONE}
        added = Counter(records(self.history.bootstrap, self.topic, 2)) - Counter(self.before)
        new_keys = {name: entries.new_key(event_id(name).hex()) for name in ("remembered", "forgotten")}
        written = {key_of(record): record[2] for record in added.elements()}
        assert len(written) == added.total() == 2
        # A slot's recovery may have read the ledger meanwhile: then the service remembers the other one too.
        own = "forgotten" if "forgotten" in written else new_keys["forgotten"]
        assert written == {new_keys["remembered"]: self.value, own: self.value}
        unsunk = [record for record in self.before if key_of(record) == "unsunk"]
        assert records(self.history.bootstrap, self.into, 2) == unsunk


@pytest.mark.long  # three minutes; TEST_LONG=1 ./tests/run tests/spark/test_repair.py -m long
async def test_what_is_lost_missing_or_surplus_is_repaired_once_whatever_is_killed(
    stage: Stage, spark: SparkSession, history: History, audit: Audit, repaired: Any, tmp_path: Path
) -> None:
    producer = history.transactional(WRITER)
    faults, orders = Faults(history, producer, tmp_path), Orders(history, producer, 20)
    service = await stage.started()
    faults.claim_after_recovery()
    rules, lake = faults.sink(spark, tmp_path), str(tmp_path / "lake")
    topics = (faults.topic, orders.topic)
    ran = audit(history, later_s=600, topics=topics, rules=str(rules), lake=lake, skip_ids=True)
    history.send(history.plain, orders.topic, ["later"], None)  # behind what the run has read
    kinds = Counter(one["kind"] for one in ran.document["findings"])
    assert kinds == {"lost": 3, "missing_in_sink": 1, "duplicate": 6, "conflict": 2, "unkeyed": 1}

    faults.check_plan(repaired)
    faults.check_execution(repaired, service.url)
    plans = spark.read.format("delta").load(f"{lake}/repairs").orderBy("plan").collect()
    assert [row["state"] for row in plans] == ["planned", "done", "planned", "executing", "done", "done"]

    orders.check_plan(repaired)
    _killed_amid_copy(orders, repaired)
    orders.check_repeated(repaired)
    orders.check_refusals(repaired)


class Orders:
    """A topic whose events another writer has repeated. `expected`: the records without surplus copies."""

    def __init__(self, history: History, producer: Any, number: int) -> None:
        self.history = history
        self.topic, self.into, self.other = (
            history.topic(f"{history.namespace}-{name}", 2) for name in ("repeated", "clean", "other")
        )
        value = b'{"of": "$key"}'
        for partition in (0, 1):
            keys = [f"{partition}-{nth}" for nth in range(number)]
            history.deliver(producer, WRITER, self.topic, keys, partition=partition, value=value)
            # Another writer repeats some; a record with another content is no copy.
            history.send(history.plain, self.topic, keys[::7], None, partition=partition, value=value)
            history.send(history.plain, self.topic, keys[1:2], None, partition=partition, value=b"other")
        history.raw(history.plain, self.topic, b"unkeyed", 1)
        history.send(history.plain, self.topic, ["last"], None, partition=1, value=value)
        self.dropped = 2 * len(range(0, number, 7))
        seen: set[bytes | None] = set()
        self.expected: list[Record] = []
        for record in records(history.bootstrap, self.topic, 2):
            key = dict(record[4]).get(KEY_HEADER)
            if key is None or key not in seen or record[2] == b"other":
                self.expected.append(record)
            seen.add(key)

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--clean", self.topic, "--into", self.into)

    def check_repeated(self, repaired: Any) -> None:
        """Repeat the command after it was killed: it completes the topic, and writes nothing the next time."""
        bootstrap = self.history.bootstrap
        partial = len(records(bootstrap, self.into, 2))
        assert 0 < partial < len(self.expected), "the kill was to come amid the copy"
        done = repaired(*self.arguments, "--execute")
        assert records(bootstrap, self.into, 2) == self.expected
        rest = len(self.expected) - partial
        assert f"{len(self.expected)} in {self.into}: {rest} written now, {partial} before" in "\n".join(done.lines)
        repaired(*self.arguments, "--execute")
        assert records(bootstrap, self.into, 2) == self.expected

    def check_plan(self, repaired: Any) -> None:
        """A plan writes nothing."""
        planned = repaired(*self.arguments)
        assert [entry.action for entry in planned.entries] == [entries.DROP] * self.dropped
        lines = "\n".join(planned.lines)
        assert f"{self.dropped} copies of {self.dropped} ids" in lines
        assert "all records of 2 ids with different contents" in lines
        assert records(self.history.bootstrap, self.into, 2) == []

    def check_refusals(self, repaired: Any) -> None:
        """A target is refused that has records of another writer, and a topic that no run has read."""
        self.history.raw(self.history.plain, self.into, b"foreign", 1)
        with pytest.raises(CannotRun, match="was not written by this plan"):
            repaired(*self.arguments, "--execute")
        self.history.raw(self.history.plain, self.other, b"foreign", 1)
        with pytest.raises(CannotRun, match="is not empty, and no plan of"):
            repaired("--clean", self.topic, "--into", self.other, "--execute")
        with pytest.raises(CannotRun, match="the last run has not audited this topic"):
            repaired("--clean", self.into, "--into", self.other)


def _killed_amid_copy(orders: Orders, repaired: Any) -> None:
    """Begin to copy the topic, and end amid partition 1. Each transaction is due with its first record, which a marker
    follows."""
    copy = copier.Copier.copy

    def killed(self: copier.Copier, parts: Mapping[int, copier.Part], ends: Mapping[int, int]) -> None:
        begun = copier.Part(0, ((orders.topic, ((0, 3),)),), exact=False)
        copy(self, {**parts, 1: begun}, ends)
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(copier.Copier, "copy", killed)
        patched.setattr(copier, "OPEN_MS", 0)
        with pytest.raises(Killed):
            repaired(*orders.arguments, "--execute")
    copied = sum(partition == 0 for partition, *_ in orders.expected)
    assert _count(orders.history.bootstrap, orders.into) == 2 * copied


@pytest.mark.long
def test_a_topic_without_surplus_copies_is_complete_after_sigkill(
    spark: SparkSession, history: History, audit: Audit, repaired: Any, tmp_path: Path
) -> None:
    orders = Orders(history, history.transactional(WRITER), EVENTS)
    lake = str(tmp_path / "lake")
    audit(history, later_s=600, topics=(orders.topic,), lake=lake, skip_ids=True)
    child = _start(history, "--lake", lake, *orders.arguments, "--execute")
    try:
        deadline = time.monotonic() + CHILD_S
        while _count(history.bootstrap, orders.into) < EVENTS // 8:
            assert child.poll() is None, child.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    orders.check_repeated(repaired)


def _start(history: History, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process group of its own."""
    environment = {
        **os.environ,
        "FENCEPOST_KAFKA": history.bootstrap,
        "FENCEPOST_NAMESPACE": history.namespace,
        "PYTHONPATH": str(places.ROOT),
    }
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _count(bootstrap: str, topic: str) -> int:
    """Return the end of partition 0."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "repair"})
    try:
        return int((consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S) or (0, 0))[1])
    finally:
        consumer.close()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--kind", "duplicate"), "argument --kind: 'duplicate' cannot be repaired: give lost or missing_in_sink"),
        (("--clean", "t"), "argument --clean: give the topic that gets the records with --into, another one"),
        (("--clean", "t", "--into", "t"), "argument --clean: give the topic that gets the records with --into"),
        (("--clean", "t", "--into", "u", "--bodies", "f"), "argument --clean: leave out --bodies, --url"),
        (("--execute",), "argument --execute: give the service with --url, or a topic with --into"),
        (("--into", "a b"), "argument --into: 'a b' is no name of a topic"),
        (("--url", "localhost"), "argument --url: 'localhost' is no address of http or https"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_repair(["--lake", "l", *arguments], 0)
    assert why in capsys.readouterr().err


def test_the_lake_gets_the_options_that_were_given() -> None:
    options = RepairOptions(lake="l", clean="t", into="u", execute=True)
    assert options.shown() == {"clean": "t", "into": "u", "execute": True, "lake": "l"}
