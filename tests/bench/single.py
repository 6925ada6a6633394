"""(c) One client at a time that waits for each answer, against the same round trips with the libraries alone.

The bare side is a loop without HTTP: a script call to Redis, aiokafka's begin, data, ledger record and commit (in turn
on four producers, as slots do; data and ledger in one AddPartitionsToTxn), and another script call.
"""

from tests.bench import checks
from tests.bench.bare import Bare
from tests.bench.client import OneClient, body_of
from tests.bench.rows import Goal, NotRealWork, Row, quantile, ratios
from tests.bench.stage import Stage, Target


def one_by_one(target: Target, client: OneClient, count: int, topic: str = "") -> list[float]:
    """Send this many new events, one after another; returns the time of each in ms."""
    target.runs += 1
    took_ms = []
    for number in range(count):
        key = f"{target.namespace}-{target.runs}-{number}"
        status, ms = client.post(key, body_of(topic or target.topic, number))
        if status != 201:
            raise NotRealWork(f"an event was answered {status}")
        took_ms.append(ms)
    return took_ms


def measure(stage: Stage) -> list[Row]:
    rounds, count = stage.pick(1, 5, 9), stage.pick(100, 800)
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    with stage.target() as target, Bare(stage.kafka.bootstrap) as bare:
        topic, ledger = f"{target.namespace}-bare", f"{target.namespace}-bare-ledger"
        for name in (topic, ledger):
            stage.kafka.create_topic(name, partitions=3)
        arguments = {"port": stage.redis.port, "topic": topic, "ledger": ledger, "prefix": topic, "size": 215}
        stage.warm_up(target, 4, 64)
        with OneClient(target.service.port) as client:
            one_by_one(target, client, count)
            bare.ask("single", count=count, **arguments)
            for _ in range(rounds):
                ours.append(one_by_one(target, client, count))
                theirs.append(bare.ask("single", count=count, **arguments)["took_ms"])
        target.answered += (rounds + 1) * count
        target.check()
        if len(checks.keys_of(stage.kafka.bootstrap, [topic])) != (rounds + 1) * count:
            raise NotRealWork("the bare side has not written all of its events")
    half = [[quantile(each, 0.5) for each in side] for side in (ours, theirs)]
    most = [[quantile(each, 0.99) for each in side] for side in (ours, theirs)]
    return [
        Row("one client, p50", "ms", half[0], Goal(most=2.0)),
        Row("one client, p50 over the bare round trips'", "x", ratios(*half), Goal(most=1.3)),
        Row("one client, p99", "ms", most[0], Goal(most=10.0)),
        Row("bare round trips, p50", "ms", half[1]),
        Row("bare round trips, p99", "ms", most[1]),
    ]
