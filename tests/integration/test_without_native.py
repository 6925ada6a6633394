"""Tests that the service answers the same and writes the same records with and without compiled modules."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.stack import Kafka, Redis, Service
from service import native
from tests.conftest import MakeTopic
from tests.integration.conftest import SETTINGS
from tests.integration.judge import read_committed

pytestmark = pytest.mark.skipif(not native.COMPILED, reason="installed without a compiler")

# What differs between processes and between runs. An offset may have one digit more, which changes the length of the
# body: a marker takes an offset too, and the slots may divide the transactions differently.
_VARYING = re.compile(
    rb'(?i)(?<=\r\n)(?:date|idempotency-key-expires|content-length): [^\r]+|(?<="offset":)\d+|(?<="timestamp":)\d{13}'
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def both(kafka: Kafka, redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two processes, with and without compiled modules, each in its own namespace."""
    services = []
    for name, module in (("compiled", "service"), ("python", "tests.integration.without_native")):
        environment = {**SETTINGS, "FENCEPOST_NAMESPACE": f"{name}-{time.time_ns()}", "FENCEPOST_INSTANCE": "same"}
        folder = tmp_path_factory.mktemp(name)
        services.append(
            Service(folder, kafka=kafka.bootstrap, redis=redis.url, env=environment, module=module, name=name)
        )
    try:
        for service in services:
            service.start()
        yield services
    finally:
        for service in services:
            service.kill()
    for service in services:
        assert "Traceback" not in service.log.read_text(), service.tail(60)


def said(service: Service, *parts: bytes) -> bytes:
    """Send these bytes, with a pause between the parts, and read all answers until nothing comes for a while."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)
        heard = b""
        connection.settimeout(10 if parts[0].startswith(b"POST") else 0.3)
        while True:
            try:
                some = connection.recv(65_536)
            except TimeoutError:
                break
            heard += some
            connection.settimeout(0.3)
            if not some:
                heard += b"<end>"
                break
    return _VARYING.sub(b"", heard)


def post(fields: Any, key: str | None = "k", path: str = "/events", lines: str = "", version: str = "1.1") -> bytes:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{lines}"
    head += "" if key is None else f"Idempotency-Key: {key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def requests(topic: str) -> list[tuple[bytes, ...]]:
    """Make the requests, each for a connection of its own, in parts."""
    event = {"topic": topic, "key": "c", "value": {"n": 1}}
    members = [event | {"idempotency_key": f"m{n}", "key": f"c{n}"} for n in range(5)]
    plain = post(event, "plain")
    odd = [*members[:2], event, {"topic": topic, "value": 1, "idempotency_key": "m2", "more": 1}, members[0]]
    return [
        (plain,),
        (plain,),
        (plain[:30], plain[30:]),
        (plain + post(event, "second"),),
        (post(event | {"value": 2}, "plain"),),
        (post(event, '"quoted key"'),),
        (post(event, "a/b?c=%d é".encode().decode("latin-1").encode("ascii", "ignore").decode()),),
        (post(event | {"headers": {"b": "2", "a": "1", "traceparent": TRACE}}, "headers"),),
        (post(event, "traced", lines=f"traceparent: {TRACE}\r\n"),),
        (post(event | {"partition": 2, "timestamp": 1_700_000_000_000}, "fields"),),
        (post(event | {"partition": 99}, "partition"),),
        (post({"topic": topic, "value": None, "key": "c"}, "tombstone"),),
        (post({"topic": topic, "value_base64": "AAEC", "key": "c"}, "base64"),),
        (post(f'{{"topic":"{topic}", "key":"é\\u00e9","value": "\\ud83d\\ude00 ü" }}'.encode(), "text"),),
        (post(event, None),),
        (post(event, "ü"),),
        (post(event | {"more": 1}),),
        (post(event | {"topic": "nobody-made-this"}),),
        (post(b'{"topic":"%b","value":{"a":1,"a":2}}' % topic.encode()),),
        (post(b'{"topic":"%b","value":"\xff"}' % topic.encode()),),
        (post(b'{"topic":"%b","value":' % topic.encode() + b"[" * 70 + b"]" * 70 + b"}"),),
        (post(b"no json"),),
        (post(event, "old", version="1.0"),),
        (post(event, "last", lines="Connection: close\r\n"),),
        (post(event, "expecting", lines="Expect: 100-continue\r\n"),),
        (post(event, lines="Content-Encoding: gzip\r\n"),),
        (post(event, lines="Host: y\r\n"),),
        (post(event).replace(b"Host: x\r\n", b""),),
        (post(event).replace(b"application/json", b"text/plain"),),
        (post(event, "waiting", lines="Prefer: wait=1\r\n"),),
        (post({"events": members}, None, "/events/batch"),),
        (post({"events": members}, None, "/events/batch"),),
        (post({"events": odd, "atomic": False}, None, "/events/batch"),),
        (post({"events": [*members[3:], members[0] | {"value": 9}]}, None, "/events/batch"),),
        (post({"events": [event, event], "atomic": True}, "whole", "/events/batch"),),
        (post({"events": []}, None, "/events/batch"),),
        (post(event, "nowhere", "/elsewhere"),),
        (b"POST /events HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",),
        (b"GET /events/plain HTTP/1.1\r\nHost: x\r\n\r\n",),
    ]


async def test_the_service_gives_the_same_answers_and_records_with_and_without_c(
    both: list[Service], make_topic: MakeTopic, kafka: Kafka
) -> None:
    topics = [make_topic(3), make_topic(3)]

    def answers(service: Service, topic: str) -> list[bytes]:
        return [said(service, *parts).replace(topic.encode(), b"TOPIC") for parts in requests(topic)]

    of_each = await asyncio.gather(
        *(asyncio.to_thread(answers, service, topic) for service, topic in zip(both, topics, strict=True))
    )
    for parts, compiled, python in zip(requests("TOPIC"), *of_each, strict=True):
        assert compiled == python, parts
        assert compiled.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), parts
    statuses = {int(answer[9:12]) for answer in of_each[0]}
    assert statuses >= {200, 201, 207, 400, 404, 415, 422}
    records = []
    for topic in topics:
        found = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
        records.append(
            sorted(
                (r.place[1], r.key or b"", r.value or b"", [(n, c) for n, c in r.headers if n != "fencepost"])
                for r in found
            )
        )
    assert len(records[0]) > 20
    assert records[0] == records[1]
