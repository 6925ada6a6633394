"""Looks schemas up in a Schema Registry: each once at a time, within bounds, and with a pause after a failure."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec
import structlog

from service.contract.registry_rules import SUBJECT_CHARS_MAX
from service.core.bounded import Bounded
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.settings import Settings
from service.core.shared_task import shared, unwaited
from service.core.supervision import Cancelled
from service.registry import protoc
from service.registry.schema import (
    Import,
    Reference,
    Registered,
    RegistryAway,
    Schema,
    SchemaAbsent,
    SchemaType,
    SchemaUnusable,
    digest_of,
)

log = structlog.get_logger(__name__)

# Bytes of a schema's text with those of all its references.
SCHEMA_BYTES_MAX: Final = 256 * 1024
REFERENCES_MAX: Final = 32
ANSWER_BYTES_MAX: Final = 2 * SCHEMA_BYTES_MAX
CACHED_MAX: Final = 2_000
CACHED_BYTES_MAX: Final = 16 * 1024 * 1024
# Bytes that an entry takes beside its text.
ENTRY_BYTES: Final = 500
# The latest version of a subject is asked for again after so long, in the background; after STALE_S, its users wait for
# the answer. While the registry is away, the version that was the latest goes on.
FRESH_S: Final = 30.0
STALE_S: Final = 60.0
# For so long an answer that there is no such schema holds, and one that concerns this schema only.
ABSENT_S: Final = 1.0
REFUSED_S: Final = 5.0
REFUSALS_MAX: Final = 1_000
# Characters of the registry's own messages that errors have.
MESSAGE_CHARS: Final = 300
# Pauses after failures in a row. In a pause nothing is sent; after it, one request at a time until one succeeds.
PAUSE_S: Final = 1.0
PAUSE_MOST_S: Final = 30.0
REQUEST_TIMEOUT_S: Final = 3.0
# Requests at once, and look-ups that are under way.
AT_ONCE: Final = 4
UNDER_WAY_MAX: Final = 200
VERSION_MOST: Final = 2**31 - 1

_ABSENT_CODES: Final = frozenset({40401, 40402, 40403, 404})
_MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"

Refusal = SchemaAbsent | SchemaUnusable | RegistryAway


class _Answer(msgspec.Struct):
    """An answer of the registry, all of its fields. Avro is the type that is left out."""

    subject: str = ""
    id: int | None = None
    version: int | None = None
    schema: str | None = None
    schemaType: SchemaType = SchemaType.AVRO  # noqa: N815 - the name in the API
    references: list[Reference] | None = None
    error_code: int | None = None
    message: str = ""


_decode: Final = msgspec.json.Decoder(_Answer).decode


class RegistryClient:
    """The client of one registry. Each look-up raises SchemaAbsent, SchemaUnusable or RegistryAway."""

    def __init__(
        self, settings: Settings, telemetry: Telemetry, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`transport` is in place of connections."""
        self._url = settings.registry
        self._http = _http_client(settings, transport)
        self._telemetry = telemetry
        self._known: Bounded[Any] = Bounded(CACHED_MAX, CACHED_BYTES_MAX)
        self._asked_at: Bounded[float] = Bounded(CACHED_MAX, CACHED_MAX)  # of latest versions, by time.monotonic
        self._refused: Bounded[tuple[float, Refusal]] = Bounded(REFUSALS_MAX, REFUSALS_MAX)  # and until when
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}
        self._breaker = Breaker(telemetry)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._compiles = asyncio.Semaphore(1)

    async def close(self) -> None:
        """Cancel look-ups that are under way, and close the connections."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        await self._http.aclose()

    async def by_version(self, subject: str, version: int | None) -> Registered:
        """Look up a version of a subject; None for the latest."""
        _check_subject(subject)
        if version is not None:
            key = ("version", subject, str(version))
            return _registered(await self._look_up(key, lambda: self._version(subject, str(version))))
        return await self._fresh(subject)

    async def _fresh(self, subject: str) -> Registered:
        """Return the latest version of a subject, by the rules of FRESH_S and STALE_S."""
        key = ("latest", subject)
        known, age_s = self._known.get(key), time.monotonic() - (self._asked_at.get(key) or -math.inf)
        if known is not None and age_s <= FRESH_S:
            return _registered(known)
        if known is not None and age_s <= STALE_S:
            with contextlib.suppress(RegistryAway, SchemaAbsent, SchemaUnusable):  # nobody waits for this refresh
                self._start(key, lambda: self._latest(subject))
            return _registered(known)
        try:
            return _registered(await self._ask(key, lambda: self._latest(subject)))
        except RegistryAway:
            if known is None:
                raise
            return _registered(known)

    async def by_id(self, id: int) -> Schema:
        """Look up a schema by its id."""
        found: Schema = await self._look_up(("id", id), lambda: self._by_id(id))
        return found

    async def registered(self, subject: str, schema: Schema, *, register: bool) -> Registered:
        """Find the version of a subject that has this schema; `register` it if there is none."""
        _check_subject(subject)
        key = ("schema", subject, register, digest_of(schema))
        return _registered(await self._look_up(key, lambda: self._registered(subject, schema, register)))

    async def imports(self, schema: Schema) -> list[Import]:
        """Look up all schemas that a schema refers to, directly or not: each once, and behind those that it refers to.

        Raises SchemaUnusable if they are too many or too large.
        """
        found: list[Import] = []
        await self._collect(schema, found, {}, [len(schema.text)])
        return found

    async def _collect(
        self, schema: Schema, found: list[Import], seen: dict[str, tuple[str, int]], size: list[int]
    ) -> None:
        for reference in schema.references:
            target = reference.subject, reference.version
            if (known := seen.get(reference.name)) is not None:
                if known != target:
                    raise SchemaUnusable(f"its references have the name {reference.name!r} for two schemas")
                continue
            seen[reference.name] = target
            if len(seen) > REFERENCES_MAX:
                raise SchemaUnusable(f"it has more than {REFERENCES_MAX} references")
            registered = await self.by_version(*target)
            size[0] += len(registered.schema.text)
            if size[0] > SCHEMA_BYTES_MAX:
                raise SchemaUnusable(f"with its references it has more than {SCHEMA_BYTES_MAX} characters")
            await self._collect(registered.schema, found, seen, size)
            found.append(Import(reference.name, registered.schema))

    async def descriptors(self, id: int, schema: Schema) -> bytes:
        """Compile a Protobuf schema with its references to a serialized FileDescriptorSet (`protoc.compiled`)."""

        async def work() -> bytes:
            imports = await self.imports(schema)
            async with self._compiles:
                return await protoc.compiled(schema.text, imports)

        found: bytes = await self._ask(("descriptors", id, digest_of(schema)), work)
        return found

    async def types(self) -> list[str]:
        """Ask which types of schemas the registry takes; nothing is cached."""
        return msgspec.json.decode(await self._send("GET", "/schemas/types"), type=list[str])

    # ------------------------------------------------------------------------------------------------------ requests

    async def _version(self, subject: str, version: str) -> Registered:
        return _version_of(await self._request("GET", f"/subjects/{_quoted(subject)}/versions/{version}"), subject)

    async def _latest(self, subject: str) -> Registered:
        key = ("latest", subject)
        began = time.monotonic()
        try:
            found = await self._version(subject, "latest")
        except (SchemaAbsent, SchemaUnusable):
            self._known.drop(key)
            raise
        self._known.put(key, found, ENTRY_BYTES + len(found.schema.text))
        self._asked_at.put(key, began, 1)
        return found

    async def _by_id(self, id: int) -> Schema:
        return _schema_of(await self._request("GET", f"/schemas/ids/{id}"))

    async def _registered(self, subject: str, schema: Schema, register: bool) -> Registered:
        body = {
            "schema": schema.text,
            "schemaType": schema.type.value,
            "references": [msgspec.to_builtins(reference) for reference in schema.references],
        }
        try:
            found = await self._request("POST", f"/subjects/{_quoted(subject)}", body)
        except SchemaAbsent:
            if not register:
                raise
            await self._request("POST", f"/subjects/{_quoted(subject)}/versions", body)
            found = await self._request("POST", f"/subjects/{_quoted(subject)}", body)
        if found.id is None or found.version is None:
            raise RegistryAway(f"the answer to a look-up in {subject!r} has no id and version", everywhere=False)
        return Registered(found.subject or subject, found.id, found.version, schema)

    # --------------------------------------------------------------------------------------- look-ups and their bounds

    async def _look_up(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return what is known, else ask and keep it."""
        known = self._known.get(key)
        if known is not None:
            return known
        found = await self._ask(key, work)
        schema = found.schema if isinstance(found, Registered) else found
        self._known.put(key, found, ENTRY_BYTES + len(schema.text))
        return found

    async def _ask(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Await the work that all callers with this key share."""
        try:
            return await shared(self._start(key, work))
        except Cancelled as error:  # by `close`
            raise RegistryAway(str(error), everywhere=False) from None

    def _start(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Start the work of a key, unless it is under way. Raises what it raised a moment ago, without new work."""
        if (running := self._under_way.get(key)) is not None:
            return running
        until, refusal = self._refused.get(key) or (0.0, None)
        if refusal is not None and until > time.monotonic():
            raise _copy_of(refusal)
        if len(self._under_way) >= UNDER_WAY_MAX:
            raise RegistryAway(f"{UNDER_WAY_MAX} look-ups are under way", everywhere=False)
        task = self._under_way[key] = asyncio.create_task(self._noted(key, work()))
        task.add_done_callback(lambda _: self._under_way.pop(key, None))
        task.add_done_callback(unwaited)
        return task

    async def _noted(self, key: Hashable, work: Coroutine[Any, Any, Any]) -> Any:
        """Do the work of a key; note a refusal, so that it is not asked for again at once."""
        try:
            return await work
        except (SchemaAbsent, SchemaUnusable, RegistryAway) as refusal:
            if not isinstance(refusal, RegistryAway) or not refusal.everywhere:  # else the breaker pauses all requests
                hold_s = ABSENT_S if isinstance(refusal, SchemaAbsent) else REFUSED_S
                self._refused.put(key, (time.monotonic() + hold_s, _copy_of(refusal)), 1)
            raise

    async def _request(self, method: str, path: str, body: object = None) -> _Answer:
        """Send a request, unless the registry is being left alone, and decode its answer."""
        self._breaker.check()
        async with self._at_once:
            self._breaker.begin()
            began, outcome = time.monotonic(), "away"
            try:
                answer = _decoded(await self._send(method, path, body), path)
                outcome = "ok"
            except RegistryAway as error:
                if error.everywhere:
                    self._breaker.fail(error)
                raise
            except (SchemaAbsent, SchemaUnusable) as error:
                outcome = "absent" if isinstance(error, SchemaAbsent) else "refused"
                self._breaker.succeed()
                raise
            else:
                self._breaker.succeed()
                return answer
            finally:
                self._breaker.end()
                self._telemetry.schema_registry.requests.labels(outcome).inc()
                self._telemetry.schema_registry.seconds.observe(time.monotonic() - began)

    async def _send(self, method: str, path: str, body: object = None) -> bytes:
        """Send a request and return the body of its answer of status 200."""
        content = None if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(REQUEST_TIMEOUT_S),
                self._http.stream(method, f"{self._url}{path}", content=content) as response,
            ):
                received = bytearray()
                async for piece in response.aiter_raw():
                    received += piece
                    if len(received) > ANSWER_BYTES_MAX:
                        raise SchemaUnusable(f"the registry's answer has more than {ANSWER_BYTES_MAX} bytes")
        except TimeoutError:
            raise RegistryAway(f"no answer within {REQUEST_TIMEOUT_S:g} s") from None
        except httpx.HTTPError as error:
            raise RegistryAway(f"{type(error).__name__}: {error}") from None
        if response.status_code != 200:
            raise refusal_of(response.status_code, response.headers.get("retry-after", ""), bytes(received), path)
        return bytes(received)


