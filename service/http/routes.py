"""The app's routes: the POSTs of events, the state of a key, the probes, the metrics, and the documentation."""

from collections.abc import Callable
from typing import Annotated, Any, Final, Protocol

import msgspec
from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.claims.keys import Found
from service.claims.states import Claimed, Delivered, DeliveredBatch
from service.contract.wire.ids import event_id
from service.core.metrics import Telemetry
from service.core.problems import (
    INCOMPLETE,
    INTERNAL,
    KINDS,
    METHOD_NOT_ALLOWED,
    UNKNOWN_KEY,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.problems import of_status as problem_of_status
from service.events.event import check_key
from service.http.asgi import AsgiEndpoint
from service.http.callers import Callers
from service.http.certificates import NO_CERTIFICATE, SCOPE_KEY
from service.http.events import EventsEndpoint
from service.http.headers import OF_THE_MESSAGE, check_message, pick
from service.http.lines import lines_exchange
from service.http.responses import render_problem
from service.http.streaming import ByContentType, StreamEndpoint
from service.pipeline.pool import Pool
from service.pipeline.readiness import Readiness
from service.pipeline.request import Quarantined
from service.slots.store_recovery import CurrentStore

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# The members of a committed event's state beside the state itself.
_COORDINATES: Final = ("id", "topic", "partition", "offset", "timestamp")
POSTS: Final = frozenset({"/events", "/events/batch"})


class MetricsText(Response):
    """Prometheus' text format."""

    media_type = METRICS_TYPE


class Parts(Protocol):
    """The parts of a running service that the routes use."""

    store: CurrentStore
    pool: Pool
    telemetry: Telemetry
    readiness: Readiness


def add_middleware(app: FastAPI) -> None:
    """Add to the app how problems are answered, and what each kind of problem is."""
    app.router.redirect_slashes = False  # `/events` and `/events/` are different resources
    app.add_middleware(HeadAsGet)
    app.add_middleware(CheckedHeads)
    app.add_api_route("/problems/{code}", get_problem)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_status)
    app.add_exception_handler(Exception, _on_bug)


def event_routes(service: Parts, events: EventsEndpoint) -> list[BaseRoute]:
    """Make the routes of events and of the states of keys, for an app that was prepared."""
    guard = events.guard
    lines = StreamEndpoint(guard, events.admission, events.telemetry, lines_exchange)
    router = APIRouter()
    for path, handler in events.routes.items():
        endpoint: ASGIApp = AsgiEndpoint(handler, guard.body_bytes_max, guard.bodies)
        if path in events.streamed:
            endpoint = ByContentType(events.streamed[path], lines, endpoint)
        router.routes.append(Route(path.decode(), endpoint, methods=["POST"]))
    _add_keys(router, service, guard.callers)
    return router.routes


def _add_keys(router: APIRouter, service: Parts, callers: Callers) -> None:
    @router.get("/events/{key:path}")
    async def get_event(
        request: Request,
        key: str,
        # A path cannot hold the keys `.` and `..`: /events/?key=.
        query_key: Annotated[str, Query(alias="key")] = "",
        authorization: Annotated[list[str] | None, Header()] = None,
    ) -> dict[str, Any]:
        sent = None if authorization is None else ", ".join(authorization)
        caller = await callers.find(sent, request.scope.get(SCOPE_KEY, NO_CERTIFICATE))
        id = event_id(check_key(key or query_key, "key"), caller.scope)
        try:
            found = await service.store.find(id)
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            raise Problem(INCOMPLETE, f"the key cannot be looked up now: {error}") from error
        return describe(id, found, service.pool.doubts)


def add_probes(app: FastAPI, service: Parts) -> None:
    """Add health, readiness and metrics."""

    @app.get("/livez")
    async def livez() -> dict[str, bool]:
        return {"live": True}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, object]:
        found = await service.readiness.check()
        response.status_code = 200 if found["ready"] else 503
        return found

    @app.get("/startupz")
    async def startupz(response: Response) -> dict[str, object]:
        readiness = service.readiness
        found = {} if readiness.was_ready else await readiness.check()
        response.status_code = 200 if readiness.was_ready else 503
        return {"started": readiness.was_ready, **found}

    @app.get("/metrics", response_class=MetricsText)
    async def metrics() -> Response:
        return MetricsText(service.telemetry.render())


async def get_problem(code: str) -> dict[str, Any]:
    """Describe a kind of problem. Raises HTTPException (404) for an unknown code."""
    if code not in KINDS:
        raise HTTPException(404, f"no problem has the code {code}")
    return msgspec.to_builtins(KINDS[code])  # type: ignore[no-any-return]


async def _on_problem(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return _response(problem)


async def _on_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code != METHOD_NOT_ALLOWED.status:
        return _response(problem_of_status(error.status_code, str(error.detail)))
    allowed = _allowed(request)
    response = _response(Problem(METHOD_NOT_ALLOWED, f"{request.method}: use {allowed}"))
    response.headers["allow"] = allowed
    return response


async def _on_bug(_: Request, error: Exception) -> Response:
    return _response(Problem(INTERNAL, type(error).__name__))


class HeadAsGet:
    """Answer HEAD as GET (RFC 9110, section 9.3.2); uvicorn, which knows the method, leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class CheckedHeads:
    """Refuse malformed heads, but for the POSTs of events, whose endpoint refuses and counts them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not (scope["method"] == "POST" and scope["path"] in POSTS):
            lines = [line for line in scope["headers"] if line[0] in OF_THE_MESSAGE]
            try:
                check_message(pick(lines), host_needed=scope["http_version"] != "1.0")
            except Problem as problem:
                app = _response(problem)
        await app(scope, receive, send)


def _allowed(request: Request) -> str:
    """Return the value of `Allow` (RFC 9110, section 10.2.1): the methods of all routes of the path."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def describe(id: bytes, found: Found, doubts: Callable[[int, int], bool]) -> dict[str, Any]:
    """Describe the state of a key; `doubts(slot, term)`: whether this process does not know their outcome.

    Raises Problem (404) for an unknown key, and for a claim whose event was never written.
    """
    match found.state:
        case Delivered(refused=refused) as letter if refused:
            problem = Quarantined((id, letter), replayed=True).body()
            return {"state": "quarantined", **{name: problem[name] for name in _COORDINATES}, "problem": problem}
        case Delivered(_, _, topic, partition, offset, timestamp, _):
            coordinates = {"topic": topic, "partition": partition, "offset": offset, "timestamp": timestamp}
            return {"state": "committed", "id": id.hex(), **coordinates}
        case DeliveredBatch(count=count):
            return {"state": "committed", "id": id.hex(), "members": count}
        case Claimed(slot, term) if not found.dead:
            doubtful = not found.leased or doubts(slot, term)
            return {"state": "in_doubt" if doubtful else "in_progress", "id": id.hex()}
    raise Problem(UNKNOWN_KEY, "nothing is known of this key; only a POST with it proves that it is not written")


def _response(problem: Problem) -> Response:
    status, headers, body = render_problem(problem)
    return Response(body, status, {name.decode(): content.decode() for name, content in headers})
