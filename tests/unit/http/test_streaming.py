"""Tests POSTs whose bodies are read as they arrive, message by message: order, bounds of memory, and bounds of time."""

import asyncio
import gc
import hashlib
import json
import time
import zlib
from collections.abc import Callable
from typing import Any, Literal, cast

import pytest

from service.contract import CallerRule
from service.core.metrics import Telemetry
from service.core.problems import NOT_WRITTEN, Problem
from service.core.settings import Settings
from service.http import lines as lines_module
from service.http import streamed_body, streamed_response
from service.http import streaming as module
from service.http.callers import Callers
from service.http.certificates import SCOPE_KEY, Names
from service.http.events import EventsEndpoint
from service.http.lines import lines_exchange
from service.http.request import OWN_BYTES, StopSignal
from service.http.request_guard import RequestGuard
from service.http.streaming import StreamEndpoint
from service.pipeline.admission import Admission
from service.pipeline.request import BatchChunk, WriteResult
from tests.compression import zstd
from tests.unit.fakes import Turns, World, ended
from tests.unit.http.test_encodings import ENCODERS
from tests.unit.http.test_events import Commits

TYPE = {b"host": b"x", b"content-type": b"application/x-ndjson"}
TOKEN = {**TYPE, b"authorization": b"Bearer s3cret"}


def line(n: int, value: object = 1) -> bytes:
    return b'{"topic":"orders","value":%b,"idempotency_key":"k%d"}\n' % (json.dumps(value).encode(), n)


