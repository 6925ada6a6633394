"""Makes the routes of a service for an app, for tests that run no service."""

from typing import cast

from fastapi import FastAPI
from starlette.routing import Route

from service.http.events import EventsEndpoint
from service.http.produce import ProduceRequests
from service.http.produce_v2 import ProduceV2
from service.http.produce_v3 import ProduceV3
from service.http.routes import Parts, add_middleware, add_probes, event_routes

NO_PARTS = cast(Parts, None)


def add_routes(app: FastAPI, events: EventsEndpoint) -> None:
    """Add the routes of events, keys and probes; those that read the parts of a running service fail."""
    add_middleware(app)
    add_probes(app, NO_PARTS)
    app.router.routes += event_routes(NO_PARTS, events)


def produce_routes(requests: ProduceRequests) -> list[Route]:
    """Make the routes of both versions of the produce API."""
    return [*ProduceV2(requests).routes(), *ProduceV3(requests).routes()]