class Breaker:
    """Whether requests are sent: not in a pause after a failure; after it, one at a time until one succeeds."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._now = now
        self._trouble = Incident(log, "the schema registry is away", now)
        self._failures = 0  # in a row
        self._why = ""
        self._paused_until = 0.0
        self._sent = 0  # requests without an answer

    def check(self) -> None:
        """Raise RegistryAway where no request may be sent now."""
        if not self._failures:
            return
        pause_s = self._paused_until - self._now()
        if pause_s > 0:
            raise RegistryAway(self._why, pause_s)
        if self._sent:
            raise RegistryAway(self._why, PAUSE_S)

    def begin(self) -> None:
        """Count a request that is being sent. Raises RegistryAway as `check`."""
        self.check()
        self._sent += 1

    def end(self) -> None:
        """Count a request off."""
        self._sent -= 1

    def fail(self, error: RegistryAway) -> None:
        """Note a failure; those of requests that were sent together begin one pause."""
        if self._now() >= self._paused_until:
            self._failures += 1
            pause_s = min(PAUSE_S * 2 ** min(self._failures - 1, 10), PAUSE_MOST_S)
            self._paused_until = self._now() + max(pause_s, min(error.retry_after_s, PAUSE_MOST_S))
        self._why = str(error)
        self._trouble.add(error)
        self._telemetry.schema_registry.away.set(1)

    def succeed(self) -> None:
        """Note an answer."""
        if self._failures:
            log.info("the schema registry answers again", **self._trouble.end())
        self._failures, self._paused_until = 0, 0.0
        self._telemetry.schema_registry.away.set(0)


def _copy_of(refusal: Refusal) -> Refusal:
    """Copy a refusal that is to be kept or raised: the traceback of one that was raised holds its callers' events."""
    if isinstance(refusal, RegistryAway):
        return RegistryAway(str(refusal), refusal.retry_after_s, everywhere=refusal.everywhere)
    return type(refusal)(str(refusal))


