"""Measures one attacker beside good clients: for how long it holds the event loop, and the latency of the others.

The good clients are 32 connections, each with a pause of 10 ms on average before a request. The attacker is one
connection without pauses, each time with a body of up to 8 MiB of one shape. In each round the good clients run alone
first, and then beside the attacker. A task on the event loop measures for how long it could not run (held.py): "held"
is the longest time of a round, less the time for which the thread of the loop waited for a CPU that another process
used.
"""

import http.client
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.bench import held
from tests.bench.rows import Goal, NotRealWork, Row, ratios
from tests.bench.stage import Stage, Target
from tests.bench.wrk import Loaded

CONNECTIONS, WAIT_MS = 32, 10
BODY_BYTES = 8 * 1024 * 1024
EVENTS = 10_000
HELD = Goal(most=20.0)
SLOWER = Goal(most=2.0)
ANSWER_S = 60.0
# Replaced by a number of eight digits, a new one for each request.
NUMBER = b"########"

JSON, LINES, CLOUDEVENTS = "application/json", "application/x-ndjson", "application/cloudevents-batch+json"
JSON_V2 = "application/vnd.kafka.json.v2+json"


@dataclass(frozen=True)
class Shape:
    """The attacker's request, and the status that it must get."""

    of: str
    status: int
    body: Callable[[bytes], bytes]  # for a topic
    path: str = "/events/batch"
    kind: str = JSON


