"""Tests the reader for applications on a real broker: each event's result is stored once, whatever is killed."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from aiokafka.errors import OffsetOutOfRangeError

from deploy import places
from deploy.stack import Kafka
from service.contract.wire.ids import event_id
from service.fencepost import BOUNDS, Bounds, Overtaken, Reader, ReaderPosition, Saved
from tests.integration.follower import END, Ledger, results
from tests.spark.history import History, Writer

ONE, TWO = Writer(0, 100, 0, "a:1"), Writer(1, 200, 0, "b:1")
KEYS = [f"k-{n}" for n in range(100)]


@pytest.fixture
def history(kafka: Kafka, namespace: str) -> History:
    return History(kafka.bootstrap, namespace)


def written(history: History) -> str:
    """Write a topic of two partitions: committed events, copies of them in both, aborted ones, and some without id."""
    topic = history.topic(f"{history.namespace}-t", 2)
    producer, other = history.transactional(ONE), history.transactional(TWO)
    history.deliver(producer, ONE, topic, KEYS[:60])
    history.deliver(other, TWO, topic, KEYS[50:], partition=1)
    producer.begin_transaction()
    history.send(producer, topic, ["never"], ONE)
    producer.abort_transaction(30)
    history.send(history.plain, topic, KEYS[:5], None)
    history.send(history.plain, topic, KEYS[20:25], ONE, partition=1)
    for partition in (0, 1):
        history.raw(history.plain, topic, b"no id", partition)
        history.raw(history.plain, topic, b"no id", partition)
    return topic


def end(history: History, topic: str) -> None:
    """Write the last record of each partition, which ends a follower."""
    for partition in (0, 1):
        history.raw(history.plain, topic, END, partition)


def run(database: Path, history: History, topic: str, *options: str) -> int:
    command = [sys.executable, "-m", "tests.integration.follower", str(database), history.bootstrap, topic, *options]
    return subprocess.run(command, cwd=places.ROOT, check=False, timeout=60).returncode


def expected() -> Counter[str]:
    return Counter({event_id(key).hex(): 1 for key in KEYS} | {"": 4})


@pytest.mark.parametrize("torn", [False, True], ids=["one transaction", "two"])
def test_a_reader_that_is_killed_between_result_and_place_stores_each_result_once(
    history: History, tmp_path: Path, torn: bool
) -> None:
    topic = written(history)
    end(history, topic)
    database = tmp_path / "results.db"
    for commit in (1, 2, 3):
        options = ["--die-at", str(commit)] + (["--torn"] if torn else [])
        assert run(database, history, topic, *options) == -signal.SIGKILL
    assert run(database, history, topic) == 0
    found = Counter(id for id, _ in Ledger(str(database)).rows())
    assert found.keys() == expected().keys()
    # If they were stored apart from the position, the test would find results twice.
    assert (found == expected()) is not torn


async def _stored(store: Ledger, rows: int, reading: asyncio.Task[None]) -> None:
    async with asyncio.timeout(30):
        while len(store.rows()) < rows and not reading.done():  # noqa: ASYNC110 - another process might store them
            await asyncio.sleep(0.02)


async def _read(store: Ledger, history: History, topic: str, *, rows: int, bounds: Bounds = BOUNDS) -> None:
    """Follow until this many results are stored."""
    reader = Reader(topic, store, bounds=bounds, records_max=20, bootstrap_servers=history.bootstrap)
    reading = asyncio.create_task(reader.follow(results))
    await _stored(store, rows, reading)
    if not reading.done():
        reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading


async def test_a_second_reader_of_the_same_place_stops_the_first(history: History, tmp_path: Path) -> None:
    topic = written(history)
    store = Ledger(str(tmp_path / "results.db"))
    first = await store.load()
    assert first is None
    await _read(store, history, topic, rows=104)
    with pytest.raises(Overtaken):
        await store.commit([("x", "0@0", b"")], Saved(1, ReaderPosition().encode(0)))
    with pytest.raises(Overtaken):
        await store.commit([("x", "0@0", b"")], Saved(2, ReaderPosition().encode(0)))
    assert Counter(id for id, _ in store.rows()) == expected()


async def test_an_id_beyond_the_reader_s_bounds_is_new_again(history: History, tmp_path: Path) -> None:
    topic = history.topic(f"{history.namespace}-t", 1)
    history.send(history.plain, topic, ["a", "b", "a", "c", "a"], None)
    store = Ledger(str(tmp_path / "results.db"))
    await _read(store, history, topic, rows=4, bounds=Bounds(ids=2))
    assert [place for _, place in store.rows()] == ["0@0", "0@1", "0@3", "0@4"]


async def test_partitions_that_come_later_are_read_from_their_beginning(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.fencepost.reader.METADATA_MS", 200)
    topic = history.topic(f"{history.namespace}-t", 1)
    history.deliver(history.transactional(ONE), ONE, topic, ["a"])  # the plain producer must not know the topic yet
    store = Ledger(str(tmp_path / "results.db"))
    reading = asyncio.create_task(_read(store, history, topic, rows=3))
    await _stored(store, 1, reading)
    await asyncio.to_thread(history.grow, topic, 2)
    await asyncio.to_thread(history.send, history.plain, topic, ["a", "b"], None, partition=1)
    await asyncio.to_thread(history.send, history.plain, topic, ["c"], None, partition=0)
    await reading
    # Offset 1 is the transaction's marker.
    assert sorted(place for _, place in store.rows()) == ["0@0", "0@2", "1@1"]


async def test_records_that_retention_took_raise_offset_out_of_range(history: History, tmp_path: Path) -> None:
    topic = history.topic(f"{history.namespace}-t", 1)
    history.send(history.plain, topic, ["a", "b", "c"], None)
    store = Ledger(str(tmp_path / "results.db"))
    await _read(store, history, topic, rows=3)
    history.send(history.plain, topic, ["d", "e"], None)
    await asyncio.to_thread(history.delete_before, topic, 0, 4)
    with pytest.raises(OffsetOutOfRangeError):
        await _read(store, history, topic, rows=4)
    assert len(store.rows()) == 3
