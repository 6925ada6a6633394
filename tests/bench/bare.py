"""Measures the libraries alone, in a process of its own: `python -m tests.bench.bare BOOTSTRAP`.

The process reads a command (JSON) from each line and answers with a line. `Bare` sends the commands.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import hiredis
import uvloop
from aiokafka import AIOKafkaProducer
from aiokafka.structs import TopicPartition

from deploy.places import ROOT
from tests.bench.rows import NotRealWork

# Headers as large as Fencepost's, which the bare producer adds to write the same number of bytes.
STAMP: Final = ("fencepost", b"1;" + b"0" * 96)

_CLAIM: Final = """
redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return redis.call('TIME')
"""
_MARK: Final = """
redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('HSET', KEYS[2], '0', ARGV[3])
return 1
"""


class Bare:
    """The process, and its commands, one at a time."""

    def __init__(self, bootstrap: str) -> None:
        command = [sys.executable, "-m", "tests.bench.bare", bootstrap]
        self._child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()  # ends the process
        self._child.wait(timeout=20)

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Run one command.

        Raises:
            NotRealWork: it failed; its own words are on standard error.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps({"do": do, **arguments}), file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        if not line:
            raise NotRealWork(f"the bare side failed at {do}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Redis:
    """Make calls over one connection, one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = hiredis.Reader()

    async def call(self, *words: Any) -> Any:
        self._writer.write(hiredis.pack_command(words))
        while (answer := self._parser.gets()) is False:
            self._parser.feed(await self._reader.read(65_536))
        if isinstance(answer, Exception):
            raise answer
        return answer


def value_of(number: int, size: int) -> bytes:
    """Make an event's value as load.lua does."""
    head = f'{{"n":{number},"pad":"'
    return f'{head}{"x" * max(0, size - len(head) - 2)}"}}'.encode()


class _Side:
    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._producers: dict[tuple[str, int, str | None], AIOKafkaProducer] = {}
        self._number = 0

    async def close(self) -> None:
        for producer in self._producers.values():
            await producer.stop()

    async def _producer(self, name: str, n: int, codec: str | None) -> AIOKafkaProducer:
        if (name, n, codec) not in self._producers:
            producer = AIOKafkaProducer(
                bootstrap_servers=self._bootstrap,
                transactional_id=f"{name}-{n}-{codec}",
                acks="all",
                max_batch_size=1_000_000,
                compression_type=codec,
            )
            await producer.start()
            self._producers[name, n, codec] = producer
        return self._producers[name, n, codec]

    def _event(self, prefix: str, size: int, stamped: bool) -> dict[str, Any]:
        self._number += 1
        n = self._number
        headers = [("idempotency-key", f"{prefix}-{n}".encode()), STAMP] if stamped else []
        return {"key": b"c%d" % (n % 1000), "value": value_of(n, size), "headers": headers}

    async def transactions(
        self,
        topic: str,
        partitions: int,
        events: int,
        producers: int,
        seconds: float,
        prefix: str,
        size: int,
        api: str = "send",
        codec: str | None = None,
        stamped: bool = True,
        values: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write transactions of `events` each from several producers at once, for some seconds."""
        sides = [await self._producer(topic, n, codec) for n in range(producers)]
        texts = [value.encode() for value in values]
        written = 0

        async def one(producer: AIOKafkaProducer) -> None:
            asked = [self._event(prefix, size, stamped) for _ in range(events)]
            if texts:
                for event in asked:
                    event["value"] = texts[self._number % len(texts)]
                    self._number += 1
            async with producer.transaction():
                if api == "send":
                    sent = [await producer.send(topic, **event) for event in asked]
                else:
                    sent = []
                    for partition in range(min(partitions, events)):
                        batch = producer.create_batch()
                        for event in asked[partition::partitions]:
                            assert batch.append(timestamp=None, **event) is not None, "the batch is full"
                        sent.append(await producer.send_batch(batch, topic, partition=partition))
                for metadata in await asyncio.gather(*sent):
                    assert metadata.offset >= 0

        async def work(producer: AIOKafkaProducer, until: float) -> None:
            nonlocal written
            while time.perf_counter() < until:
                await one(producer)
                written += events

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work(producer, started + seconds) for producer in sides))
        took = time.perf_counter() - started
        return {"events": written, "seconds": took, "cpu_s": time.process_time() - cpu}

    async def single(self, port: int, topic: str, ledger: str, count: int, prefix: str, size: int) -> dict[str, Any]:
        """Measure the round trips of one event, one event at a time: claim, transaction with a ledger record, mark."""
        redis = _Redis(*await asyncio.open_connection("127.0.0.1", port))
        claim, mark = await redis.call("SCRIPT", "LOAD", _CLAIM), await redis.call("SCRIPT", "LOAD", _MARK)
        sides = [await self._producer(topic, n, None) for n in range(4)]
        took_ms: list[float] = []
        for place in range(count):
            producer = sides[place % 4]  # as slots do: the markers of the last producer are still being written
            event = self._event(prefix, size, stamped=True)
            key = b"bare-" + event["headers"][0][1]
            started = time.perf_counter()
            await redis.call("EVALSHA", claim, 1, key, b"c" * 27, 86_400_000)
            await producer.begin_transaction()
            # Together with the data's partition, in one request.
            producer._txn_manager.maybe_add_partition_to_txn(TopicPartition(ledger, 0))
            metadata = await (await producer.send(topic, **event))
            entry = b"e" * 300
            recorded = await (await producer.send(ledger, entry, partition=0))
            await producer.commit_transaction()
            state = b"d%d" % metadata.offset + b"d" * 40
            await redis.call("EVALSHA", mark, 2, key, "bare-applied", state, 86_400_000, recorded.offset)
            took_ms.append(1000 * (time.perf_counter() - started))
        return {"events": count, "took_ms": took_ms}


async def _serve(bootstrap: str) -> None:
    side = _Side(bootstrap)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer = await getattr(side, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    await side.close()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
