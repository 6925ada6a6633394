"""Measures the cost and saving of Kafka's compression codecs: a bare aiokafka producer, in batches, with real events.

The events are flights (370 bytes of JSON each, all different) without Fencepost's headers, 100 and 1,000 in each
transaction over three partitions. CPU is that of the producer's process, in which the codec runs on the event loop;
bytes are those of the topic's segments. The same is measured for the ledger, whose ids are random: a record of 100
entries, compressed alone.
"""

import os
import time
from collections.abc import Callable
from typing import Final

from aiokafka import codec as codecs

from deploy.demo.flights import flights
from service.contract.wire.ledger import encode_ledger
from service.contract.wire.ledger_entries import Entry
from tests.bench import checks
from tests.bench.bare import Bare
from tests.bench.rows import NotRealWork, Row
from tests.bench.stage import Stage

CODECS: Final[dict[str | None, Callable[[], bool]]] = {
    None: lambda: True,
    "lz4": codecs.has_lz4,
    "snappy": codecs.has_snappy,
    "zstd": codecs.has_zstd,
    "gzip": codecs.has_gzip,
}


def measure(stage: Stage) -> list[Row]:
    seconds, rounds = stage.pick(1, 1.5), stage.pick(1, 2)
    values = [flight.value for flight in flights(0, 2_000)]
    had = [name for name, has in CODECS.items() if has()]
    rows: list[Row] = []
    with Bare(stage.kafka.bootstrap) as bare:
        for events in stage.pick((100,), (100, 1_000)):
            found: dict[str | None, list[tuple[float, float, float]]] = {name: [] for name in had}
            for number in range(rounds + 1):  # the first round is a warm-up
                for name in found:
                    topic = f"codec-{name}-{events}-{number}"
                    found[name].append(_run(stage, bare, topic, name, events, seconds, values))
            for name, runs in found.items():
                cpu_us, size, rate = zip(*runs[1:], strict=True)
                at = f"{name or 'none'}, {events:,} a transaction"
                rows.append(Row(f"CPU an event, {at}", "µs", cpu_us))
                rows.append(Row(f"log an event, {at}", "bytes", size))
                rows.append(Row(f"events, {at}", "/s", rate))
    return rows + _ledger(stage)


def _run(
    stage: Stage, bare: Bare, topic: str, codec: str | None, events: int, seconds: float, values: list[str]
) -> tuple[float, float, float]:
    """Measure CPU (µs) and log (bytes) of an event, and events a second."""
    stage.kafka.create_topic(topic, partitions=3)
    arguments = {"topic": topic, "prefix": topic, "partitions": 3, "size": 0, "producers": 4, "stamped": False}
    done = bare.ask(
        "transactions", events=events, seconds=seconds, api="batch", codec=codec, values=values, **arguments
    )
    written = sum(1 for _ in checks.committed(stage.kafka.bootstrap, [topic]))
    if written != done["events"]:
        raise NotRealWork(f"{done['events']} events were written, the topic has {written}")
    size = sum(file.stat().st_size for file in (stage.kafka.folder / "data").glob(f"{topic}-*/*.log"))
    return 1e6 * done["cpu_s"] / written, size / written, written / done["seconds"]


def _ledger(stage: Stage) -> list[Row]:
    """Measure a ledger record of 100 entries with each codec: CPU and bytes of an entry."""
    now = time.time_ns() // 1_000_000
    encode: dict[str, Callable[[bytes], bytes]] = {
        "none": lambda raw: raw,
        **({"lz4": codecs.lz4_encode} if codecs.has_lz4() else {}),
        **({"snappy": codecs.snappy_encode} if codecs.has_snappy() else {}),
        **({"zstd": codecs.zstd_encode} if codecs.has_zstd() else {}),
        "gzip": codecs.gzip_encode,
    }
    count = stage.pick(20, 200)
    records = []
    for place in range(count):
        entries = [Entry(os.urandom(16), os.urandom(8), now, "orders", n % 3, place * 100 + n, now) for n in range(100)]
        records.append(encode_ledger(3, 12, 5, "fencepost-7d4f", map(Entry.encode, entries)))
    rows = []
    for name, compress in encode.items():
        started = time.process_time()
        size = sum(len(compress(record)) for record in records)
        cpu_us = 1e6 * (time.process_time() - started) / (100 * count)
        rows.append(Row(f"a ledger entry, {name}: size", "bytes", [size / (100 * count)]))
        rows.append(Row(f"a ledger entry, {name}: CPU", "µs", [cpu_us]))
    return rows
