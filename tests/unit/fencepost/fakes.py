"""A service in memory, which answers httpx as the real one does, and whose connections fail as a test says."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from service.core.problems import (
    FINGERPRINT_MISMATCH,
    IN_PROGRESS,
    KEY_EXPIRED,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    UNAUTHORIZED,
    UNKNOWN_TOPIC,
    Kind,
    Problem,
)

# What happens to a request; "ok" without any.
CONNECT, LOST, CUT, UNKNOWN = "no connection", "lost before it is read", "cut before the answer", "written, but 504"
CUT_AMID = "cut amid the answer"
FAULTS = [CONNECT, LOST, CUT, CUT_AMID, UNKNOWN, "503", "429", "409", "ok"]
REFUSED: dict[str, Kind] = {"503": NOT_WRITTEN, "429": RATE_LIMITED, "409": IN_PROGRESS, "401": UNAUTHORIZED}

RETENTION_S = 86_400
EXPIRED, UNKNOWN_NAME = "expired", "unknown"  # a key, and a topic, that are refused


class FakeService:
    """`written` has the values of the records, in their order. It keeps keys for RETENTION_S, by its `clock`."""

    def __init__(self, faults: Iterable[str] = (), clock: "FakeTime | None" = None) -> None:
        self.faults = iter(faults)
        self.clock = clock or FakeTime()
        self.requests: list[httpx.Request] = []
        self.written: list[Any] = []
        self.places: dict[str, tuple[bytes, dict[str, object]]] = {}

    @property
    def copies(self) -> Counter[str]:
        return Counter(json.dumps(value) for value in self.written)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, as a handler of httpx.MockTransport."""
        self.requests.append(request)
        fault = next(self.faults, "ok")
        if fault == CONNECT:
            raise httpx.ConnectError("refused", request=request)
        if fault == LOST:
            raise httpx.ReadTimeout("no answer", request=request)
        if kind := REFUSED.get(fault):
            return problem_response(kind)
        response = self._batch(request, fault) if request.url.path == "/events/batch" else self._single(request)
        if fault == CUT:
            raise httpx.RemoteProtocolError("cut", request=request)
        return problem_response(OUTCOME_UNKNOWN) if fault == UNKNOWN else response

    def _single(self, request: httpx.Request) -> httpx.Response:
        key = json.loads(request.headers["idempotency-key"])  # quoted
        first_sent = request.headers.get("repeatability-first-sent")
        is_old = first_sent is not None and self._age_s(first_sent) > RETENTION_S
        result = result_of(KEY_EXPIRED) if is_old and key not in self.places else self._write(key, request.content)
        if "problem" in result:
            return httpx.Response(result["status"], json=result["problem"])
        headers = {"idempotent-replayed": "true"} if result.pop("replayed") else {}
        return httpx.Response(result.pop("status"), json=result, headers=headers)

    def _age_s(self, first_sent: str) -> float:
        return self.clock.now - parsedate_to_datetime(first_sent).timestamp()

    def _batch(self, request: httpx.Request, fault: str) -> httpx.Response:
        assert request.headers["content-type"] == "application/x-ndjson"
        results = []
        for line in request.content.splitlines():
            event = json.loads(line)
            body = line[: line.rindex(b',"idempotency_key":')] + b"}"
            key = event["idempotency_key"]
            results.append({**self._write(key, body), "idempotency_key": key})
        text = "".join(f"{json.dumps(result)}\n" for result in results).encode()
        if fault == CUT_AMID:
            return httpx.Response(207, stream=Broken(text[: len(text) // 2], request))
        return httpx.Response(207, content=text)

    def _write(self, key: str, body: bytes) -> dict[str, Any]:
        event = json.loads(body)
        if event["topic"] == UNKNOWN_NAME:
            return result_of(UNKNOWN_TOPIC)
        if key == EXPIRED:
            return result_of(KEY_EXPIRED)
        known = key in self.places
        if not known:
            place = {"id": key, "topic": event["topic"], "partition": 0, "offset": len(self.written), "timestamp": 1}
            self.places[key] = body, place
            self.written.append(event.get("value", event.get("value_base64")))
        before, place = self.places[key]
        return result_of(FINGERPRINT_MISMATCH) if before != body else {"status": 201, **place, "replayed": known}


class Broken(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that ends before its end."""

    def __init__(self, text: bytes, request: httpx.Request) -> None:
        self._text, self._request = text, request

    def __iter__(self) -> Iterator[bytes]:
        yield self._text
        raise httpx.RemoteProtocolError("incomplete chunked read", request=self._request)

    async def __aiter__(self) -> Any:
        for part in self:
            yield part


def result_of(kind: Kind) -> dict[str, Any]:
    return {"status": kind.status, "problem": Problem(kind, "topic: as the test says").body()}


def problem_response(kind: Kind) -> httpx.Response:
    headers = {} if kind.retry_after_s is None else {"retry-after": str(kind.retry_after_s)}
    return httpx.Response(kind.status, json=result_of(kind)["problem"], headers=headers)


class FakeTime:
    """The module `time`, as far as the client uses it: a pause takes no time, and is noted."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def asyncio_sleep(self, seconds: float) -> None:
        self.sleep(seconds)
