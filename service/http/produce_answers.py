"""The answers of the Confluent REST Proxy's produce API: its error codes and its bodies. Pure functions.

Error codes are those of kafka-rest (`Errors`) and rest-utils (`KafkaExceptionMapper`), and of the API's documentation.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec

from service.core.metrics import Telemetry
from service.core.problems import (
    FINGERPRINT_MISMATCH,
    FORBIDDEN_CALLER,
    FORBIDDEN_TOPIC,
    IN_PROGRESS,
    INCOMPLETE,
    INTERNAL,
    INVALID_KEY,
    INVALID_TOKEN,
    MISSING_KEY,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    RECORD_REFUSED,
    SCHEMA_MISMATCH,
    UNAUTHORIZED,
    UNKNOWN_SCHEMA,
    UNKNOWN_TOPIC,
    UNUSABLE_SCHEMA,
    Problem,
)
from service.core.time_of_day import LAST_SECOND
from service.events.event import Event
from service.events.produce import (
    FORMATS,
    INVALID_PAYLOAD,
    INVALID_SCHEMA,
    PARTITION_NOT_FOUND,
    UNPROCESSABLE,
    Format,
    ProduceProblem,
)
from service.events.produce_v3 import V3Event
from service.events.schema_refs import UsedSchema
from service.http.responder import Responder
from service.http.responses import CHALLENGES, echo_of, expiry_s, imf_fixdate
from service.pipeline.request import Committed, Quarantined, WriteResult

V2_TYPE: Final = b"application/vnd.kafka.v2+json"
V3_TYPE: Final = b"application/json"
# A v3 answer begins with this code if its record is written.
WRITTEN: Final = 200
# Codes of a v2 record's error, by the API's documentation.
NOT_RETRIABLE, RETRIABLE = 1, 2
# Statuses after which a client sends the same request again.
_RETRIABLE_STATUSES: Final = frozenset({408, 429, 500, 503, 504})
# The end of a message about a record that may be not written. The id of a record without a key of its own is made of
# its index (RequestKey), so that in a request of fewer records it would be another record's.
WHOLE_AGAIN: Final = " (send the whole request again, with its Idempotency-Key: a record's id depends on its index)"
# The same for an entry of a batch, whose id is made of the entry's own.
ENTRY_AGAIN: Final = " (send the entry again, with its id and the request's Idempotency-Key)"
# The results of what is in Kafka, as itself or as a dead letter.
IN_KAFKA: Final = (Committed, Quarantined)
# What follows each answer of a v3 request.
V3_SEPARATOR: Final = b"\r\n"

# HTTP status and error code of each kind of problem that is not answered by its own status alone. Problems after which
# the client should send the request again, with its key, are retriable by status (408, 429, 5xx) and by code.
_CODES: Final = {
    MISSING_KEY: (400, 40001),
    INVALID_KEY: (400, 40001),
    UNAUTHORIZED: (401, 40101),
    INVALID_TOKEN: (401, 40101),
    FORBIDDEN_TOPIC: (403, 40301),
    FORBIDDEN_CALLER: (403, 40301),
    UNKNOWN_TOPIC: (404, 40401),
    FINGERPRINT_MISMATCH: (422, INVALID_PAYLOAD),
    RECORD_REFUSED: (422, INVALID_PAYLOAD),
    SCHEMA_MISMATCH: (422, 42207),
    UNKNOWN_SCHEMA: (422, 42207),
    UNUSABLE_SCHEMA: (422, INVALID_SCHEMA),
    RATE_LIMITED: (429, 42901),
    IN_PROGRESS: (503, 50003),
    NOT_WRITTEN: (503, 50003),
    INCOMPLETE: (503, 50003),
    INTERNAL: (500, 50003),
    OUTCOME_UNKNOWN: (408, 40801),
}


class ApiError(NamedTuple):
    """An error in the API's terms. `retriable`: the record may be not written, so the client sends it again."""

    status: int
    error_code: int
    message: str

    @property
    def retriable(self) -> bool:
        return self.status in _RETRIABLE_STATUSES


def error_of(problem: Problem) -> ApiError:
    """Translate a problem to the error that the API has for it. Its message begins with the field, if there is one."""
    if isinstance(problem, ProduceProblem):
        return ApiError(problem.status, problem.error_code, problem.detail)
    if isinstance(problem, Quarantined):
        _, there = problem.deliveries[0]
        detail = f"{problem.detail} (quarantined: {there.topic}, partition {there.partition}, offset {there.offset})"
        problem = Problem(problem.kind, detail)
    if problem.detail.startswith("partition: "):  # what a topic's number of partitions does not allow
        return ApiError(404, PARTITION_NOT_FOUND, problem.detail)
    status, code = _CODES.get(problem.kind, (problem.kind.status, problem.kind.status))
    return ApiError(status, code, problem.detail)


