"""The log of a client: its requests and their answers, one JSON object on each line, written before the client goes on.

`{"type": "invoke", "n": 7, "at": <s, monotonic>, "to": "service-0", "kind": "single|batch|atomic", "key": <of the
whole>, "events": [{"key", "topic", "record_key", "value": <JSON text>}]}` and then, with the same `n`, `{"type":
"answer", "n": 7, "at", "status": <0: no answer>, "body": <of a 201>, "results": [{"type": "ok|fail|info|busy",
"status", "code", "metadata": <the fields of a 201 as JSON text>, "replayed"}]}`: one result for each event. A request
without a second line is in doubt. `fail`: not written; `info`: not known; `busy` (409): nothing is known of this
attempt.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deploy.demo.http import Answer
from service.contract.wire.ids import event_id, member_id
from tests.integration.client import Asked, Attempt, Kind

RequestKind = Literal["single", "batch", "atomic"]

_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Request:
    """An HTTP request for one or more events. `key` is that of a single event or of an atomic batch."""

    kind: RequestKind
    events: tuple[Asked, ...]
    key: str = ""

    @property
    def path(self) -> str:
        return "/events" if self.kind == "single" else "/events/batch"

    @property
    def headers(self) -> Mapping[str, str]:
        return _JSON if self.kind == "batch" else {**_JSON, "Idempotency-Key": self.key}

    @property
    def body(self) -> bytes:
        if self.kind == "single":
            return self.events[0].body()
        bodies = [event.body() for event in self.events]
        if self.kind == "batch":
            bodies = [
                b'{"idempotency_key": %s, ' % json.dumps(event.key).encode() + body[1:]
                for event, body in zip(self.events, bodies, strict=True)
            ]
        atomic = b"true" if self.kind == "atomic" else b"false"
        return b'{"atomic": ' + atomic + b', "events": [' + b", ".join(bodies) + b"]}"

    @property
    def ids(self) -> list[bytes]:
        """The id of each event."""
        if self.kind == "atomic":
            return [member_id(self.key, index) for index in range(len(self.events))]
        return [event_id(event.key) for event in self.events]

    def encode(self) -> dict[str, Any]:
        events = [
            {"key": e.key, "topic": e.topic, "record_key": e.record_key, "value": e.value.decode()} for e in self.events
        ]
        return {"kind": self.kind, "key": self.key, "events": events}

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> "Request":
        events = tuple(Asked(e["key"], e["topic"], e["value"].encode(), e["record_key"]) for e in raw["events"])
        return cls(raw["kind"], events, raw["key"])


def single(asked: Asked) -> Request:
    return Request("single", (asked,), asked.key)


@dataclass(frozen=True)
class Result:
    """The result of one event of a request."""

    type: Kind
    status: int = 0
    code: str = ""
    metadata: str = ""  # the fields of its 201, as JSON text
    replayed: bool = False

    @property
    def final(self) -> bool:
        """Check whether the result is final, so that sending again changes nothing."""
        return self.type == "ok" or (self.type == "fail" and 400 <= self.status < 500)


@dataclass
class Try:
    """One request as the checker reads it. `answered_at` is infinite without an answer."""

    request: Request
    at: float
    answered_at: float = float("inf")
    body: str = ""
    results: list[Result] = field(default_factory=list)

    def attempts(self) -> Iterator[tuple[bytes, Attempt]]:
        """Return each event's id, with what the judge needs of one key."""
        results = self.results or [Result("info")] * len(self.request.events)
        for id, asked, result in zip(self.request.ids, self.request.events, results, strict=True):
            yield id, Attempt(asked, result.type, result.status, result.code, result.metadata.encode(), result.replayed)


class Log:
    """The log file of one client; each line is written to the kernel before `invoke` or `answer` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._n = 0

    def invoke(self, request: Request, to: str) -> int:
        self._n += 1
        self._line({"type": "invoke", "n": self._n, "at": time.monotonic(), "to": to, **request.encode()})
        return self._n

    def answer(self, n: int, status: int, results: Sequence[Result], body: str) -> None:
        line = {"type": "answer", "n": n, "at": time.monotonic(), "status": status, "body": body}
        self._line({**line, "results": [vars(result) for result in results]})

    def close(self) -> None:
        self._file.close()

    def _line(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def read(folder: Path) -> dict[str, list[Try]]:
    """Read every client's requests in order; a last line that a crash has cut off is left out."""
    return {path.stem: list(_tries(path)) for path in sorted(folder.glob("*.jsonl"))}


def _tries(path: Path) -> Iterator[Try]:
    tries: dict[int, Try] = {}
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        raw = json.loads(line)
        if raw["type"] == "invoke":
            tries[raw["n"]] = Try(Request.decode(raw), raw["at"])
        else:
            made = tries[raw["n"]]
            made.answered_at, made.body = raw["at"], raw["body"]
            made.results = [Result(**result) for result in raw["results"]]
    yield from tries.values()


def results_of(request: Request, answer: Answer) -> list[Result]:
    """Split an answer into the result of each event."""
    count = len(request.events)
    if answer.status == 201:
        replayed = answer.headers.get("idempotent-replayed") == "true"
        if request.kind == "single":
            return [Result("ok", 201, "", answer.body.decode(), replayed)]
        return [
            _result({**member, "status": 201, "replayed": replayed}) for member in json.loads(answer.body)["results"]
        ]
    if answer.status == 207:
        return [_result(each) for each in json.loads(answer.body)["results"]]
    return [_problem(answer.status, json.loads(answer.body)["code"])] * count


def _result(each: Mapping[str, Any]) -> Result:
    if each["status"] != 201:
        return _problem(each["status"], each["problem"]["code"])
    metadata = {name: each[name] for name in ("id", "topic", "partition", "offset", "timestamp")}
    return Result("ok", 201, "", json.dumps(metadata), each.get("replayed", False))


def _problem(status: int, code: str) -> Result:
    if status in (409, 504):
        return Result("busy" if status == 409 else "info", status, code)
    surely_not = status < 500 or code == "not-written"
    return Result("fail" if surely_not else "info", status, code)
