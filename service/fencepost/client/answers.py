"""Requests to the service, and what its answers say of each event. No I/O.

Sources: RFC 9457 (problems), draft-ietf-httpapi-idempotency-key-header-07 (keys), RFC 9110, section 10.2.3
(Retry-After), OASIS Repeatable Requests 1.0 (Repeatability-First-Sent), and the tables of answers in README.md and
service/README.md.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Final

import httpx

from .events import (
    KeyExpired,
    KeyReused,
    NotAccepted,
    Pending,
    Refused,
    StaleMember,
    Unsettled,
    Written,
    WrittenBatch,
)

# The events of one request. Their results (some 250 bytes each, a problem up to 1,800) are fewer than the 4 MiB that
# the service holds for a client that reads only when it has sent all.
PAGE_EVENTS: Final = 500
PAGE_BYTES: Final = 1024 * 1024
# A longer answer is not one of the service.
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024

CREATED: Final = 201
MULTI_STATUS: Final = 207
NO_ANSWER: Final = 0
RETRIED: Final = frozenset({NO_ANSWER, 408, 409, 429, 500, 502, 503, 504})
# Codes of retried problems that exclude that their own request has written the event.
NOTHING_WRITTEN: Final = frozenset(
    {"no-connection", "not-written", "rate-limited", "request-timeout", "store-incomplete"}
)
# Statuses and codes that refuse the event. Other ones of 4xx and 5xx refuse the request, whatever its event.
OF_EVENT: Final = frozenset({400, 412, 413, 422, "forbidden-topic", "forbidden-group", "stale-member", "unknown-topic"})
# The code of the one 409 that a retry does not change: the member of a group has been replaced.
STALE_MEMBER: Final = "stale-member"
_REFUSALS: Final[Mapping[str, type[Refused]]] = {
    "key-expired": KeyExpired,
    "fingerprint-mismatch": KeyReused,
    STALE_MEMBER: StaleMember,
}
_DETAIL_CHARS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an event has no 201. `code` is empty if the answer is not one of the service; `of_batch`: it is for all."""

    status: int
    code: str
    detail: str
    of_batch: bool = False

    @property
    def is_retried(self) -> bool:
        return self.status in RETRIED and self.code != STALE_MEMBER

    @property
    def leaves_doubt(self) -> bool:
        """Whether the request may have written the event."""
        return not self.code or (self.is_retried and self.code not in NOTHING_WRITTEN)

    def error(self, event: Pending, in_doubt: bool) -> Refused | Unsettled:
        """Make the error of an event; `in_doubt`: an attempt may have written it."""
        kind: type[Refused | Unsettled] = Unsettled if self.is_retried else NotAccepted
        refuses = self.code and not self.is_retried and not self.of_batch
        if refuses and not OF_EVENT.isdisjoint((self.status, self.code)):
            kind = _REFUSALS.get(self.code, Refused)
        return kind(event, self.status, self.code, self.detail, in_doubt or kind is KeyExpired)


UNSENT: Final = Problem(NO_ANSWER, "not-sent", "the deadline came before the first attempt")


@dataclass(slots=True)
class Answer:
    """A response as far as it has come until `stop_at` (of time.monotonic); `failure` says why it is not whole."""

    stop_at: float
    status: int = NO_ANSWER
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    failure: Problem | None = None

    def begin(self, response: httpx.Response) -> None:
        """Take status and headers."""
        self.status, self.headers = response.status_code, response.headers

    def take(self, chunk: bytes) -> bool:
        """Take a part of the body; whether to read on."""
        self.body += chunk
        if len(self.body) > ANSWER_BYTES_MAX or time.monotonic() > self.stop_at:
            self.failure = Problem(NO_ANSWER, "no-answer", f"the answer did not end in time ({len(self.body)} bytes)")
        return self.failure is None

    def fail(self, error: httpx.RequestError) -> None:
        """Note that the connection was not made, or has ended."""
        unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        code = "no-connection" if unsent else "no-answer"
        self.failure = Problem(NO_ANSWER, code, f"{type(error).__name__}: {error}")

    @property
    def retry_after_s(self) -> float:
        """The seconds of Retry-After, a number or a date; 0 without it."""
        raw = self.headers.get("retry-after", "")
        if raw.isdecimal():
            return float(raw)
        try:
            return max(0.0, parsedate_to_datetime(raw).timestamp() - time.time())
        except (OverflowError, ValueError):
            return 0.0


