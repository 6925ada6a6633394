"""The bytes of lost events from a file: the lines of `POST /events/batch` (application/x-ndjson), each with its key."""

import base64
import binascii
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from service.contract.wire import ids
from spark.errors import CannotRun

LINE_BYTES_MAX: Final = 4 << 20
"""The service takes events of 1 MB, which have twice as many bytes in base64 with their names."""


class _Envelope(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The body of `POST /events`. `value` holds the bytes of the JSON as they are in the file.

    The service has the same fields in `service.events.event.EventBody`. The job imports nothing of the service but
    `service.contract`, which needs the standard library only, and so has no msgspec.
    """

    topic: str
    key: str | None = None
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | None = None
    headers: dict[str, str] | None = None
    partition: int | None = None
    timestamp: int | None = None


class _Line(_Envelope, forbid_unknown_fields=True):
    """A line of a batch: an event with its idempotency key."""

    idempotency_key: str = ""


_decode: Final = msgspec.json.Decoder(_Line).decode
_FIELDS: Final = _Envelope.__struct_fields__


@dataclass(frozen=True, slots=True)
class Body:
    """An event of the file: its key, the scope (caller) by which it has the id, its fingerprint, and the request."""

    key: str
    scope: str
    fingerprint: str
    content: bytes


def read(lines: Iterable[bytes], name: str, scopes: Sequence[str], wanted: Collection[str]) -> dict[str, list[Body]]:
    """Read the bodies of the events with `wanted` ids (hexadecimal digits), by id; other events are skipped.

    An id is that of a line's key in one of the `scopes`. CannotRun, with the number of the line in the file `name`, for
    a line that is no event with a key.
    """
    found: dict[str, list[Body]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > LINE_BYTES_MAX:
            raise CannotRun(f"--bodies {name}:{number}: a line has at most {LINE_BYTES_MAX} bytes")
        try:
            event = _decode(line)
            made = {ids.event_id(event.idempotency_key, scope).hex(): scope for scope in scopes}
            for id in made.keys() & wanted:
                found.setdefault(id, []).append(_body(event, made[id]))
        except (msgspec.DecodeError, ValueError) as error:
            raise CannotRun(
                f"--bodies {name}:{number}: {error}; write events as POST /events/batch takes them, one a line, each "
                "with its idempotency_key"
            ) from None
    return found


def _body(event: _Line, scope: str) -> Body:
    """Make the request of an event, and its fingerprint. Raises ValueError."""
    headers = [(name, content.encode()) for name, content in (event.headers or {}).items()]
    record_key = None if event.key is None else event.key.encode()
    fingerprint = ids.fingerprint(event.topic, event.partition, record_key, headers, _value(event))
    envelope = _Envelope(**{name: getattr(event, name) for name in _FIELDS})
    return Body(event.idempotency_key, scope, fingerprint.hex(), msgspec.json.encode(envelope))


def _value(event: _Line) -> bytes | None:
    """Return the bytes of the record's value, None for a tombstone. Raises ValueError."""
    if (event.value is msgspec.UNSET) == (event.value_base64 is None):
        raise ValueError("write exactly one of value and value_base64")
    if isinstance(event.value, msgspec.Raw):
        content = bytes(event.value)
        return None if content == b"null" else content
    try:
        return base64.b64decode(event.value_base64 or "", validate=True)
    except binascii.Error as error:
        raise ValueError(f"value_base64: {error}") from None


def with_fingerprint(bodies: Mapping[str, Sequence[Body]], id: str, fingerprints: Collection[str]) -> Body | None:
    """Return the body of an id that has one of these fingerprints; None without one."""
    return next((body for body in bodies.get(id, ()) if body.fingerprint in fingerprints), None)