class Slowly(Commits):
    """Commits a chunk when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Semaphore(0)
        self.chunks: list[int] = []

    async def submit_chunk(self, chunk: BatchChunk) -> list[WriteResult]:
        self.chunks.append(len(chunk.events))
        await self.go_on.acquire()
        return await super().submit_chunk(chunk)


class Wire:
    """An ASGI server with one request, whose client the test is."""

    def __init__(
        self,
        admission: Any = None,
        headers: dict[bytes, bytes] = TYPE,
        version: str = "1.1",
        client: str | None = None,
        rate: float | None = None,
        rate_bytes: float | None = None,
        certificate: Names | None = None,
        **settings: int,
    ) -> None:
        digest = hashlib.sha256(b"s3cret").hexdigest()
        rule = CallerRule("shop", (digest,), rate=rate, rate_bytes=rate_bytes, certificates=("dns:shop",))
        rules = [rule] if rate or rate_bytes or certificate else []
        self.callers = Callers(rules)
        admission = admission or Commits()
        guard = RequestGuard(Settings(**cast(Any, settings)), self.callers)
        self.posts = EventsEndpoint(guard, cast(Admission, admission), Telemetry(), Settings().key_ttl_s)
        self.coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.asked = 0  # how often the app has asked for a message
        self.sent: list[dict[str, Any]] = []
        self.reads = asyncio.Event()  # the client reads what it is sent
        self.reads.set()
        scope: dict[str, object] = {
            "type": "http",
            "http_version": version,
            "client": client and (client, 1),
            "headers": [*headers.items()],
        }
        if certificate is not None:
            scope[SCOPE_KEY] = certificate
        endpoint = StreamEndpoint(self.posts.guard, self.posts.admission, self.posts.telemetry, lines_exchange)
        self.serving = asyncio.create_task(endpoint(scope, cast(Any, self.receive), self.send))

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        return await self.coming.get()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    def say(self, body: bytes, more: bool = True) -> None:
        self.coming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.coming.put_nowait({"type": "http.disconnect"})

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def over(self) -> list[dict[str, Any]]:
        """Await the end of the response; returns its lines. The stream holds nothing any more."""
        async with asyncio.timeout(10.0):
            await self.serving
        assert self.posts.guard.bodies.bytes == 0
        return self.lines

    @property
    def status(self) -> int:
        return cast(int, self.sent[0]["status"])

    @property
    def head(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def lines(self) -> list[dict[str, Any]]:
        body = b"".join(message["body"] for message in self.sent[1:])
        assert body.endswith(b"\n") or not body or self.status != 207
        return [json.loads(text) for text in body.splitlines()]

    @property
    def statuses(self) -> list[int]:
        return [each["status"] for each in self.lines]

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body", None) is False


# ------------------------------------------------------------------------------------------------- events and results


async def test_each_event_has_its_result_before_the_next_one_is_sent() -> None:
    wire = Wire()
    for n in range(5):
        wire.say(line(n))
        await wire.until(lambda n=n: len(wire.sent) > 1 and len(wire.lines) == n + 1)  # type: ignore[misc]
    wire.say(b"", more=False)
    assert [each["status"] for each in await wire.over()] == [201] * 5
    assert (wire.status, wire.head) == (207, {b"content-type": b"application/x-ndjson"})
    assert wire.is_complete


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
async def test_results_are_in_the_order_of_the_lines_in_whatever_parts_these_come(size: int) -> None:
    body = (
        b"\r\n"
        + line(1)
        + b"\n  \n"
        + b"{\n"
        + line(2).replace(b"\n", b"\r\n")
        + b'{"topic":"orders"}\n'
        + line(3)[:-1]
    )
    wire = Wire()
    for start in range(0, len(body), size):
        wire.say(body[start : start + size])
    wire.say(b"", more=False)
    results = await wire.over()
    assert wire.statuses == [201, 400, 201, 400, 201]
    assert [result.get("idempotency_key") for result in results] == ["k1", None, "k2", None, "k3"]
    assert [result["problem"]["code"] for result in results if "problem" in result] == ["invalid-json", "missing-key"]


async def test_a_line_that_is_too_long_fails_alone() -> None:
    wire = Wire()
    for body in (line(1), b'{"topic":"', *[b"x" * 500_000] * 5, b'"}\n' + line(2)):
        wire.say(body)
    wire.say(b"", more=False)
    results = await wire.over()
    assert wire.statuses == [201, 413, 201]
    assert [result.get("idempotency_key") for result in results] == ["k1", None, "k2"]
    assert results[1]["problem"]["code"] == "too-large"


async def test_a_long_line_is_an_event_too() -> None:
    wire = Wire()
    text = line(1, "x" * 900_000)
    for start in range(0, len(text), 65_536):
        wire.say(text[start : start + 65_536])
    wire.say(b"", more=False)
    (result,) = await wire.over()
    assert (result["status"], result["idempotency_key"]) == (201, "k1")


async def test_a_repeated_key_is_replayed_also_in_a_later_window() -> None:
    world = World()
    serving = world.serve(await world.slot())
    wire = Wire(world.admission)
    wire.say(line(1) + line(2) + line(1))
    await wire.until(lambda: len(wire.sent) > 1 and len(wire.lines) == 3)
    wire.say(line(2) + line(2, "another"), more=False)
    results = await wire.over()
    assert wire.statuses == [201, 201, 201, 201, 422]
    assert [result.get("replayed") for result in results] == [False, False, True, True, None]
    assert world.keys_written() == [["k1", "k2"]]
    await ended(serving)


async def test_events_that_are_there_are_written_together() -> None:
    admission = Slowly()
    wire = Wire(admission)
    wire.say(b"".join(map(line, range(600))))
    wire.say(b"".join(map(line, range(600, 1_500))), more=False)
    await wire.until(lambda: bool(admission.chunks))
    admission.go_on.release()
    admission.go_on.release()
    await wire.over()
    assert admission.chunks == [1_000, 500]


async def test_a_coded_stream_that_breaks_off_ends_behind_its_last_result() -> None:
    body = b"".join(line(n, "x" * 100) for n in range(5_000))  # four blocks of zstd
    for coding, encode in ENCODERS.items():
        coded = encode(body)
        for what, code in (
            (coded[: len(coded) // 2], "invalid-encoding"),
            (coded[: len(coded) // 2] + b"nonsense" * 1_000, "invalid-encoding"),
            (coded + b"garbage", "invalid-encoding"),
            (coded + encode(b"\n" * 50_000_000), "invalid-encoding" if coding == "deflate" else "too-large"),
        ):
            wire = Wire(headers={**TYPE, b"content-encoding": coding.encode()})
            for start in range(0, len(what), 10_000):
                wire.say(what[start : start + 10_000])
            wire.say(b"", more=False)
            results = await wire.over()
            assert wire.is_complete
            assert results[-1]["problem"]["code"] == code
            assert {result["status"] for result in results[:1_000]} == {201}
            assert {result["status"] for result in results[:-1]} <= {201, 400}  # nonsense may decode to lines
            assert 1_000 < len(results) <= 5_001


@pytest.mark.parametrize("coding", ENCODERS)
async def test_lines_of_a_coded_stream_are_answered_as_they_come(coding: str) -> None:
    wire = Wire(headers={**TYPE, b"content-encoding": coding.encode()})
    if coding == "zstd":
        encoder: Any = zstd.ZstdCompressor()
        flush = encoder.FLUSH_BLOCK
        parts = [encoder.compress(line(n), mode=flush) for n in range(3)] + [encoder.flush()]
    else:
        encoder = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
        parts = [encoder.compress(line(n)) + encoder.flush(zlib.Z_SYNC_FLUSH) for n in range(3)] + [encoder.flush()]
    for n, part in enumerate(parts[:3]):
        wire.say(part)
        await wire.until(lambda n=n: len(wire.sent) > 1 and len(wire.lines) == n + 1)  # type: ignore[misc]
    wire.say(parts[3], more=False)
    await wire.over()
    assert wire.statuses == [201] * 3
    assert wire.is_complete


@pytest.mark.parametrize(
    ("coding", "body", "status", "code"),
    [
        (b"gzip", line(1), 400, "invalid-encoding"),
        (b"zstd", b"", 400, "invalid-encoding"),
        (b"deflate", zlib.compress(b"\n \n"), 400, "invalid-event"),
        (b"gzip, gzip", b"", 415, "unsupported-encoding"),
        (b"zstd", zstd.compress(b"\n" * 50_000_000), 413, "too-large"),
    ],
)
async def test_a_coded_stream_without_an_event_is_refused_by_its_status(
    coding: bytes, body: bytes, status: int, code: str
) -> None:
    wire = Wire(headers={**TYPE, b"content-encoding": coding})
    wire.say(body, more=False)
    (problem,) = await wire.over()
    assert (wire.status, problem["code"]) == (status, code)


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        (TYPE, b"", 400, "invalid-event"),
        (TYPE, b"\n \r\n\n", 400, "invalid-event"),
        ({**TYPE, b"content-type": b"application/x-ndjson; charset=latin-1"}, line(1), 415, "unsupported-media-type"),
        ({**TYPE, b"content-encoding": b"br"}, line(1), 415, "unsupported-encoding"),
        ({**TYPE, b"transfer-encoding": b"gzip, chunked"}, line(1), 501, "unsupported-coding"),
        ({b"content-type": b"application/x-ndjson"}, line(1), 400, "invalid-http"),
    ],
)
async def test_what_concerns_the_whole_request_is_refused_by_its_status(
    headers: dict[bytes, bytes], body: bytes, status: int, code: str
) -> None:
    wire = Wire(headers=headers)
    wire.say(body, more=False)
    (problem,) = await wire.over()
    assert (wire.status, problem["code"]) == (status, code)
    assert wire.head[b"content-type"] == b"application/problem+json"
    assert (b"accept-encoding" in wire.head) is (code == "unsupported-encoding")
    assert int(wire.head[b"content-length"]) == len(wire.sent[1]["body"])


async def test_callers_and_addresses_are_checked() -> None:
    for wire, status in (
        (Wire(client="10.0.0.1"), 403),
        (Wire(client="127.0.0.1"), 207),
        (Wire(rate=1_000.0), 401),
        (Wire(rate=1_000.0, headers=TOKEN), 207),
    ):
        wire.say(line(1), more=False)
        await wire.over()
        assert wire.status == status


async def test_a_body_that_the_client_asked_about_and_nobody_wants_ends_the_connection() -> None:
    """RFC 9110, section 10.1.1: what comes next may be the body, or another request."""
    wire = Wire(headers={**TYPE, b"expect": b"100-continue", b"content-encoding": b"br"})
    await wire.over()
    assert (wire.status, wire.head[b"connection"], wire.asked) == (415, b"close", 0)
    wire = Wire(headers={**TYPE, b"expect": b"100-continue"})
    wire.say(b"", more=False)
    await wire.over()
    assert (wire.status, b"connection" in wire.head) == (400, False)


@pytest.mark.parametrize("error", [ZeroDivisionError, TimeoutError])
async def test_a_bug_is_answered_500_or_ends_the_connection(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    admission = Commits()
    wire = Wire(admission)
    wire.say(line(0))
    await wire.until(lambda: wire.statuses == [201])
    monkeypatch.setattr(admission, "new_chunk", fail)
    wire.say(line(1), more=False)
    await wire.over()
    assert (wire.status, wire.statuses, wire.is_complete) == (207, [201], False)
    monkeypatch.setattr(lines_module, "media_type", fail)
    wire = Wire()
    wire.say(line(1), more=False)
    (problem,) = await wire.over()
    assert (wire.status, problem["code"]) == (500, "internal")


# ------------------------------------------------------------------------------------------------------------- bounds


async def test_no_more_is_read_while_events_are_written() -> None:
    admission = Slowly()
    wire = Wire(admission)
    for start in range(0, 5_000, 500):
        wire.say(b"".join(map(line, range(start, start + 500))))
    await wire.until(lambda: bool(admission.chunks))
    await asyncio.sleep(0.02)
    assert wire.asked <= 3  # a window of 1,000 events, and perhaps the next message
    wire.serving.cancel()
    await asyncio.gather(wire.serving, return_exceptions=True)


async def test_no_more_is_read_from_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_response, "UNREAD_BYTES_MAX", 200_000)
    wire = Wire()
    wire.reads.clear()
    for start in range(0, 20_000, 500):
        wire.say(b"".join(map(line, range(start, start + 500))))
    await wire.until(lambda: wire.asked > 3)
    await asyncio.sleep(0.05)
    assert wire.asked < 10
    assert 0 < wire.posts.guard.bodies.bytes < 500_000
    wire.say(b"", more=False)
    wire.reads.set()
    assert len(await wire.over()) == 20_000
    assert set(wire.statuses) == {201}
    assert wire.is_complete


async def test_a_client_that_never_reads_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_response, "UNREAD_BYTES_MAX", 10_000)
    monkeypatch.setattr(streamed_response, "UNREAD_MAX_S", 0.1)
    for lasts in (True, False):  # also one that has sent all
        wire = Wire()
        wire.reads.clear()
        wire.say(b"".join(map(line, range(1_000))), more=lasts)
        assert await wire.over() == []
        assert not wire.is_complete


async def test_results_for_a_client_that_was_cut_while_it_sent_nothing_end_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for room when the sending fails; later nobody would end the wait for it."""
    monkeypatch.setattr(streamed_response, "UNREAD_BYTES_MAX", 10_000)
    monkeypatch.setattr(streamed_response, "UNREAD_MAX_S", 0.05)
    wire = Wire()
    wire.reads.clear()
    wire.say(line(0))
    await asyncio.sleep(0.2)
    wire.say(b"".join(map(line, range(1, 1_000))))
    assert await wire.over() == []