class _Error(msgspec.Struct, gc=False):
    error_code: int
    message: str


class _Offset(msgspec.Struct, gc=False):
    partition: int | None
    offset: int | None
    error_code: int | None
    error: str | None


class _Data(msgspec.Struct, gc=False, omit_defaults=True):
    type: str
    size: int
    subject: str | None = None
    schema_id: int | None = None
    schema_version: int | None = None


class _V3Result(msgspec.Struct, gc=False, omit_defaults=True, kw_only=True):
    """The answer to a written v3 record, behind the fields of its subclass, which are not keyword-only."""

    cluster_id: str
    topic_name: str
    partition_id: int
    offset: int
    timestamp: str
    key: _Data | None = None
    value: _Data | None = None


class _V3Answer(_V3Result, gc=False, omit_defaults=True):
    error_code: int


class _Success(_V3Result, gc=False, omit_defaults=True):
    id: str


_R = TypeVar("_R", bound=_V3Result)


class _Failure(msgspec.Struct, gc=False):
    id: str
    error_code: int
    message: str


class _Batch(msgspec.Struct, gc=False):
    successes: list[_Success]
    failures: list[_Failure]


_encode: Final = msgspec.json.Encoder().encode


def render_error(error: ApiError) -> bytes:
    """`{"error_code","message"}`."""
    return _encode(_Error(error.error_code, error.message))


def lines_of_error(problem: Problem, media_type: bytes) -> bytes:
    """Render the header lines of a problem's answer, each with its CRLF."""
    lines = b"content-type: %b\r\n" % media_type
    if problem.retry_after_s is not None:
        lines += b"retry-after: %d\r\n" % problem.retry_after_s
    if problem.kind in CHALLENGES:
        lines += b"www-authenticate: %b\r\n" % CHALLENGES[problem.kind]
    return lines


class ProduceResponder(Responder):
    """The answers to the produce requests of one API version, with its media type, or to one request with its key."""

    def __init__(self, telemetry: Telemetry, retention_s: int, media_type: bytes, key: str | None = None) -> None:
        """`retention_s` is the retention, in seconds, of keys for which no rule sets one."""
        super().__init__(telemetry, lambda _: {} if key is None else {"key": key})
        self._retention_s = retention_s
        self._media_type = media_type
        self._key_line = b"" if key is None else b"idempotency-key: %b\r\n" % echo_of(key)

    def render(self, problem: Problem) -> tuple[int, bytes, bytes]:
        """Render a problem as the API's error; a client can send the request again with the key that it tells."""
        error = error_of(problem)
        lines = lines_of_error(problem, self._media_type) + self._key_line
        if isinstance(problem, Quarantined):
            lines += self._lines_of([problem])
        return error.status, lines, render_error(error)

    def lines(self, results: Sequence[WriteResult] = ()) -> bytes:
        """Render the header lines of an answer: its media type, and the request's key.

        With results, also the time at which the first of their keys expires, and whether all of them are replays.
        """
        return b"content-type: %b\r\n%b%b" % (self._media_type, self._key_line, self._lines_of(results))

    def _lines_of(self, results: Sequence[WriteResult]) -> bytes:
        """Render the header lines of what results have in common."""
        lines = b""
        if expires := [expiry_s(result, self._retention_s) for result in results if isinstance(result, IN_KAFKA)]:
            lines += b"idempotency-key-expires: %b\r\n" % imf_fixdate(min(expires))
        return lines + b"idempotent-replayed: true\r\n" if results and is_replay(results) else lines


def is_replay(results: Iterable[WriteResult]) -> bool:
    """Whether each of the results is that of an earlier request."""
    return all(isinstance(result, IN_KAFKA) and result.replayed for result in results)


def failure_of(results: Sequence[WriteResult]) -> Problem | None:
    """Return the problem that answers a v2 request as a whole; None if a record is written.

    A client that looks at the status only must not take such a request for a success. A retriable problem precedes the
    others: sent again, the request may write some of its records.
    """
    problems = [result for result in results if isinstance(result, Problem)]
    if len(problems) < len(results):
        return None
    return next((problem for problem in problems if error_of(problem).retriable), problems[0])


