"""The usual practice without Fencepost: Kafka's idempotent producer, and a journal of the acknowledged events.

`python -m deploy.demo.plain --kafka SERVERS --topic TOPIC --start ROW --count N --journal FILE`

It is a careful program: idempotence, acks=all, progress saved a few times a second. After a crash it sends again all
events without an acknowledgement in the journal. Kafka cannot recognise them, because the producer id is new.
"""

import argparse
import time
from pathlib import Path

from confluent_kafka import KafkaError, Message, Producer

from deploy.demo.flights import Flight, flights

_SAVE_S = 0.2
_RATE_PER_S = 4_000  # as fast as the load over HTTP; at full speed it would end before it can be killed
_POLL_S = 0.001
_FLUSH_S = 60.0


class PlainProducer:
    """Sends events, and keeps in a journal, over restarts, which of them were acknowledged."""

    def __init__(self, kafka: str, topic: str, journal: Path) -> None:
        self._producer = Producer({"bootstrap.servers": kafka, "enable.idempotence": True, "acks": "all"})
        self._topic = topic
        self._journal = journal
        self._answered: list[str] = []  # since the last save
        self._saved_at = time.monotonic()

    def send(self, events: list[Flight]) -> None:
        """Send the events that the journal does not have, at a steady rate, until all are acknowledged and saved."""
        known = set(self._journal.read_text().splitlines()) if self._journal.exists() else set()
        begun = time.monotonic()
        for number, event in enumerate(event for event in events if event.key not in known):
            while time.monotonic() < begun + number / _RATE_PER_S:
                self._producer.poll(_POLL_S)
            self._produce(event)
            self._save(every_s=_SAVE_S)
        left = self._producer.flush(_FLUSH_S)
        if left:
            raise SystemExit(f"{left} events have no answer after {_FLUSH_S:.0f} s")
        self._save(every_s=0)

    def _produce(self, event: Flight) -> None:
        def answered(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                raise SystemExit(f"{event.key} was not sent: {error}")
            self._answered.append(event.key)

        self._producer.produce(
            self._topic,
            key=event.record_key,
            value=event.value,
            headers={"idempotency-key": event.key.encode()},
            on_delivery=answered,
        )
        self._producer.poll(0)

    def _save(self, every_s: float) -> None:
        if time.monotonic() < self._saved_at + every_s:
            return
        with self._journal.open("a") as journal:
            journal.writelines(f"{key}\n" for key in self._answered)
        self._answered.clear()
        self._saved_at = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description="An idempotent producer, without Fencepost.")
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--start", type=int, required=True, help="first row of the flights")
    parser.add_argument("--count", type=int, required=True, help="number of flights")
    parser.add_argument("--journal", type=Path, required=True, help="where it remembers what was answered")
    given = parser.parse_args()
    PlainProducer(given.kafka, given.topic, given.journal).send(flights(given.start, given.count))


if __name__ == "__main__":
    main()