def refusal_of(status: int, retry_after: str, body: bytes, path: str) -> Refusal:
    """Make the error of an answer that is not 200; the registry's own errors have an `error_code`."""
    try:
        error = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = _Answer()
    message = error.message[:MESSAGE_CHARS]
    if status == 404 and error.error_code in _ABSENT_CODES:
        return SchemaAbsent(message or "not found")
    if status in (409, 422) and error.error_code is not None:
        return SchemaUnusable(f"the registry refuses it: {message}")
    why = f"it answers {status} to {path[:100]}{f': {message}' if message else ''}"
    if status in (429, 502, 503, 504):
        return RegistryAway(why, float(retry_after) if retry_after.isdecimal() and len(retry_after) < 5 else PAUSE_S)
    # 401 and a 404 that is not the registry's: the address or the credentials are wrong for all schemas.
    return RegistryAway(why, REFUSED_S, everywhere=status in (401, 404, 407) or 300 <= status < 400)


def _decoded(body: bytes, path: str) -> _Answer:
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RegistryAway(f"the answer to {path[:100]} is not the registry's: {error}", everywhere=False) from None


def _schema_of(answer: _Answer) -> Schema:
    if answer.schema is None:
        raise RegistryAway("an answer has no schema", everywhere=False)
    if len(answer.schema) > SCHEMA_BYTES_MAX:
        raise SchemaUnusable(f"it has more than {SCHEMA_BYTES_MAX} characters")
    return Schema(answer.schemaType, answer.schema, tuple(answer.references or ()))