async def test_a_stream_that_waits_for_its_rate_ends_when_the_process_stops() -> None:
    wire = Wire(headers=TOKEN, rate=0.05)
    wire.say(line(0))
    wire.say(line(1))
    await wire.until(lambda: wire.statuses == [201])
    wire.posts.guard.stopping.set()
    results = await wire.over()
    assert [result["status"] for result in results] == [201, 503]
    assert results[1]["problem"]["detail"].startswith("this process is stopping")


async def test_a_stream_that_waits_for_its_rate_ends_when_the_client_leaves() -> None:
    wire = Wire(headers=TOKEN, rate=0.05)
    wire.say(line(0))
    wire.say(line(1))
    await wire.until(lambda: wire.statuses == [201])
    wire.leave()
    assert len(await wire.over()) == 1


async def test_bodies_that_fill_the_memory_of_all_fail_by_themselves() -> None:
    wire = Wire()
    wire.posts.guard.bodies.bytes = taken = wire.posts.guard.bodies.most - 1_000
    long = line(1, "x" * 2 * OWN_BYTES)
    for body in (line(0), *[long[start : start + 20_000] for start in range(0, len(long), 20_000)], line(2)):
        wire.say(body)
    wire.say(b"", more=False)
    await wire.serving
    assert wire.posts.guard.bodies.bytes == taken
    assert wire.statuses == [201, 503, 201]
    assert wire.lines[1]["problem"]["code"] == "not-written"


