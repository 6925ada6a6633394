"""(h) Growth: the cost of a POST by the amount of work. A doubling of the work may at most double the cost.

Processes share 256 connections and this machine's cores, each with a load generator of its own; the cost is the CPU of
all of them together. Connections, topics and sizes: the CPU of one process. Keys: servers that hold that many keys
already (real entries, written by a script), each with a process of its own, loaded in turn.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.cimpl import NewTopic

from tests.bench.checks import TOUCH_HEADER
from tests.bench.fill import fill
from tests.bench.redis_servers import DeployedRedis
from tests.bench.rows import Goal, Row, growth, ratios
from tests.bench.stage import Stage, Target, cpu_s

CONNECTIONS = 256

# The cost (µs of CPU) and the rate of one run.
Cost = tuple[float, float]


def measure(stage: Stage) -> list[Row]:
    return [*_processes(stage), *_connections(stage), *_topics(stage), *_sizes(stage), *_keys(stage)]


def _cost(target: Target, seconds: float, connections: int, **arguments: Any) -> Cost:
    rate = target.load(seconds, connections, **arguments).rate
    return target.cpu_us, rate


def _rounds(stage: Stage, points: Sequence[int], run: Callable[[int], Cost], what: str) -> list[Row]:
    """Measure each point once in each round; returns rows of cost and rate."""
    costs: dict[int, list[float]] = defaultdict(list)
    rates: dict[int, list[float]] = defaultdict(list)
    for _ in range(stage.pick(1, 3, 5)):
        for point in points:
            cost, rate = run(point)
            costs[point].append(cost)
            rates[point].append(rate)
    return [
        *growth(f"CPU a POST by {what}", "µs", costs, f"CPU a POST by {what}"),
        *(Row(f"POSTs by {what} at {at:,}", "/s", rates[at], series=f"POSTs by {what}", at=at) for at in points),
    ]


def _processes(stage: Stage) -> list[Row]:
    seconds, points = stage.pick(1, 2), stage.pick((1, 2), (1, 2, 4))
    with contextlib.ExitStack() as opened:
        first = opened.enter_context(stage.target(slots_max=16))
        targets = [first]
        for number in range(1, points[-1]):
            settings: dict[str, Any] = {
                "namespace": first.namespace,
                "instance": f"{first.namespace}-{number}",
                "slots_max": "16",
            }
            service = opened.enter_context(stage.service(f"{first.namespace}-{number}", **settings))
            targets.append(Target(service, first.kafka, first.redis, first.namespace, first.topics))

        def run(processes: int) -> Cost:
            some = targets[:processes]
            before = sum(cpu_s(target.service.pid) for target in targets)
            with ThreadPoolExecutor(len(some)) as at_once:
                name = f"{first.namespace}-{first.runs}"
                runs = [
                    at_once.submit(target.load, seconds, CONNECTIONS // len(some), prefix=f"{name}-{place}")
                    for place, target in enumerate(some)
                ]
                loaded = [each.result() for each in runs]
            first.runs += 1
            answered = sum(each.answered for each in loaded)
            cpu = sum(cpu_s(target.service.pid) for target in targets) - before
            return 1e6 * cpu / answered, sum(each.rate for each in loaded)

        for target in targets:
            target.warm(stage.pick(2, 3), 64, prefix=f"{target.service.name}-warm")
        rows = _rounds(stage, points, run, "processes")
        for target in targets:
            target.settle()
        first.answered = sum(target.answered for target in targets)
        first.cut = sum(target.cut for target in targets)
        first.check()
    return rows


def _connections(stage: Stage) -> list[Row]:
    seconds = stage.pick(1, 2)
    with stage.target() as target:
        target.warm(stage.pick(2, 3), CONNECTIONS)
        rows = _rounds(
            stage,
            stage.pick((64, 256), (64, 256, 1_024, 4_096)),
            lambda connections: _cost(target, seconds, connections),
            "connections",
        )
        target.check()
    return rows


def _topics(stage: Stage) -> list[Row]:
    seconds, points = stage.pick(1, 2), stage.pick((1, 10), (1, 10, 100, 1_000))
    name = "growth-topic"
    topics = [f"{name}-{number}" for number in range(points[-1])]
    admin = stage.kafka.admin()  # keeps the client alive until the topics exist
    made = admin.create_topics([NewTopic(topic, num_partitions=1) for topic in topics])
    for topic in made.values():
        topic.result(120)
    _touch(stage, topics)
    with stage.target() as target:
        target.topics = [*target.topics, *topics]

        def run(count: int) -> Cost:
            # With one topic, wrk's script takes the name as it is.
            to = {"topic": name, "topics": count} if count > 1 else {"topic": topics[0]}
            return _cost(target, seconds, CONNECTIONS, **to)

        target.warm(stage.pick(2, 3), CONNECTIONS, topic=name, topics=points[-1])
        rows = _rounds(stage, points, run, "topics")
        target.check()
    return rows


def _touch(stage: Stage, topics: Sequence[str]) -> None:
    """Write the first entries of each log's index files, whose first access takes the broker 10 ms each."""
    producer = Producer({"bootstrap.servers": stage.kafka.bootstrap, "linger.ms": 0})
    for _ in range(2):  # the index gets an entry only after another 4 KiB
        for topic in topics:
            producer.produce(topic, b"-" * 5_000, headers={TOUCH_HEADER: b""})
        producer.flush(120)


def _sizes(stage: Stage) -> list[Row]:
    seconds = stage.pick(1, 2)
    with stage.target() as target:
        target.warm(stage.pick(2, 3), 16)
        rows = _rounds(
            stage,
            stage.pick((1_000, 16_000), (1_000, 4_000, 16_000, 64_000, 256_000, 990_000)),
            lambda size: _cost(target, seconds, 16, bytes=size),
            "bytes an event",
        )
        target.check()
    return rows


def _keys(stage: Stage) -> list[Row]:
    seconds = stage.pick(1, 2)
    points = stage.pick((10_000, 20_000), (10_000, 100_000, 1_000_000), (10_000, 100_000, 1_000_000, 10_000_000))
    with contextlib.ExitStack() as opened:
        targets: dict[int, Target] = {}
        for keys in points:
            redis = opened.enter_context(DeployedRedis(stage.folder / f"keys-{keys}"))
            target = targets[keys] = opened.enter_context(stage.target(redis=redis))
            fill(target, 0, keys)
            target.warm(stage.pick(2, 3), CONNECTIONS)
        rows = _rounds(
            stage,
            points,
            lambda keys: _cost(targets[keys], seconds, CONNECTIONS),
            "keys in Redis",
        )
        for target in targets.values():
            target.check()
    rates = {row.at: row.values for row in rows if row.series == "POSTs by keys in Redis"}
    name = f"throughput with 10^{math.log10(points[-1]):.0f} keys over that with 10^{math.log10(points[0]):.0f}"
    return [*rows, Row(name, "x", ratios(rates[points[-1]], rates[points[0]]), Goal(least=0.9))]
