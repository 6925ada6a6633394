"""Clients that log their requests and answers, so that the judge can compare these with the topics."""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

import httpx

# The four outcomes of an attempt, by Jepsen's names; `busy`: another attempt is in progress, and nothing is known of
# this one.
Kind = Literal["ok", "fail", "info", "busy"]

AGAIN_S: Final = 0.05  # Retry-After says a second; a test waits for less


@dataclass(frozen=True)
class Asked:
    """One event of a client. `value` is the JSON text."""

    key: str
    topic: str
    value: bytes
    record_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    partition: int | None = None

    def body(self) -> bytes:
        fields: dict[str, object] = {"topic": self.topic}
        if self.record_key is not None:
            fields["key"] = self.record_key
        if self.headers:
            fields["headers"] = dict(self.headers)
        if self.partition is not None:
            fields["partition"] = self.partition
        return json.dumps(fields).encode()[:-1] + b', "value": ' + self.value + b"}"


@dataclass
class Attempt:
    """One request. It is `info` until its answer says more."""

    asked: Asked
    kind: Kind = "info"
    status: int = 0
    code: str = ""
    body: bytes = b""
    replayed: bool = False

    @property
    def place(self) -> tuple[str, int, int]:
        metadata = json.loads(self.body)
        return metadata["topic"], metadata["partition"], metadata["offset"]


class Client:
    """Sends events to processes of the service and keeps a history of all attempts."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.history: list[Attempt] = []
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
        self.http = httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def post(self, url: str, asked: Asked) -> Attempt:
        """Send a request once; the attempt is logged before."""
        attempt = Attempt(asked)
        self.history.append(attempt)
        headers = {"Content-Type": "application/json", "Idempotency-Key": asked.key}
        try:
            response = await self.http.post(f"{url}/events", content=asked.body(), headers=headers)
        except httpx.ConnectError:
            attempt.kind = "fail"  # nothing was sent
        except httpx.TransportError:
            attempt.kind = "info"
        else:
            note(attempt, response)
        return attempt

    async def settle(self, urls: Sequence[str], asked: Asked, timeout_s: float = 40.0) -> Attempt:
        """Send an event again, to any of the processes, until it is answered 201."""
        deadline = time.monotonic() + timeout_s
        while True:
            attempt = await self.post(random.choice(urls), asked)
            if attempt.kind == "ok":
                return attempt
            assert attempt.kind != "fail" or attempt.status in (0, 503), (
                f"refused: {attempt.status} {attempt.body.decode()}"
            )
            assert time.monotonic() < deadline, f"not settled in {timeout_s} s: {attempt}"
            await asyncio.sleep(AGAIN_S)

    async def load(
        self, urls: Sequence[str], asked: Sequence[Asked], workers: int = 8, pace_s: float = 0.0
    ) -> list[Attempt]:
        """Settle all of the events, several at a time."""
        waiting = list(reversed(asked))
        settled: list[Attempt] = []

        async def work() -> None:
            while waiting:
                settled.append(await self.settle(urls, waiting.pop()))
                await asyncio.sleep(pace_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
        return settled


def note(attempt: Attempt, response: httpx.Response) -> None:
    """Return the outcome of an attempt by its answer."""
    attempt.status, attempt.body = response.status_code, response.content
    if response.status_code == 201:
        attempt.kind = "ok"
        attempt.replayed = response.headers.get("idempotent-replayed") == "true"
        return
    attempt.code = response.json()["code"]
    if response.status_code in (409, 504):
        attempt.kind = "busy" if response.status_code == 409 else "info"
    elif response.status_code < 500 or attempt.code == "not-written":
        attempt.kind = "fail"


def events(topic: str, count: int, prefix: str = "k") -> list[Asked]:
    """Make distinct events for a topic."""
    return [
        Asked(
            f"{prefix}-{number}", topic, b'{"n": %d, "of": "%s"}' % (number, prefix.encode()), record_key=f"r{number}"
        )
        for number in range(count)
    ]