def render_v2(pieces: Iterable[bytes], records: Iterable[Event | Problem] = ()) -> bytes:
    """Join rendered offsets to the body of a v2 answer, with the ids of the schemas that encoded its records."""
    ids = b"null", b"null"
    for record in records:
        if isinstance(record, Event) and record.encoded is not None:
            of_record = _id_of(record.encoded.key), _id_of(record.encoded.value)
            ids = of_record[0] if ids[0] == b"null" else ids[0], of_record[1] if ids[1] == b"null" else ids[1]
            if b"null" not in ids:
                break
    return b'{"offsets":[%b],"key_schema_id":%b,"value_schema_id":%b}' % (b",".join(pieces), *ids)


def _id_of(schema: UsedSchema | None) -> bytes:
    return b"null" if schema is None else b"%d" % schema.id


def render_offsets(results: Iterable[WriteResult]) -> bytes:
    """Render `{"partition","offset","error_code","error"}` for each result, with commas between them."""
    return _encode([_offset_of(result) for result in results])[1:-1]


def _offset_of(result: WriteResult) -> _Offset:
    if isinstance(result, Problem):
        error = error_of(result)
        code, how = (RETRIABLE, WHOLE_AGAIN) if error.retriable else (NOT_RETRIABLE, "")
        return _Offset(None, None, code, error.message + how)
    _, there = result.deliveries[0]
    return _Offset(there.partition, there.offset, None, None)


def render_v3(cluster: str, answers: Iterable[tuple[V3Event | Problem | None, WriteResult]]) -> bytes:
    """Render the answers to v3 records, each with its end of line; a replay has the same bytes."""
    lines = []
    for record, result in answers:
        if isinstance(result, Problem):
            lines.append(_v3_error(result, WHOLE_AGAIN if error_of(result).retriable else ""))
        else:
            assert isinstance(record, V3Event)  # no record without an event is written
            lines.append(_v3_answer(cluster, record, result))
    return V3_SEPARATOR.join([*lines, b""])


def render_v3_end(problem: Problem) -> bytes:
    """Render the last line of a v3 stream that is not read to its end."""
    return _v3_error(problem, WHOLE_AGAIN) + V3_SEPARATOR


def render_v3_batch(
    cluster: str, ids: Sequence[str], records: Sequence[V3Event | Problem], results: Sequence[WriteResult]
) -> bytes:
    """Render the answer to a v3 batch: the entries that are written, and the others, each in the batch's order."""
    successes: list[_Success] = []
    failures: list[_Failure] = []
    for id, record, result in zip(ids, records, results, strict=True):
        if isinstance(result, Problem):
            again = ENTRY_AGAIN if error_of(result).retriable else ""
            failures.append(_Failure(id, *_code_and_message(result, again)))
        else:
            assert isinstance(record, V3Event)  # no entry without an event is written
            successes.append(_written(partial(_Success, id), cluster, record, result))
    return _encode(_Batch(successes, failures))


def _v3_answer(cluster: str, record: V3Event, result: Committed) -> bytes:
    return _encode(_written(partial(_V3Answer, WRITTEN), cluster, record, result))


def _written(make: Callable[..., _R], cluster: str, record: V3Event, result: Committed) -> _R:
    """Make what the answer to a written record says."""
    _, there = result.deliveries[0]
    event = record.event
    encoded = event.encoded
    return make(
        cluster_id=cluster,
        topic_name=there.topic,
        partition_id=there.partition,
        offset=there.offset,
        timestamp=rfc3339(there.ts),
        key=_data_of(record.key_format, event.record_key, None if encoded is None else encoded.key),
        value=_data_of(record.value_format, event.value, None if encoded is None else encoded.value),
    )


def _v3_error(problem: Problem, remedy: str) -> bytes:
    return _encode(_Error(*_code_and_message(problem, remedy)))


def _code_and_message(problem: Problem, remedy: str) -> tuple[int, str]:
    """Return what the answer to a v3 record that is not written says.

    Codes finer than 422 are in the text, as the peer's are.
    """
    status, code, message = error_of(problem)
    message += remedy
    if code // 100 == UNPROCESSABLE:
        return status, f"Error: {code} : {message}"
    return code, message


def _data_of(format: Format | None, content: bytes | None, schema: UsedSchema | None) -> _Data | None:
    size = -1 if content is None else len(content)
    if schema is not None:
        return _Data(FORMATS[schema.type].value, size, schema.subject, schema.id, schema.version)
    return None if format is None else _Data(format.value, size)


def rfc3339(ms: int) -> str:
    """Format a time in ms since 1970 as Java's Instant does: without a fraction if that is 0.

    Times past the year 9999, which an entry of the ledger may hold, are cut to it.
    """
    seconds, rest = divmod(min(ms, 1000 * LAST_SECOND + 999), 1000)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{rest:03}Z" if rest else f"{text}Z"
