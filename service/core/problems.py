"""The kinds of problems that the API answers with, and the exceptions of Redis and Kafka that lead to them."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem (RFC 9457): programs compare its `code`, people read its `title`."""

    status: int
    code: str
    title: str
    retry_after_s: int | None = None


MISSING_KEY: Final = Kind(400, "missing-key", "No idempotency key")
INVALID_KEY: Final = Kind(400, "invalid-key", "The idempotency key is malformed")
INVALID_HTTP: Final = Kind(400, "invalid-http", "The request is not HTTP by RFC 9112")
INVALID_JSON: Final = Kind(400, "invalid-json", "The body is not JSON by RFC 8259")
INVALID_EVENT: Final = Kind(400, "invalid-event", "The event is malformed")
INVALID_ENCODING: Final = Kind(400, "invalid-encoding", "The body is not in its content coding")
UNAUTHORIZED: Final = Kind(401, "unauthorized", "The caller is not known")
INVALID_TOKEN: Final = Kind(401, "invalid-token", "The token is not taken")
BAD_SIGNATURE: Final = Kind(401, "bad-signature", "The delivery is not signed as the source's rule says")
FORBIDDEN_TOPIC: Final = Kind(403, "forbidden-topic", "The topic may not be written to")
FORBIDDEN_GROUP: Final = Kind(403, "forbidden-group", "The group's offsets may not be committed")
FORBIDDEN_CALLER: Final = Kind(403, "forbidden-caller", "The caller may not write")
NOT_FOUND: Final = Kind(404, "not-found", "No such resource")
UNKNOWN_TOPIC: Final = Kind(404, "unknown-topic", "The topic does not exist")
UNKNOWN_SOURCE: Final = Kind(404, "unknown-source", "The rules name no such source")
UNKNOWN_KEY: Final = Kind(404, "unknown-key", "No event is known under this key")
METHOD_NOT_ALLOWED: Final = Kind(405, "method-not-allowed", "The method is not allowed here")
REQUEST_TIMEOUT: Final = Kind(408, "request-timeout", "The request did not come in time")
IN_PROGRESS: Final = Kind(409, "in-progress", "An event with this key is being written", retry_after_s=1)
STALE_MEMBER: Final = Kind(409, "stale-member", "The member is not in the group's present generation")
KEY_EXPIRED: Final = Kind(412, "key-expired", "The key is older than its retention")
TOO_LARGE: Final = Kind(413, "too-large", "The request is too large")
UNSUPPORTED_TYPE: Final = Kind(415, "unsupported-media-type", "The media type is not supported")
UNSUPPORTED_ENCODING: Final = Kind(415, "unsupported-encoding", "The content coding is not supported")
ENCODED_DELIVERY: Final = Kind(415, "encoded-delivery", "A delivery of a source has no content coding")
FINGERPRINT_MISMATCH: Final = Kind(422, "fingerprint-mismatch", "The key was used for another event")
RECORD_REFUSED: Final = Kind(422, "record-refused", "The topic does not take this record")
OFFSETS_REFUSED: Final = Kind(422, "offsets-refused", "Kafka does not take these offsets")
SCHEMA_MISMATCH: Final = Kind(422, "schema-mismatch", "The value is not what the topic's schema allows")
UNKNOWN_SCHEMA: Final = Kind(422, "unknown-schema", "The schema registry does not have this schema")
UNUSABLE_SCHEMA: Final = Kind(422, "unusable-schema", "The schema cannot be used")
UNUSABLE_BODY: Final = Kind(422, "unusable-body", "The body does not have what the source's rule reads from it")
RATE_LIMITED: Final = Kind(429, "rate-limited", "The caller exceeds its rate", retry_after_s=1)
HEAD_TOO_LARGE: Final = Kind(431, "head-too-large", "The request's line and headers are too large")
INTERNAL: Final = Kind(500, "internal", "Internal error of Fencepost")
UNSUPPORTED_CODING: Final = Kind(501, "unsupported-coding", "The transfer coding is not supported")
NOT_WRITTEN: Final = Kind(503, "not-written", "This request has surely written nothing", retry_after_s=1)
INCOMPLETE: Final = Kind(503, "store-incomplete", "The key store is not complete", retry_after_s=1)
OUTCOME_UNKNOWN: Final = Kind(
    504, "outcome-unknown", "It is not known yet whether the event is written", retry_after_s=1
)

# The longest detail: it may quote a body, and bodies have megabytes.
DETAIL_CHARS_MAX: Final = 1_000

KINDS: Final = {kind.code: kind for kind in vars().values() if isinstance(kind, Kind)}


class Problem(Exception):
    """A request's answer that is not a success; `detail` names the field and the remedy."""

    def __init__(self, kind: Kind, detail: str, retry_after_s: int | None = None) -> None:
        detail = detail if len(detail) <= DETAIL_CHARS_MAX else f"{detail[:DETAIL_CHARS_MAX]} […]"
        super().__init__(f"{kind.code}: {detail}")
        self.kind = kind
        self.detail = detail
        self.retry_after_s = kind.retry_after_s if retry_after_s is None else retry_after_s

    def as_result(self) -> "Problem":
        """Return the problem itself without its traceback.

        A traceback holds the frames of its batch, which hold the problem: such cycles stay until the garbage collector
        runs, which delays all requests.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self

    def body(self) -> dict[str, str | int]:
        """Make the members of `application/problem+json` (RFC 9457)."""
        return {
            "type": f"/problems/{self.kind.code}",
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
            "code": self.kind.code,
        }


def of_status(status: int, detail: str) -> Problem:
    """Make the problem for a status that a library chose, such as an unknown route."""
    by_status = {404: NOT_FOUND, 405: METHOD_NOT_ALLOWED, 500: INTERNAL}
    kind = by_status.get(status) or Kind(status, HTTPStatus(status).phrase.lower().replace(" ", "-"), detail)
    return Problem(kind, detail)


class StoreLost(Exception):
    """The Redis server is not the store of the generation: nothing was written, and the store must be settled."""


class StoreIncomplete(StoreLost):
    """The store lacks keys: it is an older copy, or keys were evicted. Nothing was written; it must be recovered."""


class StoreAway(Exception):
    """Redis is unreachable, or refused (loading, out of memory): nothing was written."""


class StoreUnanswered(Exception):
    """A script got no reply from Redis: it may still run later, which ends the slot's term."""


class StoreBug(StoreUnanswered):
    """Redis returned a reply or a state that this version does not know: a bug, from which nothing is concluded."""


class Fenced(Exception):
    """Another process has taken this slot: it must be taken again before the next claim."""


class KafkaAway(Exception):
    """Kafka did not answer in time, or refused for a temporary reason: the request may be tried again."""


class KafkaLoginFailed(KafkaAway):
    """Kafka refuses the user, the password or the mechanism; the text says what to set."""


class KafkaRefusesSetting(KafkaAway):
    """Kafka refuses a setting until that, or the brokers' own, is changed; the text says what to set."""


class KafkaForbids(KafkaAway):
    """Kafka denies the service a permission, which somebody must grant before a retry can succeed."""
