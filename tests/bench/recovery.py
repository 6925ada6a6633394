"""(i) Store recovery: Redis is flushed, and its keys are read back from the ledger.

Transactional producers (one for each slot, under the slot's own id) write the ledger in the service's format, with a
hundred entries in each record as in a busy service. /readyz is requested every few ms: the first time is from the flush
until 503, which begins the recovery as a claim would, the second from there until 200. Then Redis must hold every key.

Only Redis's own work grows faster than the number of keys: when its hash table doubles, it moves all keys, and a larger
table has a larger part outside of the CPU's caches. The service reads ahead meanwhile.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import redis
from confluent_kafka import Producer

from service.contract.wire.ledger import encode_ledger
from service.contract.wire.ledger_entries import Entry
from service.contract.wire.names import ledger_topic, transactional_id
from tests.bench.redis_servers import DeployedRedis
from tests.bench.rows import Goal, NotRealWork, Row, growth
from tests.bench.stage import Stage, Target

SLOTS_MAX = 64
ENTRIES_A_RECORD = 100
TIMEOUT_S = 240.0
NOTICED_S = 10.0
FLUSH_S = 60.0


def measure(stage: Stage) -> list[Row]:
    points = stage.pick((2_000, 4_000), (100_000, 1_000_000), (100_000, 1_000_000, 10_000_000))
    times = {count: _recover(stage, count, stage.pick(1, 3)) for count in points}
    took_s = {count: [took for _, took in each] for count, each in times.items()}
    rates = {count: [count / seconds for seconds in each] for count, each in took_s.items()}
    return [
        *(
            Row(
                f"recovered at {count:,} keys",
                "keys/s",
                rates[count],
                Goal(least=300_000) if count >= 1_000_000 else None,
                series="store recovery by keys",
                at=count,
            )
            for count in points
        ),
        Row(
            "from flush to noticed, by nobody's write", "s", [noticed for each in times.values() for noticed, _ in each]
        ),
        *growth("from noticed to ready", "s", took_s, "from noticed to ready"),
    ]


def _recover(stage: Stage, count: int, rounds: int) -> list[tuple[float, float]]:
    """Measure in each round the seconds from the flush until it was noticed, and from there to ready."""
    times: list[tuple[float, float]] = []
    folder = stage.folder / f"recovery-{count}"
    with DeployedRedis(folder) as server, stage.target(redis=server, slots_max=SLOTS_MAX) as target:
        target.service.stop()  # the ledger exists now, and no process writes to it
        _write_ledger(target, count)
        server.flush()
        target.service.start(timeout_s=TIMEOUT_S)
        for _ in range(rounds):
            times.append(_flush(target))
            with server.client() as store:
                found = keys_of_events(store, target.namespace)
            if found != count:
                raise NotRealWork(f"{count} keys are in the ledger, Redis knew {found} after its recovery")
    return times


def _flush(target: Target) -> tuple[float, float]:
    if not target.service.ready():
        raise NotRealWork("the service was not ready before the flush")
    with redis.Redis.from_url(target.redis.url, socket_timeout=FLUSH_S) as store:
        store.flushall()
    flushed = time.monotonic()  # a flush of millions of keys takes a while
    while target.service.ready():  # not noticed yet
        if time.monotonic() > flushed + NOTICED_S:
            raise NotRealWork(f"the flush was not noticed within {NOTICED_S:.0f} s")
        time.sleep(0.002)
    noticed = time.monotonic()
    target.service.wait_ready(TIMEOUT_S)
    return noticed - flushed, time.monotonic() - noticed


def keys_of_events(store: redis.Redis, namespace: str) -> int:
    """Count the keys of events, without leases and other keys.

    These others change during the count, so the result is the size of the store between two equal counts.
    """
    size, others = 0, -1
    while (counted := sum(1 for _ in store.scan_iter(f"{{{namespace}:0}}[^k]*", count=100_000))) != others:
        size, others = int(store.dbsize()), counted
    return size - others


def _write_ledger(target: Target, count: int) -> None:
    """Write this many entries over all partitions, each record in a transaction of its slot's producer."""
    shares = [count // SLOTS_MAX + (slot < count % SLOTS_MAX) for slot in range(SLOTS_MAX)]
    firsts = itertools.accumulate([0, *shares])
    with ThreadPoolExecutor(16) as writers:
        work = zip(range(SLOTS_MAX), firsts, shares, strict=False)
        written = [writers.submit(_write_slot, target, *each) for each in work]
        for each in written:
            each.result()


def _write_slot(target: Target, slot: int, first: int, count: int) -> None:
    producer = Producer(
        {
            "bootstrap.servers": target.kafka.bootstrap,
            "transactional.id": transactional_id(target.namespace, slot),
            "linger.ms": 0,
            "compression.codec": "zstd",  # as the service's ledger records
        }
    )
    producer.init_transactions(60)
    for start in range(first, first + count, ENTRIES_A_RECORD):
        numbers = range(start, min(start + ENTRIES_A_RECORD, first + count))
        record = encode_ledger(slot, 1, 0, "bench", _entries(target, numbers))
        producer.begin_transaction()
        producer.produce(ledger_topic(target.namespace), record, partition=slot)
        producer.commit_transaction(60)


def _entries(target: Target, numbers: range) -> Iterator[str]:
    now = time.time_ns() // 1_000_000
    for number in numbers:
        id = hashlib.sha256(b"%d" % number).digest()[:16]
        yield Entry(id, id[:8], now, target.topic, number % 3, number, now).encode()
