"""Sends lost events to Fencepost again, so that none can be written twice.

Each request has `Repeatability-First-Sent` (OASIS Repeatable Requests 1.0): the service refuses it with 412 if the key
may have been forgotten since. Under its own key an event was first sent when it was accepted; under its new key when
the first plan was stored that may have sent it. So a key that is remembered is replayed, a key that may have been
forgotten is refused, and only a key that was never written writes.

The client library (service.fencepost.client) retries in the same way, but is not called: applications install it, under
another name, and nothing that is installed here imports it (the import contracts in pyproject.toml).
"""

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx

from service.contract.wire.ids import event_id
from spark.errors import CannotRun
from spark.repair.bodies import Body
from spark.repair.entries import (
    EXPIRED,
    OTHER_CALLER,
    REFUSED,
    REPLAYED,
    UNSETTLED,
    WRITTEN,
    Coordinates,
    Entry,
    new_key,
)

DEADLINE_S: Final = 60.0
"""For one event with all its attempts."""
# The service answers within its FENCEPOST_REQUEST_TIMEOUT_MS, 10 s.
TIMEOUT: Final = httpx.Timeout(15.0, connect=5.0)
FIRST_PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0
RETRIED: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
# Codes that refuse one event; other ones of 401, 403 and 404 refuse every request.
_OF_EVENT: Final = frozenset({"forbidden-topic", "unknown-topic"})
_DETAIL_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """The last answer to an event: its status (0: none), its problem, or the id and the coordinates of the event."""

    status: int
    detail: str = ""
    id: str = ""
    written: Coordinates | None = None
    is_replay: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A service: its address, the file with the caller's token, and the file with the authorities of its certificate;
    empty for none."""

    url: str
    token_file: str = ""
    cafile: str = ""


@contextmanager
def opened(target: Target, transport: httpx.BaseTransport | None = None) -> Iterator[httpx.Client]:
    """Open a client of the service; CannotRun if a file cannot be read, or the address is none of HTTP."""
    headers = {"Content-Type": "application/json"}
    try:
        if target.token_file:
            headers["Authorization"] = f"Bearer {Path(target.token_file).read_text(encoding='ascii').strip()}"
        verify: Any = ssl.create_default_context(cafile=target.cafile) if target.cafile else True
    except (OSError, UnicodeDecodeError) as error:
        raise CannotRun(f"--token-file or --cafile: {error}") from None
    with httpx.Client(
        base_url=target.url, headers=headers, timeout=TIMEOUT, verify=verify, transport=transport
    ) as client:
        yield client


def send(client: httpx.Client, entry: Entry, *, new_keys: bool, now_ms: Callable[[], int]) -> Entry:
    """Send the event of an entry (entries.SEND), and return the entry with its outcome.

    The event is sent under its own key. If that cannot write it (REPLAYED, EXPIRED) and `new_keys`, it is sent under
    its new key, unless an earlier attempt under its own key may have written it. CannotRun if the service refuses every
    request.
    """
    assert entry.body is not None
    assert entry.accepted_ms is not None
    assert entry.first_sent_ms is not None
    done = _judged(entry, entry.body.key, _post(client, entry.body, entry.body.key, entry.accepted_ms))
    is_possible = done.outcome == REPLAYED or (done.outcome == EXPIRED and not entry.doubtful)
    if new_keys and is_possible:
        key = new_key(entry.id)
        done = _judged(entry, key, _post(client, entry.body, key, entry.first_sent_ms))
    return replace(done, ended_ms=now_ms())


def _judged(entry: Entry, key: str, answer: Answer) -> Entry:
    """Return an entry with the outcome that an answer to its event under a key has."""
    assert entry.body is not None
    done = replace(entry, sent_key=key, detail=answer.detail or None)
    if answer.written is None:
        outcome = EXPIRED if answer.status == httpx.codes.PRECONDITION_FAILED else REFUSED
        return replace(done, outcome=UNSETTLED if answer.status in (0, *RETRIED) else outcome)
    topic, partition, offset = answer.written
    done = replace(done, written_topic=topic, written_partition=partition, written_offset=offset)
    if answer.id != event_id(key, entry.body.scope).hex():
        return replace(done, outcome=OTHER_CALLER, detail=f"the id is {answer.id}: the token is another caller's")
    # A replay that names other coordinates is of a later write: of an earlier attempt, or of the event's sender.
    if answer.is_replay and answer.written in entry.lost_at:
        return replace(done, outcome=REPLAYED)
    return replace(done, outcome=WRITTEN)


def _post(client: httpx.Client, body: Body, key: str, first_sent_ms: int) -> Answer:
    """Send an event until it has a final answer, or DEADLINE_S are over; then the last answer."""
    quoted = key.replace("\\", "\\\\").replace('"', '\\"')
    headers = {
        "Idempotency-Key": f'"{quoted}"',
        "Repeatability-First-Sent": formatdate(first_sent_ms / 1000, usegmt=True),
    }
    stop_at = time.monotonic() + DEADLINE_S
    pause_s = FIRST_PAUSE_S
    while True:
        wait_s = 0.0
        try:
            response = client.post("/events", content=body.content, headers=headers)
            answer, wait_s = _answer_of(response), _retry_after_s(response)
        except httpx.RequestError as error:
            answer = Answer(0, f"{type(error).__name__}: {error}"[:_DETAIL_CHARS])
        is_final = answer.status not in (0, *RETRIED)
        if is_final or time.monotonic() + pause_s + wait_s >= stop_at:
            return answer
        time.sleep(pause_s + wait_s)
        pause_s = min(PAUSE_MAX_S, 2 * pause_s)


def _answer_of(response: httpx.Response) -> Answer:
    """Read an answer; CannotRun for one that no event can change."""
    status = response.status_code
    try:
        content = response.json()
        if status == httpx.codes.CREATED:
            written = (content["topic"], content["partition"], content["offset"])
            is_replay = response.headers.get("idempotent-replayed") == "true"
            return Answer(status, "", content["id"], written, is_replay)
        code, detail = content["code"], content["detail"]
    except (ValueError, KeyError, TypeError):
        code, detail = "", f"not an answer of Fencepost: {response.text}"
    refuses_all = status in (401, 403, 404, 405) and code not in _OF_EVENT
    if refuses_all or (not code and status not in RETRIED):
        raise CannotRun(
            f"{response.request.url} answered {status} {code}: {detail[:_DETAIL_CHARS]}; correct --url or --token-file"
        )
    return Answer(status, f"{status} {code}: {detail}"[:_DETAIL_CHARS])


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds of Retry-After (RFC 9110, section 10.2.3), a number or a date; 0 without it."""
    raw = response.headers.get("retry-after", "")
    if raw.isdecimal():
        return float(raw)
    try:
        return max(0.0, parsedate_to_datetime(raw).timestamp() - time.time())
    except (OverflowError, ValueError, TypeError):
        return 0.0