def request_of(events: Sequence[Pending]) -> dict[str, Any]:
    """Make the arguments of httpx's `stream`: `POST /events` for one event, NDJSON for several, JSON for a batch."""
    if len(events) > 1:
        lines = [b'%b,"idempotency_key":%b}\n' % (event.body[:-1], json.dumps(event.key).encode()) for event in events]
        headers = {"Content-Type": "application/x-ndjson"}
        return {"method": "POST", "url": "/events/batch", "headers": headers, "content": b"".join(lines)}
    (event,) = events
    quoted = event.key.replace("\\", "\\\\").replace('"', '\\"')
    headers = {"Content-Type": "application/json", "Idempotency-Key": f'"{quoted}"'}
    if event.stored_ms is not None:  # by this time the service finds that a key of any form may be forgotten
        headers["Repeatability-First-Sent"] = formatdate(event.stored_ms / 1000, usegmt=True)
    url = "/events/batch" if event.is_batch else "/events"
    return {"method": "POST", "url": url, "headers": headers, "content": event.body}


def verdicts(events: Sequence[Pending], answer: Answer) -> list[Written | WrittenBatch | Problem]:
    """Read what an answer says of each event of its request, in their order."""
    if answer.status == MULTI_STATUS and len(events) > 1:
        lines = bytes(answer.body).split(b"\n")[:-1]  # behind the last line feed is an incomplete line, or nothing
        found: list[Written | WrittenBatch | Problem] = [
            _of_line(event, _parsed(line)) for event, line in zip(events, lines, strict=False)
        ]
        missing = answer.failure or Problem(NO_ANSWER, "no-answer", "the answer has no result for this event")
        return found + [missing] * (len(events) - len(found))
    if answer.failure is not None:
        return [answer.failure] * len(events)
    content = _parsed(answer.body)
    if len(events) == 1:
        if (key := _key_of(answer)) is not None and key != events[0].key:
            return [_mixed_up(key)]
        replayed = answer.headers.get("idempotent-replayed") == "true"
        of = _verdict_of_batch if events[0].is_batch else _verdict
        return [of(events[0], answer.status, content, replayed)]
    return [replace(_problem(answer.status, content), of_batch=True)] * len(events)


def _mixed_up(key: object) -> Problem:
    detail = f"the answer is for another key, {key!r:.300}: something on the way mixes up answers"
    return Problem(NO_ANSWER, "no-answer", detail)


def _key_of(answer: Answer) -> str | None:
    """Read for which key an answer is, which may be quoted (RFC 8941, section 3.3.3); None if it does not say it."""
    key = answer.headers.get("idempotency-key")
    return re.sub(r"\\(.)", r"\1", key[1:-1]) if key is not None and key.startswith('"') else key


def _of_line(event: Pending, content: Any) -> Written | Problem:
    """Read the result of one event of a batch."""
    if not isinstance(content, dict) or not isinstance(content.get("status"), int):
        return Problem(NO_ANSWER, "no-answer", f"no result of an event: {content}"[:_DETAIL_CHARS_MAX])
    if (key := content.get("idempotency_key", event.key)) != event.key:  # earlier releases leave it out
        return _mixed_up(key)
    return _verdict(event, content["status"], content.get("problem", content), content.get("replayed") is True)


def _verdict(event: Pending, status: int, content: Any, replayed: bool) -> Written | Problem:
    """Read where an event was written, or why it was not."""
    if status != CREATED:
        return _problem(status, content)
    try:
        coordinates = content["topic"], content["partition"], content["offset"], content["timestamp"]
        return Written(event.key, content["id"], *coordinates, replayed)
    except (KeyError, TypeError):
        return _problem(status, content)


def _verdict_of_batch(batch: Pending, status: int, content: Any, replayed: bool) -> WrittenBatch | Problem:
    """Read where the events of an atomic batch were written, or why they were not."""
    if status != CREATED:
        return _problem(status, content)
    try:
        events = [_verdict(batch, status, result, replayed) for result in content["results"]]
        written = tuple(event for event in events if isinstance(event, Written))
        if len(written) == len(events):
            return WrittenBatch(batch.key, content["id"], written, replayed)
    except (KeyError, TypeError):
        pass
    return _problem(status, content)


def _problem(status: int, content: Any) -> Problem:
    """Read a problem; one without a code if the answer is not the service's, but that of a proxy."""
    try:
        if content["type"] == f"/problems/{content['code']}":
            return Problem(status, content["code"], content["detail"])
    except (KeyError, TypeError):
        pass
    return Problem(status, "", f"not an answer of Fencepost: {content}"[:_DETAIL_CHARS_MAX])


def _parsed(text: bytes | bytearray) -> Any:
    """Parse JSON; returns other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")
