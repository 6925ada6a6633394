"""Dead letters: records of requests that are refused for their content, in the quarantine topic of a rule.

A dead letter has the key, the id and the retention of what it stands for, and is claimed, written and remembered as any
event. Its fingerprint is that of what was asked for: a retry finds the dead letter, another event under the key does
not. The record has the value, the record key and the headers of the event, and says in further headers why the event
was refused.
"""

from typing import Final

from service.contract.wire.headers import (
    CALLER_HEADER,
    CODE_HEADER,
    DETAIL_HEADER,
    PARTITION_HEADER,
    TIMESTAMP_HEADER,
    TOPIC_HEADER,
)
from service.contract.wire.ids import Header, fingerprint
from service.core.problems import (
    INVALID_JSON,
    INVALID_KEY,
    KINDS,
    MISSING_KEY,
    RECORD_REFUSED,
    SCHEMA_MISMATCH,
    UNKNOWN_SCHEMA,
    UNUSABLE_BODY,
    UNUSABLE_SCHEMA,
    Kind,
    Problem,
)
from service.events.event import ENTRY_BYTES, Event

REFUSED_BY_SCHEMA: Final = frozenset({SCHEMA_MISMATCH, UNKNOWN_SCHEMA, UNUSABLE_SCHEMA})
"""The problems of events that the quarantine topic of a `[[topics]]` rule takes."""
UNUSABLE: Final = frozenset({INVALID_JSON, INVALID_KEY, MISSING_KEY, UNUSABLE_BODY})
"""The problems of signed deliveries from which no event can be made."""
REFUSED_OF_SOURCE: Final = UNUSABLE | REFUSED_BY_SCHEMA | {RECORD_REFUSED}
"""The problems that the quarantine topic of a `[[sources]]` rule takes."""

# Redis and the ledger keep the detail of each dead letter, because a replay repeats it after the schema has changed.
DETAIL_CHARS_MAX: Final = 400
# Bytes of a ledger entry for the name of the field `refused`, and for each character of a detail.
_FIELD_BYTES: Final = 13
_CHAR_BYTES: Final = 6


class DeadLetter(Event, eq=False, gc=False, kw_only=True):
    """An event for a quarantine topic. `refused` is why, in the form of ledger_entries.Entry.

    `ttl_s` is the retention of its key in seconds, 0 for the service's own.
    """

    refused: str
    ttl_s: int


def of_event(event: Event, problem: Problem, topic: str, caller: str, ttl_s: int) -> DeadLetter:
    """Make the dead letter of an event that is refused with this problem; `caller` is the scope of its key."""
    asked: list[Header] = [(TOPIC_HEADER, event.topic.encode())]
    if event.partition is not None:
        asked.append((PARTITION_HEADER, b"%d" % event.partition))
    if event.timestamp is not None:
        asked.append((TIMESTAMP_HEADER, b"%d" % event.timestamp))
    return _letter(event, event.fp, [*event.headers, *asked], problem, topic, caller, ttl_s)


def of_body(event: Event, problem: Problem, caller: str, ttl_s: int) -> DeadLetter:
    """Make the dead letter of a body from which no event can be made.

    `event` has the body as its value, and the quarantine topic.
    """
    return _letter(event, body_fingerprint(event.value), event.headers, problem, event.topic, caller, ttl_s)


def _letter(
    event: Event, fp: bytes, headers: list[Header], problem: Problem, topic: str, caller: str, ttl_s: int
) -> DeadLetter:
    refused = refused_of(problem)
    code, _, detail = refused.partition(" ")
    why = [(CODE_HEADER, code.encode()), (DETAIL_HEADER, detail.encode()), (CALLER_HEADER, caller.encode())]
    added = [*headers[len(event.headers) :], *why]
    return DeadLetter(
        key=event.key,
        id=event.id,
        topic=topic,
        record_key=event.record_key,
        value=event.value,
        headers=[*headers, *why],
        partition=None,  # the quarantine topic may have fewer
        timestamp=None,
        traceparent=event.traceparent,
        fp=fp,
        size=event.size + sum([len(name) + len(content) for name, content in added]),
        entry_bytes=ENTRY_BYTES + len(topic) + _FIELD_BYTES + _CHAR_BYTES * len(refused),
        refused=refused,
        ttl_s=ttl_s,
    )


def body_fingerprint(body: bytes | None) -> bytes:
    """Make the fingerprint of a body from which no event can be made: that of an event with this value and no more."""
    return fingerprint("", None, None, (), body)


def refused_of(problem: Problem) -> str:
    """Encode why a request is refused, as ledger_entries.Entry has it."""
    detail = problem.detail.encode("utf-8", "replace").decode()
    more = " […]" if len(detail) > DETAIL_CHARS_MAX else ""
    return f"{problem.kind.code} {detail[:DETAIL_CHARS_MAX]}{more}"


def problem_of(refused: str) -> Problem:
    """Decode what `refused_of` makes. A code of a later release has no title of its own."""
    code, _, detail = refused.partition(" ")
    return Problem(KINDS.get(code) or Kind(422, code, "The request was refused"), detail)
