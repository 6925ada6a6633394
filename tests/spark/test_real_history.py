"""Tests logs as in production: wide topics, compacted ones, large and small records, clocks that jump."""

import time
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from service.contract import wire
from tests.spark.conftest import Audit
from tests.spark.history import TIMEOUT_S, History, Writer

LATER_S: Final = 3600.0
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
ONE, TWO = Writer(0, 100, 0, "a:1"), Writer(1, 200, 0, "b:1")
MEGABYTE: Final = 1_000_000


def test_topics_of_every_width_records_of_every_size_and_clocks_that_jump(history: History, audit: Audit) -> None:
    wide = _widths_and_sizes(history)
    _clocks(history)
    ran = audit(history, later_s=LATER_S)
    assert ran.findings() == {
        ("duplicate", "dual_producer", "p-0"),
        ("duplicate", "foreign_writer", "p-3"),
        ("duplicate", "foreign_writer", "megabyte"),
        ("conflict", "foreign_writer", "other-megabyte"),
        ("duplicate", "dual_producer", "behind"),
        ("duplicate", "expired_key", "ahead"),
        ("duplicate", "foreign_writer", "bare"),
    }
    found = {one["key"]: one for one in ran.document["findings"]}
    assert (found["p-3"]["count"], len(found["p-3"]["coordinates"])) == (100, 100)
    # The copies of an event are in the order of their timestamps, not of their writing.
    order = [[copy["partition"] for copy in found[key]["coordinates"]] for key in ("behind", "ahead")]
    assert order == [[1, 0], [0, 1]]
    balance = ran.document["balance"]
    assert balance["accepted"] == wide + 4 + 9
    assert (balance["delivered_once"], balance["duplicated"], balance["conflicted"], balance["pending"]) == (
        wide + 6,
        3 + 2,
        1,
        1,
    )
    later = audit(history, later_s=3 * LATER_S)
    assert later.document["balance"]["lost"] == 1


