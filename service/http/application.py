"""The ASGI app: FastAPI with the checked-in OpenAPI document, and with CORS around all its answers."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from service.contract import CorsRule
from service.http import documentation
from service.http.cors import CorsByOrigin


class Application(FastAPI):
    """The app of one service. `router.py` adds the routes, which `routes.py` and the endpoints make."""

    def __init__(
        self,
        cors: Sequence[CorsRule] = (),
        lifespan: Lifespan[FastAPI] | None = None,
        *,
        has_documentation: bool = True,
    ) -> None:
        self._cors = cors
        self._stack: ASGIApp | None = None  # the whole app, without CORS
        self._around: ASGIApp | None = None  # the same with CORS
        at = "/openapi.json" if has_documentation else None
        super().__init__(
            title="Fencepost", version="1", lifespan=lifespan, openapi_url=at, docs_url=None, redoc_url=None
        )
        if has_documentation:
            self.router.routes += documentation.routes()

    def build_middleware_stack(self) -> ASGIApp:
        """Put CORS around the whole app: around the answers to bugs too, which no middleware of the app sees."""
        self._stack = super().build_middleware_stack()
        self.set_cors(self._cors)
        return self._enter

    def set_cors(self, cors: Sequence[CorsRule]) -> None:
        """Replace the rules of CORS, for requests that have not begun."""
        self._cors = cors
        self._around = CorsByOrigin(self._stack, cors) if cors and self._stack is not None else self._stack

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._around is not None
        await self._around(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        return openapi_document()


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document, `openapi.json` beside this module, which a test compares with the routes."""
    document: dict[str, Any] = json.loads((files("service.http") / "openapi.json").read_text(encoding="utf-8"))
    return document