async def test_a_decoder_without_memory_ends_the_stream_behind_its_last_result() -> None:
    """A 503 for no event would be taken for the result of the next one."""
    wire = Wire(headers={**TYPE, b"content-encoding": b"zstd"})
    wire.posts.guard.bodies.bytes = taken = wire.posts.guard.bodies.most - 1_000
    coder = zstd.ZstdCompressor()
    for body in (line(0), line(1) + b"\n" * 2 * OWN_BYTES):
        wire.say(coder.compress(body, zstd.ZstdCompressor.FLUSH_BLOCK))
    wire.say(coder.compress(line(2)) + coder.flush(), more=False)
    await wire.serving
    assert wire.posts.guard.bodies.bytes == taken
    assert wire.statuses == [201, 201, 503]
    assert "behind the last result" in wire.lines[2]["problem"]["detail"]


async def test_results_wait_for_a_client_when_the_memory_of_all_is_full() -> None:
    wire = Wire()
    wire.posts.guard.bodies.bytes = taken = wire.posts.guard.bodies.most - 1_000
    wire.reads.clear()
    for start in range(0, 5_000, 500):
        wire.say(b"".join(map(line, range(start, start + 500))))
    await asyncio.sleep(0.1)
    assert wire.asked < 6
    wire.say(b"", more=False)
    wire.reads.set()
    await wire.serving
    assert len(wire.lines) == 5_000
    assert wire.posts.guard.bodies.bytes == taken


