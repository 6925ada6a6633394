"""An event as an application makes it, and the results of sending it."""

import base64
import json
import re
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

# The keys that the service accepts.
KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
KEY_RULE: Final = "idempotency_key: use 1 to 255 printable ASCII characters"


def new_key() -> str:
    """Make an idempotency key: a UUID of version 7 (RFC 9562, section 5.7).

    Such a key tells its age by this machine's clock, so that the service refuses it (412 `key-expired`) once it could
    have forgotten its event.
    """
    now_ms = time.time_ns() // 1_000_000
    random = secrets.randbits(74)
    return str(uuid.UUID(int=now_ms << 80 | 7 << 76 | random >> 62 << 64 | 2 << 62 | random & (1 << 62) - 1))


def check_key(key: object) -> None:
    """Raise ValueError for a key that an HTTP header cannot carry, such as a number or a uuid.UUID: write str(…)."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ValueError(f"{KEY_RULE}, not {key!r:.300}")


@dataclass(frozen=True, slots=True)
class Event:
    """One event, with the idempotency key under which each attempt sends it: to send it again, keep the object.

    `value` is what the module `json` encodes, or bytes, which are written as they are. None writes a tombstone, which
    needs a `key` (the record's). `timestamp` is in ms since the Unix epoch. Without `partition` and `timestamp`, the
    service chooses them.

    Raises:
        ValueError: `idempotency_key` is not 1 to 255 printable ASCII characters.
    """

    topic: str
    value: object
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    partition: int | None = None
    timestamp: int | None = None
    idempotency_key: str = field(default_factory=new_key)

    def __post_init__(self) -> None:
        """Check the key, which an HTTP header has to carry, before a spool has it."""
        check_key(self.idempotency_key)

    def encode(self) -> bytes:
        """Encode the body of `POST /events`. Raises TypeError or ValueError for a value that JSON does not have."""
        fields: dict[str, object] = {"topic": self.topic}
        if isinstance(self.value, bytes):
            fields["value_base64"] = base64.b64encode(self.value).decode()
        else:
            fields["value"] = self.value
        if self.headers:
            fields["headers"] = dict(self.headers)
        optional = {"key": self.key, "partition": self.partition, "timestamp": self.timestamp}
        fields |= {name: content for name, content in optional.items() if content is not None}
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Offsets:
    """The offsets of a consumer group, which `send_atomic` commits with its events (KIP-447).

    `positions` has the next offset to read by (topic, partition). `member`, `generation` and `instance` (its
    group.instance.id, if it has one) are those of the consumer that has read the records before.
    """

    group: str
    member: str
    generation: int
    positions: Mapping[tuple[str, int], int]
    instance: str | None = None

    def encode(self) -> bytes:
        """Encode the `offsets` of an atomic batch."""
        rows = [{"topic": topic, "partition": n, "offset": at} for (topic, n), at in sorted(self.positions.items())]
        identity = {"group": self.group, "member": self.member, "generation": self.generation}
        return json.dumps({**identity, "instance": self.instance, "positions": rows}, separators=(",", ":")).encode()


class Pending(NamedTuple):
    """An event that is to be sent: its idempotency key, and the body of its `POST /events`.

    `stored_ms`: when the spool has stored it, in ms since the Unix epoch; None unless an earlier call has. `is_batch`:
    it is an atomic batch, whose body is that of a `POST /events/batch`.
    """

    key: str
    body: bytes
    stored_ms: int | None = None
    is_batch: bool = False


def atomic_batch(key: str, events: Iterable[Event], offsets: Offsets | None) -> Pending:
    """Make the request of an atomic batch. Raises ValueError for a key that no header carries, and what encode raises.

    The events' own keys are left out: the batch has one for all of them.
    """
    check_key(key)
    of_group = b"" if offsets is None else b',"offsets":%b' % offsets.encode()
    texts = b",".join([event.encode() for event in events])
    return Pending(key, b'{"atomic":true,"events":[%b]%b}' % (texts, of_group), is_batch=True)


@dataclass(frozen=True, slots=True)
class Written:
    """The event is in Kafka, once, here. `replayed`: an earlier attempt wrote it. `timestamp` is in ms."""

    idempotency_key: str
    id: str
    topic: str
    partition: int
    offset: int
    timestamp: int
    replayed: bool


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """An atomic batch is in Kafka, once, and its offsets are committed. `replayed`: an earlier attempt wrote it."""

    idempotency_key: str
    id: str
    events: tuple[Written, ...]
    replayed: bool


class SendError(Exception):
    """No attempt has shown that the event is written.

    It can be pickled, so that a pool of processes or a task queue can hand it on.
    `body` is the event's JSON as it was sent. `status`, `code` and `detail` are those of the last answer (RFC 9457);
    status 0: there was none. `may_be_written`: an attempt without a clear answer may have written the event.
    """

    def __init__(self, event: Pending, status: int, code: str, detail: str, may_be_written: bool) -> None:
        super().__init__(f"{event.key}: {status or 'no answer'} {code}: {detail}")
        self.idempotency_key = event.key
        self.body = event.body
        self.status = status
        self.code = code
        self.detail = detail
        self.may_be_written = may_be_written

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the error again: `args` has only its text."""
        event = Pending(self.idempotency_key, self.body)
        return type(self), (event, self.status, self.code, self.detail, self.may_be_written), self.__dict__


class Refused(SendError):
    """The service refuses this event, as it would each time. It is no longer in the spool."""


class KeyExpired(Refused):
    """The key is older than its retention (412), as when a spool was left for days: the event may have been written.

    It is not sent under another key by itself: this could write it twice.
    """


class KeyReused(Refused):
    """The key was used for another event (422 `fingerprint-mismatch`)."""


class StaleMember(Refused):
    """The member of `send_atomic` is not in the group's present generation (409): nothing was written or committed."""


class Unsettled(SendError):
    """The deadline came first. The event stays in the spool; to try on, send the same object, or iterate `resume`."""


class NotAccepted(Unsettled):
    """The request was refused, whatever its event (401, 403, 404 …): correct the token, the address or the proxy."""


Result = Written | Refused | Unsettled
