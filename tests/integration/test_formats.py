"""Tests other forms of a request: NDJSON, and CloudEvents 1.0 in its three modes."""

import asyncio
import gzip
import json
import zlib

from tests.bench.stage import memory_bytes
from tests.compression import zstd
from tests.integration.conftest import Stage
from tests.integration.judge import Delivered, read_committed
from tests.integration.streamer import stream_lines

ATTRIBUTES = {"specversion": "1.0", "id": "42", "source": "/shop/7", "type": "made"}


async def records(stage: Stage, topic: str) -> list[Delivered]:
    return await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])


async def test_lines_are_answered_by_lines_in_their_order(stage: Stage, topic: str) -> None:
    service = await stage.started()
    lines = [json.dumps({"topic": topic, "value": n, "idempotency_key": f"k{n}"}) for n in range(5_000)]
    lines[7], lines[11] = "{", lines[3]
    async with stage.client.http.stream(
        "POST",
        f"{service.url}/events/batch",
        content="\n".join(lines),
        headers={"Content-Type": "application/x-ndjson"},
    ) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (207, "application/x-ndjson")
        assert answer.headers["transfer-encoding"] == "chunked"
        results = [json.loads(line) async for line in answer.aiter_lines()]
    assert [result["status"] for result in results] == [400 if n == 7 else 201 for n in range(5_000)]
    assert results[7]["problem"]["code"] == "invalid-json"
    assert results[11] == {**results[3], "replayed": True}
    assert len(await records(stage, topic)) == 4_998
    # Compressed they are the same events.
    lines, results = lines[:100], results[:100]
    for coding, encode in (("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd.compress)):
        packed = await stage.client.http.post(
            f"{service.url}/events/batch",
            content=encode("\n".join(lines).encode()),
            headers={"Content-Type": "application/x-ndjson", "Content-Encoding": coding},
        )
        again = [json.loads(line) for line in packed.text.splitlines()]
        assert again == [result if n == 7 else {**result, "replayed": True} for n, result in enumerate(results)]
        single = await stage.client.http.post(
            f"{service.url}/events",
            content=encode(json.dumps({"topic": topic, "value": 0}).encode()),
            headers={"Content-Type": "application/json", "Idempotency-Key": "k0", "Content-Encoding": coding},
        )
        assert (single.status_code, single.headers["idempotent-replayed"]) == (201, "true")
    assert len(await records(stage, topic)) == 4_998
    # The connection stays open, also after an error that concerns the whole body.
    empty = await stage.client.http.post(
        f"{service.url}/events/batch", content="\n", headers={"Content-Type": "application/x-ndjson"}
    )
    assert (empty.status_code, empty.json()["code"]) == (400, "invalid-event")


async def test_a_stream_of_any_length_takes_bounded_memory_and_may_be_sent_again(stage: Stage, topic: str) -> None:
    """64 MB, eight times what a body may have."""
    service = await stage.started()
    event = b'{"topic":"%b","value":"' + b"x" * 10_000 + b'","idempotency_key":"k%d"}\n'
    most = before = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, memory_bytes(service.pid))
            await asyncio.sleep(0.05)

    for count, again in ((600, 0), (6_400, 600)):  # the first ones warm up
        watching = asyncio.create_task(watch())
        lines = (b"{\n" if n == 300 else event % (topic.encode(), n) for n in range(count))
        assert await stream_lines(service.url, lines) == {201: count - 1, 400: 1}, again
        watching.cancel()
        before = before or most
    assert most - before < 32_000_000
    assert len(await records(stage, topic)) == 6_399


async def test_a_cloudevent_is_written_once_in_either_mode(stage: Stage, topic: str) -> None:
    service = await stage.started()
    url = f"{service.url}/events"
    headers = {f"ce-{name}": text for name, text in ATTRIBUTES.items()} | {"ce-topic": topic, "ce-partitionkey": "c7"}
    quoted = {name: f'"{text}"' for name, text in headers.items()}  # as older senders write it
    first, again = [
        await stage.client.http.post(url, content=b"\x00\xff", headers={**given, "Content-Type": "image/png"})
        for given in (headers, quoted)
    ]
    assert (first.status_code, again.status_code, again.headers["idempotent-replayed"]) == (201, 201, "true")
    assert first.content == again.content
    assert first.headers["idempotency-key"] == "/shop/7 42"

    body = json.dumps({**ATTRIBUTES, "id": "43", "topic": topic, "data": {"n": 1}}).encode()
    # the content type decides the mode
    structured = {**headers, "Content-Type": "application/cloudevents+json; charset=utf-8"}
    made = await stage.client.http.post(url, content=body, headers=structured)
    assert made.status_code == 201
    state = await stage.client.http.get(f"{service.url}{made.headers['location']}")
    assert state.json()["state"] == "committed"

    one, two = sorted(await records(stage, topic), key=lambda record: record.idempotency_key or "")
    assert (one.key, one.value, dict(one.headers)["ce_id"], dict(one.headers)["content-type"]) == (
        b"c7",
        b"\x00\xff",
        b"42",
        b"image/png",
    )
    assert (two.value, dict(two.headers)["content-type"]) == (body, b"application/cloudevents+json")
    assert (one.idempotency_key, two.idempotency_key) == ("/shop/7 42", "/shop/7 43")


async def test_a_batch_of_cloudevents_is_answered_one_by_one(stage: Stage, topic: str) -> None:
    service = await stage.started()
    events = [{**ATTRIBUTES, "id": str(n), "topic": topic} for n in (1, 2, 1)] + [{"id": "1"}]
    headers = {"Content-Type": "application/cloudevents-batch+json"}
    answer = await stage.client.http.post(f"{service.url}/events", json=events, headers=headers)
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert [result["status"] for result in results] == [201, 201, 201, 400]
    assert [result.get("replayed") for result in results] == [False, False, True, None]
    assert len(await records(stage, topic)) == 2
    empty = await stage.client.http.post(f"{service.url}/events", json=[], headers=headers)
    assert (empty.status_code, empty.json()) == (207, {"results": []})
    refused = await stage.client.http.post(
        f"{service.url}/events", json=events, headers={**headers, "Idempotency-Key": "one-for-all"}
    )
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid-key")