async def test_http_1_0_gets_the_results_as_a_whole() -> None:
    wire = Wire(version="1.0", headers={b"content-type": TYPE[b"content-type"]})
    wire.say(b"".join(map(line, range(3))), more=False)
    await wire.over()
    assert (wire.status, wire.statuses) == (207, [201] * 3)
    assert int(wire.head[b"content-length"]) == len(wire.sent[1]["body"])


async def test_http_1_0_gets_no_more_than_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_response, "UNREAD_BYTES_MAX", OWN_BYTES)
    wire = Wire(version="1.0")
    for start in range(0, 5_000, 500):
        wire.say(b"".join(map(line, range(start, start + 500))))
    results = await wire.over()
    assert 500 < len(results) < 2_000
    assert wire.statuses[-2:] == [201, 413]
    detail = results[-1]["problem"]["detail"]
    assert "HTTP/1.0" in detail
    assert detail.endswith(f"use HTTP/1.1: {module.REST_NOT_WRITTEN}: send the rest again"), (
        "each line has a key of its own"
    )


async def test_http_1_0_is_told_to_send_the_rest_again_when_the_memory_of_all_is_full() -> None:
    """413 would be final, though there is room at another time."""
    wire = Wire(version="1.0")
    wire.posts.guard.bodies.bytes = taken = wire.posts.guard.bodies.most - 1_000
    for start in range(0, 5_000, 500):
        wire.say(b"".join(map(line, range(start, start + 500))))
    await wire.serving
    assert 500 < len(wire.lines) < 2_000
    assert wire.statuses[-2:] == [201, 503]
    assert wire.lines[-1]["problem"]["code"] == "not-written"
    assert wire.posts.guard.bodies.bytes == taken