def _widths_and_sizes(history: History) -> int:
    """Write a topic with 64 partitions, some of them empty, and one with records of a byte and of a megabyte.

    Returns the number of events in the first.
    """
    wide = history.topic(f"{history.namespace}-wide", 64)
    large = history.topic(f"{history.namespace}-large", 1, {"max.message.bytes": str(2 * MEGABYTE)})
    producer = history.transactional(ONE)
    producer.begin_transaction()
    written = [
        history.send(producer, wide, [f"p-{partition}"], ONE, partition=partition, value=b"x")[0]
        for partition in range(0, 64, 3)
    ]
    history.ledger(producer, ONE, [one.entry() for one in written])
    producer.commit_transaction(TIMEOUT_S)
    history.answers([one.answer() for one in written])
    # The same event at both ends of the topic, by two producers.
    second = history.transactional(TWO)
    history.deliver(second, TWO, wide, ["p-0"], partition=63, value=b"x")
    block = bytes(range(256)) * (MEGABYTE // 256)
    history.deliver(producer, ONE, large, ["tiny", "large"], value=b"1")
    history.deliver(producer, ONE, large, ["megabyte"], value=block, record_key=b"k")
    history.deliver(producer, ONE, large, ["other-megabyte"], value=block[:-1] + b"!", record_key=b"k")
    # A megabyte again, from a writer that leaves only the key: the fingerprint is over every byte.
    history.send(history.plain, large, ["megabyte"], None, value=block, record_key=b"k")
    history.send(history.plain, large, ["other-megabyte"], None, value=block[:-1] + b"?", record_key=b"k")
    history.send(history.plain, wide, ["p-3"] * 99, ONE, partition=3, value=b"x")
    return len(written)


def _clocks(history: History) -> None:
    """Write records whose writers set timestamps in the past, in the future, and at the start of the epoch."""
    settings = {"message.timestamp.after.max.ms": str(2**62), "retention.ms": "-1"}
    topic = history.topic(f"{history.namespace}-t", 2, settings)
    now = history.now_ms
    slow, fast = history.transactional(ONE), history.transactional(TWO)
    far = 4_102_444_800_000 + DAY_MS  # past the year 2100
    for nth, (at, ts) in enumerate([(0, 1), (now, 1), (now, far), (far, now), (now + 2 * HOUR_MS, now - 9 * DAY_MS)]):
        history.deliver(slow, ONE, topic, [f"once-{nth}"], at=at, ts=ts, value=b'"$key"')
    # The same event from two clocks: an hour behind, and more than a retention ahead.
    history.deliver(slow, ONE, topic, ["behind", "ahead"], value=b'"$key"')
    history.deliver(fast, TWO, topic, ["behind"], at=now - HOUR_MS, ts=now - HOUR_MS, partition=1, value=b'"$key"')
    history.deliver(fast, TWO, topic, ["ahead"], at=now + DAY_MS, ts=now + DAY_MS, partition=1, value=b'"$key"')
    # Records without header, with the first and the last possible timestamps.
    history.send(history.plain, topic, ["bare", "bare"], None, ts=1)
    history.send(history.plain, topic, ["bare"], None, ts=far)
    # A claim of tomorrow is not lost today.
    slow.begin_transaction()
    one = history.send(slow, topic, ["there"], ONE)[0]
    promised = one.entry(id=wire.event_id("tomorrow"), offset=1_000_000, at=now + 2 * HOUR_MS)
    history.ledger(slow, ONE, [one.entry(), promised])
    slow.commit_transaction(TIMEOUT_S)


def test_records_that_compaction_took_unread_are_a_gap_and_never_lost(history: History, audit: Audit) -> None:
    config = {"cleanup.policy": "compact", "segment.ms": "1000", "min.cleanable.dirty.ratio": "0.001"}
    topic = history.topic(f"{history.namespace}-table", 1, config | {"delete.retention.ms": "0"})
    producer = history.transactional(ONE)
    at = history.now_ms - HOUR_MS

    def deliver(key: str, record_key: bytes, second: int, value: bytes | None = b'"$key"') -> int:
        """With segments of one second: earlier records are rolled, and may be cleaned."""
        more = {"at": at, "ts": history.now_ms + 2000 * second, "record_key": record_key, "value": value}
        return history.deliver(producer, ONE, topic, [key], **more)[0].offset  # type: ignore[arg-type]

    early = [deliver(f"early-{n}", b"row-%d" % n, n) for n in range(3)]
    first = audit(history, later_s=LATER_S)
    assert first.document["balance"]["delivered_once"] == 3
    # All of these are superseded before a run reads them.
    unread = [deliver("over-0", b"row-0", 4), deliver("over-1", b"row-1", 5), deliver("over-1-again", b"row-1", 6)]
    unread.append(deliver("tombstone", b"row-2", 7, None))
    for n in range(3):
        deliver(f"last-{n}", b"row-%d" % n, 9 + n)
    deliver("end", b"end", 20)
    deliver("active", b"active", 30)
    _wait_until_cleaned(history, topic, {*early, *unread})
    second = audit(history, later_s=LATER_S)
    assert second.findings() == {("evidence_gap", "compacted", f"{topic}[0]")}
    (gap,) = second.document["findings"]
    assert gap["count"] == len(unread)
    balance = second.document["balance"]
    assert (balance["accepted"], balance["delivered_once"], balance["unprovable"]) == (12, 8, 4)
    assert balance["lost"] == 0


def _wait_until_cleaned(history: History, topic: str, gone: set[int]) -> None:
    """Wait until none of these offsets holds a record any more."""
    deadline = time.monotonic() + 120
    while left := gone & _offsets(history, topic):
        assert time.monotonic() < deadline, f"{topic} still has {sorted(left)}"
        time.sleep(0.2)


def _offsets(history: History, topic: str) -> set[int]:
    consumer = Consumer({"bootstrap.servers": history.bootstrap, "group.id": "cleaned", "enable.partition.eof": True})
    found = set()
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while (message := consumer.poll(TIMEOUT_S)) is not None and message.error() is None:
            found.add(message.offset() or 0)
    finally:
        consumer.close()
    return found
