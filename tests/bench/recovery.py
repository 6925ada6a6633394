"""(i) Store recovery: Redis is flushed, and everything that it knew is read back from the ledger.

The ledger is written by transactional producers (one a slot, under the slots' own ids) in the service's format, a
hundred entries a record as a busy service writes them. Timed by a look at /readyz every few ms: from the flush until it
says 503, which begins the recovery as a claim would, and from there until it says 200 again. Then Redis must hold every
key.

What grows faster than the keys is Redis's own: each time that its table doubles it moves all keys that it has, and the
larger the table, the more of it is out of the processor's caches. The service reads ahead meanwhile.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import redis
from confluent_kafka import Producer

from service.contract.wire import Entry, encode_ledger, ledger_topic, transactional_id
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
    """Seconds from the flush until it was noticed, and from there to ready, in each round."""
    times: list[tuple[float, float]] = []
    folder = stage.folder / f"recovery-{count}"
    with DeployedRedis(folder) as server, stage.target(redis=server, slots_max=SLOTS_MAX) as target:
        target.service.stop()  # the ledger is there now, and nobody writes to it
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
    flushed = time.monotonic()  # a flush of millions of keys takes a while itself
    while target.service.ready():  # it has yet to notice
        if time.monotonic() > flushed + NOTICED_S:
            raise NotRealWork(f"the flush was not noticed within {NOTICED_S:.0f} s")
        time.sleep(0.002)
    noticed = time.monotonic()
    target.service.wait_ready(TIMEOUT_S)
    return noticed - flushed, time.monotonic() - noticed


def keys_of_events(store: redis.Redis, namespace: str) -> int:
    """How many keys of events there are; the few others are leases and the like.

    Those come and go while they are counted: what is told is the size of the store between two counts that agree.
    """
    size, others = 0, -1
    while (counted := sum(1 for _ in store.scan_iter(f"{{{namespace}:0}}[^k]*", count=100_000))) != others:
        size, others = int(store.dbsize()), counted
    return size - others


def _write_ledger(target: Target, count: int) -> None:
    """So many entries over all partitions, each record in a transaction of its slot's producer."""
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
            "compression.codec": "zstd",  # as the service's ledger
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
