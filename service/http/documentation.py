"""The page /docs: Swagger UI over the OpenAPI document, from files of this package, so that it needs no internet."""

import asyncio
import gzip
from functools import cache
from importlib.resources import files
from typing import Final

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from service.http.asgi import send_whole

VERSION: Final = "5.35.0"
"""Of Swagger UI; its licence (Apache-2.0) is beside its files, which are compressed."""
ASSETS: Final = {
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "swagger-ui.css": b"text/css; charset=utf-8",
}
# The files have the version in their path.
_CACHED: Final = (b"cache-control", b"public, max-age=31536000, immutable")


def routes() -> list[Route]:
    """Make the routes of the page and of its files."""
    assets = {f"/docs/{VERSION}/{name}": _Asset(name) for name in ASSETS}
    return [
        Route("/docs", _page, include_in_schema=False),
        *(Route(path, file, methods=["GET"], include_in_schema=False) for path, file in assets.items()),
    ]


async def _page(_: Request) -> Response:
    """Return the page. Its addresses are relative, for a proxy that serves it below another path."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Fencepost",
        swagger_js_url=f"docs/{VERSION}/swagger-ui-bundle.js",
        swagger_css_url=f"docs/{VERSION}/swagger-ui.css",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},  # else a site on the internet is asked to validate the document
    )


class _Asset:
    """A file of Swagger UI, compressed for clients that say that they can decode it."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", ASSETS[self._name]), (b"vary", b"accept-encoding"), _CACHED]
        body = await asyncio.to_thread(asset, self._name)
        if any(name == b"accept-encoding" and b"gzip" in coding for name, coding in scope["headers"]):
            headers.append((b"content-encoding", b"gzip"))
        else:
            body = await asyncio.to_thread(gzip.decompress, body)
        await send_whole(send, 200, headers, body)


@cache
def asset(name: str) -> bytes:
    """Read a file of Swagger UI, in gzip."""
    return (files("service.http") / "swagger_ui" / f"{name}.gz").read_bytes()
