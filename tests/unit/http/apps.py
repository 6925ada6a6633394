"""Adds the routes of events, keys and probes to an app, for tests that run no service."""

from typing import cast

from fastapi import FastAPI

from service.http.events import EventsEndpoint
from service.http.routes import Parts, add_middleware, add_probes, event_routes

NO_PARTS = cast(Parts, None)


def add_routes(app: FastAPI, events: EventsEndpoint) -> None:
    """Add the routes; those that read the parts of a running service fail."""
    add_middleware(app)
    add_probes(app, NO_PARTS)
    app.router.routes += event_routes(NO_PARTS, events)