def _version_of(answer: _Answer, subject: str) -> Registered:
    schema = _schema_of(answer)
    if answer.id is None or answer.version is None:
        raise RegistryAway("an answer has no id or version", everywhere=False)
    return Registered(answer.subject or subject, answer.id, answer.version, schema)


def _registered(found: Any) -> Registered:
    assert isinstance(found, Registered)
    return found


def _check_subject(subject: str) -> None:
    """Check a subject, which a client or a schema's title may have made, before it is in a path or a cache's key.

    Dot segments would be resolved: the request would go to another path. Raises SchemaUnusable.
    """
    if not 0 < len(subject) <= SUBJECT_CHARS_MAX or subject in (".", ".."):
        why = f"{subject[:20]!r} is no subject: use 1 to {SUBJECT_CHARS_MAX} characters, not . or .."
        raise SchemaUnusable(why)


def _quoted(subject: str) -> str:
    return quote(subject, safe="")


def _http_client(settings: Settings, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    headers = {"accept": f"{_MEDIA_TYPE}, application/json", "content-type": _MEDIA_TYPE, "accept-encoding": "identity"}
    if settings.registry_token:
        headers["authorization"] = f"Bearer {settings.registry_token}"
    auth = (settings.registry_username, settings.registry_password) if settings.registry_username else None
    return httpx.AsyncClient(
        headers=headers,
        auth=auth,
        verify=settings.registry_tls or False,  # without TLS nothing is verified
        transport=transport,
        timeout=REQUEST_TIMEOUT_S,
        limits=httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE),
        trust_env=False,
    )