async def test_cutting_and_answering_many_lines_yields_to_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.core.time_slice.SLICE_S", 0.0)
    wire = Wire()
    wire.say(b"1\n" * 900, more=False)
    with Turns() as turns:
        await wire.over()
    assert wire.statuses == [400] * 900
    assert turns.count > 1_800


# --------------------------------------------------------------------------------------------------------------- time


async def test_a_client_that_falls_silent_is_told_behind_the_last_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_body, "SILENCE_MAX_S", 0.1)
    wire = Wire()
    wire.say(line(1) + line(2)[:20])
    results = await wire.over()
    assert wire.statuses == [201, 408]
    assert results[-1]["problem"]["code"] == "request-timeout"
    assert wire.is_complete


async def test_a_client_that_sends_nothing_is_answered_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_body, "SILENCE_MAX_S", 0.1)
    wire = Wire()
    (problem,) = await wire.over()
    assert (wire.status, wire.head[b"connection"], problem["code"]) == (408, b"close", "request-timeout")


async def test_a_line_has_the_time_of_a_request_and_a_stream_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_body, "SILENCE_MAX_S", 0.2)
    monkeypatch.setattr(streamed_body, "LEAST_BYTES_S", 10_000)
    wire = Wire()
    for n in range(4):  # 0.4 s in all, and each line in half of its time
        text = line(n)
        for part in (text[:20], text[20:] + b" \n"):
            wire.say(part)
            await asyncio.sleep(0.05)
    await wire.until(lambda: wire.statuses == [201] * 4)
    for n in range(100):
        if wire.serving.done():
            break
        wire.say(b"%d" % (n % 10))
        await asyncio.sleep(0.01)
    results = await wire.over()
    assert wire.statuses == [201] * 4 + [408]
    assert "10000 bytes a second" in results[-1]["problem"]["detail"]


async def test_blank_lines_keep_a_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_body, "SILENCE_MAX_S", 0.1)
    wire = Wire()
    wire.say(line(0))
    for _ in range(6):
        await asyncio.sleep(0.05)
        wire.say(b"\n")
    wire.say(line(1), more=False)
    await wire.over()
    assert wire.statuses == [201, 201]


@pytest.mark.parametrize(("ends_frame", "statuses"), [(False, [201, 408]), (True, [201, 201])])
async def test_blank_lines_do_not_keep_a_window(
    monkeypatch: pytest.MonkeyPatch, ends_frame: bool, statuses: list[int]
) -> None:
    monkeypatch.setattr(streamed_body, "IDLE_WINDOW_MAX_S", 0.1)
    wire = Wire(headers={**TYPE, b"content-encoding": b"zstd"})
    coder = zstd.ZstdCompressor()
    mode: Literal[1, 2] = zstd.ZstdCompressor.FLUSH_FRAME if ends_frame else zstd.ZstdCompressor.FLUSH_BLOCK
    wire.say(coder.compress(line(0) + b"\n" * 2 * OWN_BYTES, mode))
    for _ in range(4):
        await asyncio.sleep(0.05)
        wire.say(coder.compress(b"\n", mode))
    wire.say(coder.compress(line(1), zstd.ZstdCompressor.FLUSH_FRAME), more=False)
    await wire.over()
    assert wire.statuses == statuses


async def test_a_stream_that_waits_for_its_client_does_not_keep_its_last_window() -> None:
    """Blank lines keep a stream open for any time, and the memory of its window counts as free by then."""
    wire = Wire()
    lines = [line(n, "x of the window") for n in range(20)]
    wire.say(b"".join(lines))
    await wire.until(lambda: wire.asked == 2 and len(wire.lines) == 20)
    first = lines[0][:-1]
    lists = [each for each in gc.get_objects() if type(each) is list and each and type(each[0]) is bytes]
    assert not [each for each in lists if each[0] == first]
    wire.say(b"", more=False)
    await wire.over()


@pytest.mark.parametrize("begun", [b"", line(2)[:10]])
async def test_a_client_that_leaves_ends_its_stream(begun: bytes) -> None:
    wire = Wire()
    wire.say(line(1) + begun)
    await wire.until(lambda: len(wire.sent) == 2)
    wire.leave()
    assert len(await wire.over()) == 1
    assert not wire.is_complete


