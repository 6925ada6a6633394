"""The ASGI app: FastAPI with the checked-in OpenAPI document, and with CORS around all its answers."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Lifespan

from service.contract import CorsRule
from service.http.cors import CorsByOrigin


class Application(FastAPI):
    """The app of one service, to which `routes` and the endpoints add their routes."""

    def __init__(self, cors: Sequence[CorsRule] = (), lifespan: Lifespan[FastAPI] | None = None) -> None:
        self._cors = cors
        super().__init__(title="Fencepost", version="1", lifespan=lifespan)

    def build_middleware_stack(self) -> ASGIApp:
        """Put CORS around the whole app: around the answers to bugs too, which no middleware of the app sees."""
        stack = super().build_middleware_stack()
        return CorsByOrigin(stack, self._cors) if self._cors else stack

    def openapi(self) -> dict[str, Any]:
        return openapi_document()


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document, `openapi.json` beside this module, which a test compares with the routes."""
    document: dict[str, Any] = json.loads((files("service.http") / "openapi.json").read_text(encoding="utf-8"))
    return document
