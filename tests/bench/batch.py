"""(b) POST /events/batch of 100 and 1,000 events against a bare aiokafka transactional producer with the same bytes.

The bare side is one process with as many transactional producers as the service has slots (4), all working at once. Its
records have the same keys, values and headers (also Fencepost's), over the same number of partitions. Its transactions
have as many events as the service's in the same round, by the service's own metric. It writes no ledger, claims nothing
and parses nothing. The goal is for `send()`, the usual way to use aiokafka; `send_batch()` with batches made by hand is
the least cost of the library.

Rounds in which Redis's hash table doubles (at 1.8, 3.7, 7.3 … million keys) are slow, because each operation then also
moves a part of the table; the row of Redis's CPU shows them. There are enough rounds for the median to be of other
ones.
"""

from dataclasses import dataclass, field

from deploy.stack import Kafka
from tests.bench import checks
from tests.bench.bare import Bare
from tests.bench.rows import Goal, NotRealWork, Row, ratios
from tests.bench.stage import Stage, Target
from tests.faults.cluster import Cluster

# Events in a batch, and the number of connections.
SIZES = {100: 16, 1_000: 4}
PARTITIONS = 3
SLOTS = 4
EVENT_BYTES = 250
VALUE_BYTES = 215  # of an event of load.lua, without the JSON around its value


@dataclass
class _Bare:
    """The bare side's runs with one way of sending, in a topic of its own."""

    api: str
    topic: str
    events: int = 0
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def run(self, bare: Bare, seconds: float, events: int) -> None:
        found = bare.ask(
            "transactions",
            topic=self.topic,
            partitions=PARTITIONS,
            events=events,
            producers=SLOTS,
            seconds=seconds,
            prefix=self.topic,
            size=VALUE_BYTES,
            api=self.api,
        )
        self.events += found["events"]
        self.rates.append(found["events"] / found["seconds"])
        self.cpu_us.append(1e6 * found["cpu_s"] / found["events"])

    def check(self, bootstrap: str) -> None:
        found = len(checks.keys_of(bootstrap, [self.topic]))
        if found != self.events:
            raise NotRealWork(f"the bare side wrote {self.events} events, its topic has {found}")


def measure(stage: Stage) -> list[Row]:
    rows = _compare(stage, stage.kafka, "", Goal(least=0.7))
    if stage.depth == "quick":
        return rows
    with Cluster(stage.folder / "three", 3) as cluster:
        return rows + _compare(stage, cluster.brokers[0], ", RF 3", Goal(least=0.6))


def _compare(stage: Stage, kafka: Kafka, where: str, goal: Goal) -> list[Row]:
    rounds = stage.pick(1, 7, 9)
    seconds = stage.pick(2, 2, 3)
    rows: list[Row] = []
    with stage.target(kafka=kafka, partitions=PARTITIONS, slots=SLOTS) as target, Bare(kafka.bootstrap) as bare:
        sides = [_Bare("send", f"{target.namespace}-send"), _Bare("batch", f"{target.namespace}-batch")]
        for side in sides:
            kafka.create_topic(side.topic, partitions=PARTITIONS)
            side.run(bare, seconds, 400)  # warm-up
        stage.warm_up(target, 3, 16, batch=100, bytes=EVENT_BYTES)
        for size, connections in SIZES.items():
            for side in sides:
                side.rates, side.cpu_us = [], []
            rows += _rounds(target, bare, sides, (size, connections, seconds, rounds), where, goal)
        target.check()
        for side in sides:
            side.check(kafka.bootstrap)
    return rows


def _rounds(
    target: Target, bare: Bare, sides: list[_Bare], plan: tuple[int, int, float, int], where: str, goal: Goal
) -> list[Row]:
    size, connections, seconds, rounds = plan
    rates: list[float] = []
    cpu_us: list[float] = []
    redis_us: list[float] = []
    grouped: list[float] = []
    for _ in range(rounds):
        before = target.groups()
        loaded = target.load(seconds, connections, batch=size, bytes=EVENT_BYTES)
        events, groups = (after - then for after, then in zip(target.groups(), before, strict=True))
        rates.append(loaded.rate * size)
        cpu_us.append(target.cpu_us / size)
        redis_us.append(target.redis_us / size)
        grouped.append(events / groups)
        for side in sides:
            side.run(bare, seconds, round(grouped[-1]))
    send, batch = sides
    at = f"batches of {size:,}{where}"
    return [
        Row(f"{at}: events over a bare producer's with send()", "x", ratios(rates, send.rates), goal),
        Row(f"{at}: events over a bare producer's with send_batch()", "x", ratios(rates, batch.rates)),
        Row(f"{at}: events", "/s", rates),
        Row(f"{at}: bare producer, send()", "/s", send.rates),
        Row(f"{at}: bare producer, send_batch()", "/s", batch.rates),
        Row(f"{at}: events a transaction", "", grouped),
        Row(f"{at}: CPU an event", "µs", cpu_us),
        Row(f"{at}: CPU an event, Redis", "µs", redis_us),
        Row(f"{at}: CPU an event, send()", "µs", list(send.cpu_us)),
        Row(f"{at}: CPU an event, send_batch()", "µs", list(batch.cpu_us)),
    ]