def _many(unit: bytes, size: int = BODY_BYTES - 1_000) -> bytes:
    return b",".join([unit] * (size // (len(unit) + 1)))


def _names(count: int, before: bytes = b"") -> bytes:
    return b"{%b}" % b",".join(b'"%b%x":0' % (before, number) for number in range(count))


def _value(value: bytes) -> Callable[[bytes], bytes]:
    """Make a batch of one event that is too large; the service must check that the body is JSON first."""
    return lambda topic: b'{"events":[{"topic":"%b","value":%b}]}' % (topic, value)


def _problems(topic: bytes) -> bytes:
    return b'{"events":[%b]}' % b",".join(b'{"topic":"%b","x%d":0}' % (topic, number) for number in range(EVENTS))


def _events(topic: bytes) -> bytes:
    event = b'{"topic":"%b","value":%d,"idempotency_key":"%b-%d"}'
    return b'{"events":[%b]}' % b",".join(event % (topic, number, NUMBER, number) for number in range(EVENTS))


def _headers(topic: bytes) -> bytes:
    many = b",".join(b'"%x":""' % number for number in range(160_000))
    event = b'{"topic":"%b","value":1,"idempotency_key":"k","headers":{%b}}' % (topic, many)
    return b'{"events":[%b]}' % b",".join([event] * (BODY_BYTES // (len(event) + 1)))


def _attributes(topic: bytes) -> bytes:
    many = b",".join(b'"a%x":0' % number for number in range(90_000))
    event = b'{"specversion":"1.0","id":"1","source":"s","type":"%b",%b}' % (topic, many)
    return b"[%b]" % b",".join([event] * (BODY_BYTES // (len(event) + 1)))


def _records(_: bytes) -> bytes:
    record = b'{"value":1,"headers":[%b]}' % _many(b'{"key":""}', 1_900_000)
    return b'{"records":[%b]}' % _many(record)


def _brackets(_: bytes) -> bytes:
    """Records that are refused: each is longer than an event may be."""
    record = b'{"value":{"type":"JSON","data":[%b]}}' % _many(b"[[[[]]]]", 2_000_000)
    return record * (BODY_BYTES // len(record))


SHAPES = (
    Shape("line feeds", 400, lambda topic: b"\n" * (BODY_BYTES - 1), kind=LINES),
    Shape("small objects", 413, lambda topic: b'{"events":[%b]}' % _many(b'{"topic":"t"}')),
    Shape("objects of 40 names", 207, _value(b"[%b]" % _many(_names(40)))),
    Shape("an object of all names", 207, _value(_names(800_000))),
    Shape("escaped names", 207, _value(b"[%b]" % _many(b'{"\\u0061":0,"b":1}'))),
    Shape("an object of all names, escaped", 207, _value(_names(480_000, b"\\u0061"))),
    Shape("surrogate pairs", 207, _value(b'"%b"' % (b"\\ud83d\\ude00" * (BODY_BYTES // 12 - 100)))),
    Shape("a fault at the end", 400, lambda topic: _value(b"[%b]" % _many(_names(8)))(topic)[:-1]),
    Shape("many headers", 207, _headers),
    Shape("many attributes", 207, _attributes, "/events", CLOUDEVENTS),
    Shape("produce records of many headers", 400, _records, "/topics/attacker-bad", JSON_V2),
    Shape("produce records of brackets", 200, _brackets, "/v3/clusters/any/topics/attacker-bad/records"),
    Shape("10,000 events", 207, _events),
    Shape("10,000 problems", 207, _problems),
)


class _Attacker:
    """One connection that sends one shape again and again, in a thread."""

    def __init__(self, target: Target, shape: Shape, topic: str, number: int) -> None:
        self.requests = 0
        self.written = 0  # events
        self.wrong = ""  # an unexpected answer
        self._shape = shape
        self._number = number
        self._body = shape.body(topic.encode())
        self._connection = http.client.HTTPConnection("127.0.0.1", target.service.port, timeout=ANSWER_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        # A real attacker has a CPU of its own: on this machine its thread gives way to the service and the good
        # clients.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._stop.is_set() and not self.wrong:
            body = self._body.replace(NUMBER, b"%08d" % (self._number + self.requests))
            self._connection.request("POST", self._shape.path, body, {"Content-Type": self._shape.kind})
            response = self._connection.getresponse()
            answer = response.read()
            self.requests += 1
            self.written += answer.count(b'"status":201')
            if response.status != self._shape.status:
                self.wrong = f"{self._shape.of}: {response.status} {answer[:200]!r}"

    def __enter__(self) -> "_Attacker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=ANSWER_S)
        self._connection.close()


@dataclass
class _Rounds:
    """The figures of one shape."""

    shape: Shape
    alone: list[Loaded] = field(default_factory=list)
    beside: list[Loaded] = field(default_factory=list)
    held_ms: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)

    def rows(self) -> list[Row]:
        alone, beside = ([loaded.p99_ms for loaded in side] for side in (self.alone, self.beside))
        of = self.shape.of
        return [
            Row(f"{of}: the loop was held, at most", "ms", self.held_ms, HELD),
            Row(f"{of}: good clients' p99 over that without the attacker", "x", ratios(beside, alone), SLOWER),
            Row(f"{of}: good clients' p99", "ms", beside),
            Row(f"{of}: good clients' p99 without the attacker", "ms", alone),
            Row(f"{of}: attacks", "/s", self.requests),
        ]


def measure(stage: Stage) -> list[Row]:
    seconds, rounds = stage.pick(1, 4), stage.pick(1, 3, 5)
    shapes = [_Rounds(shape) for shape in SHAPES]
    quiet_ms: list[float] = []
    with stage.target(topics=("attacker-good", "attacker-bad"), module="tests.bench.held") as target:
        if stage.depth != "quick":
            stage.warm_up(target, 3, CONNECTIONS)
        for number in range(rounds):
            for place, each in enumerate(shapes):
                quiet_ms.append(_round(target, each, seconds, 10_000 * (len(shapes) * number + place)))
        target.check()
    return [
        Row("good clients alone: the loop was held, at most", "ms", quiet_ms),
        *(row for each in shapes for row in each.rows()),
    ]


def _round(target: Target, each: _Rounds, seconds: float, number: int) -> float:
    """Run the good clients alone, then beside the attacker, and measure for how long the loop was held in both.

    Raises:
        NotRealWork: the attacker was not answered as it had to be.
    """
    target.settle()
    started = time.monotonic()
    each.alone.append(target.load(seconds, CONNECTIONS, delay=WAIT_MS))
    quiet_ms = held.longest_ms(target.service.log, started, time.monotonic())
    with _Attacker(target, each.shape, target.topics[1], number) as attacker:
        started = time.monotonic()
        each.beside.append(target.load(seconds, CONNECTIONS, delay=WAIT_MS))
        each.requests.append(attacker.requests / (time.monotonic() - started))
        each.held_ms.append(held.longest_ms(target.service.log, started, time.monotonic()))
    if attacker.wrong or not attacker.requests:
        raise NotRealWork(attacker.wrong or f"{each.shape.of}: no answer in {seconds} s")
    target.answered += attacker.written
    return quiet_ms
