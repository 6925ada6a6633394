"""`python -m tests.mirrors`: a topic that a real MirrorMaker 2 copies to a second cluster, is killed, and copies again.

It leaves out tombstones, repeats what it copied before it was killed, and is late with what came while it was away. The
audit must say so of each event, and nothing else; what the other cluster has is read with another client library.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, TopicPartition

from deploy import console
from deploy.stack import Kafka
from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id
from tests.mirrors import AWAY, PRIMARY, MirrorMaker
from tests.spark.history import TIMEOUT_S, History, Writer
from tests.spark.runs import Ran, interpreted, run, session_for_tests

EVENTS: Final = 2000
COPIED_S: Final = 120.0
LATE_S: Final = 60
LATER_MS: Final = 300_000
ONE: Final = Writer(0, 100, 0, "host-0:1")
TWO: Final = Writer(1, 101, 0, "host-1:1")

Fault = tuple[str, str | None, str]
"""A finding about the mirror: kind, cause, and id in hexadecimal digits."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mirrors") as folder, ExitStack() as stack:
        root = Path(folder)
        primary = stack.enter_context(Kafka(root / "primary", name="primary"))
        away = stack.enter_context(Kafka(root / "away", name="away"))
        spark = session_for_tests()
        stack.callback(spark.stop)
        stack.enter_context(interpreted(spark))
        trial = _Trial(primary, away, root, lambda now_ms: run(spark, trial.history, root, now_ms, rules=trial.rules))
        faults = trial.carry_out()
    # Behind the lines of clients whose brokers have ended.
    print("\n".join(faults or ["the audit has named each fault of the mirror, and nothing else"]))
    return 1 if faults else 0