async def test_a_stop_of_the_process_ends_a_stream_behind_its_last_result() -> None:
    wire = Wire()
    wire.say(line(1))
    await wire.until(lambda: len(wire.sent) == 2)
    wire.posts.guard.stopping.set()
    results = await wire.over()
    assert wire.statuses == [201, 503]
    assert "stopping" in results[-1]["problem"]["detail"]
    assert wire.is_complete
    late = Wire()
    late.posts.guard.stopping.set()
    late.say(line(1), more=False)
    await late.over()
    assert late.status == 503


async def test_a_stop_signal_keeps_no_futures() -> None:
    stopping = StopSignal()
    for _ in range(10):
        stopping.future().cancel()
    kept = stopping.future()
    await asyncio.sleep(0)
    assert stopping._waiting == {kept}
    stopping.set()
    await kept
    assert stopping.future().done()


async def test_a_cancelled_stream_holds_nothing() -> None:
    """Some servers cancel the request of a client that has disconnected."""
    wire = Wire()
    wire.say(line(1) + b"x" * 2 * OWN_BYTES)
    await wire.until(lambda: len(wire.sent) == 2 and wire.posts.guard.bodies.bytes > 0)
    wire.serving.cancel()
    await asyncio.gather(wire.serving, return_exceptions=True)
    assert wire.posts.guard.bodies.bytes == 0
    await asyncio.sleep(0)
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------------------- rates, overload


@pytest.mark.parametrize("unit", ["rate", "rate_bytes"])
async def test_a_stream_over_its_caller_s_rate_waits(unit: str) -> None:
    """The bucket takes a window whole, so that the third one waits for the debt of the second one."""
    body = b"".join(map(line, range(1_000)))
    wire = Wire(headers=TOKEN, **cast(Any, {unit: 0.4 * (1_000 if unit == "rate" else len(body))}))
    started = time.monotonic()
    wire.say(body, more=False)
    await wire.over()
    assert wire.statuses == [201] * 1_000
    assert 0.9 < time.monotonic() - started < 5.0


async def test_a_stream_that_would_wait_too_long_ends_with_a_problem() -> None:
    wire = Wire(headers=TOKEN, rate=0.001)
    wire.say(line(1) + line(2), more=False)
    results = await wire.over()
    assert wire.statuses == [201, 429]
    assert results[-1]["problem"]["code"] == "rate-limited"


async def test_a_caller_past_its_rate_is_refused_before_its_body_is_read() -> None:
    wire = Wire(headers=TOKEN, rate=1.0)
    wire.callers.of("Bearer s3cret").spend(5, 0)
    await wire.over()
    assert (wire.status, wire.asked) == (429, 0)
    assert int(wire.head[b"retry-after"]) >= 4


@pytest.mark.parametrize(("headers", "statuses"), [(TYPE, [201, 401]), (TOKEN, [201, 201])])
async def test_a_stream_ends_with_the_certificate_that_names_its_caller(
    headers: dict[bytes, bytes], statuses: list[int]
) -> None:
    certificate = Names({"dns:shop"})
    wire = Wire(headers=headers, certificate=certificate)
    wire.say(line(1))
    await wire.until(lambda: len(wire.sent) > 1)
    certificate.expires_s = 1.0
    wire.say(line(2), more=False)
    await wire.over()
    assert wire.statuses == statuses


async def test_a_stream_waits_for_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = Commits()
    admission.overload = Problem(NOT_WRITTEN, "the queue is full")
    wire = Wire(admission)
    wire.say(line(1), more=False)
    await asyncio.sleep(0.1)
    assert wire.sent == []
    admission.overload = None
    await wire.over()
    assert wire.statuses == [201]
    monkeypatch.setattr(module, "OVERLOAD_WAIT_S", 0.1)
    admission.overload = Problem(NOT_WRITTEN, "the queue is full")
    wire = Wire(admission)
    wire.say(line(1), more=False)
    await wire.over()  # the queue itself decides then
    assert wire.statuses == [201]