class _Trial:
    """Two clusters, and what is mirrored between them."""

    def __init__(self, primary: Kafka, away: Kafka, root: Path, audit: Callable[[int], Ran]) -> None:
        self.primary, self.away, self.audit = primary, away, audit
        self.history = History(primary.bootstrap, "mirrors")
        self.topic = self.history.topic("orders", 2)
        self.copy = f"{PRIMARY}.{self.topic}"
        self.elsewhere = History(away.bootstrap, "elsewhere").topic("returns")
        self.rules = str(root / "rules.toml")
        Path(self.rules).write_text(
            f'[[sinks]]\nname = "away"\ntopics = ["{self.topic}"]\nformat = "kafka"\nkafka = "{away.bootstrap}"\n'
            f'mirror_topic = "{PRIMARY}.{{topic}}"\nlate_s = {LATE_S}\n'
        )
        self.maker = MirrorMaker(root / "maker", primary.bootstrap, away.bootstrap, (self.topic, self.elsewhere))
        self.ids: Counter[str] = Counter()
        self.missed: set[str] = set()

    def carry_out(self) -> list[str]:
        """Mirror, kill, mirror again, and audit twice; return a line for each thing that is not as it must be."""
        now_ms = self.history.now_ms
        producer = self.history.transactional(ONE)
        for partition in range(2):
            keys = [f"{partition}-{n}" for n in range(EVENTS)]
            for start in range(0, EVENTS, 500):
                self._deliver(producer, ONE, keys[start : start + 500], partition=partition)
        # An event that Kafka has twice, and tombstones, which this mirror leaves out.
        self._deliver(self.history.transactional(TWO), TWO, ["0-7"])
        for n in range(5):
            self._deliver(producer, ONE, [f"tombstone-{n}"], value=None, record_key=b"%d" % n)
        there = History(self.away.bootstrap, "there")
        there.send(there.plain, self.elsewhere, ["of the other cluster"], Writer(0, 7, 0, "elsewhere:1"))
        back = f"{AWAY}.{self.elsewhere}"
        with self.maker:
            self._await(lambda: len(self._copies()) >= 2 * EVENTS and bool(_read(self.primary, back)))
            self.maker.kill()
            copied = self._copies().total()
            self.maker.start()
            self._await(lambda: self._copies().total() >= copied + 2 * EVENTS)
        self._deliver(producer, ONE, [f"while-away-{n}" for n in range(5)])
        first = self.audit(now_ms + LATER_MS)
        faults = self._compare("first run", first, late=set())
        late = self.missed - {event_id(f"tombstone-{n}").hex() for n in range(5)}
        with self.maker:
            self._await(lambda: late <= self._copies().keys())
        second = self.audit(now_ms + 2 * LATER_MS)
        return [*faults, *self._compare("second run", second, late)]

    def _deliver(self, producer: Any, writer: Writer, keys: list[str], **more: Any) -> None:
        written = self.history.deliver(producer, writer, self.topic, keys, **more)
        self.ids.update(one.id.hex() for one in written)

    def _copies(self) -> Counter[str]:
        return _read(self.away, self.copy)

    def _await(self, ready: Callable[[], bool]) -> None:
        self.maker.wait_until(ready, COPIED_S)

    def _compare(self, title: str, ran: Ran, late: set[str]) -> list[str]:
        """Compare the findings of a run with the records of the mirror."""
        copies = self._copies()
        expected: set[Fault] = set()
        for id, records in self.ids.items():
            if copies[id] > 1:
                expected.add(("twice_in_sink", "repeated" if copies[id] > records else "copied", id))
            elif copies[id] == 0:
                expected.add(("missing_in_sink", None, id))
            elif id in late:
                expected.add(("late_in_sink", "was_missing", id))
        self.missed = {id for kind, _, id in expected if kind == "missing_in_sink"}
        found = {(one["kind"], one["cause"], one["id"]) for one in ran.document["findings"] if one["sink"] == "away"}
        others = [one["finding_id"] for one in ran.document["findings"] if one["sink"] is None]
        duplicate = f"duplicate:{event_id('0-7').hex()}"
        (sink,) = ran.document["sinks"]
        print(f"{title}: {dict(Counter(kind for kind, _, _ in found))}, {copies.total()} records in the mirror")
        wrong = [f"{title}: not found: {one}" for one in sorted(expected - found, key=str)]
        wrong += [f"{title}: not so: {one}" for one in sorted(found - expected, key=str)]
        wrong += [f"{title}: found besides: {one}" for one in others if one != duplicate]
        wrong += [f"{title}: no {duplicate}"] * (duplicate not in others)
        wrong += [f"{title}: {sink['unreadable']}"] * (sink["unreadable"] is not None)
        wrong += [f"{title}: no event is repeated"] * ("repeated" not in {cause for _, cause, _ in expected})
        places = [one["sink_coordinates"] for one in ran.document["findings"] if one["kind"] == "twice_in_sink"]
        wrong += [f"{title}: a repeated event without its records in the mirror"] * any(len(one) < 2 for one in places)
        return wrong


def _read(broker: Kafka, topic: str) -> Counter[str]:
    """Count the records of a topic by the id in their Fencepost header; empty if the topic does not exist."""
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "reader", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.auto.commit": False, "log_level": 0})
    found: Counter[str] = Counter()
    try:
        known = consumer.list_topics(timeout=TIMEOUT_S).topics.get(topic)
        for partition in known.partitions if known is not None else ():
            place = TopicPartition(topic, partition, 0)
            first, end = consumer.get_watermark_offsets(place, TIMEOUT_S)
            consumer.assign([TopicPartition(topic, partition, first)])
            deadline = time.monotonic() + TIMEOUT_S
            while consumer.position([place])[0].offset < end and first < end and time.monotonic() < deadline:
                message = consumer.poll(0.2)
                if message is not None and message.error() is None:
                    header = dict(message.headers() or [])[STAMP_HEADER]
                    assert isinstance(header, bytes)
                    found[Stamp.decode(header).id.hex()] += 1
                    if (message.offset() or 0) + 1 >= end:
                        break
    finally:
        consumer.close()
    return found


if __name__ == "__main__":
    console.run(main)
