"""Runs a whole service without Kafka and Redis, for tests of what it answers before it needs them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn

from deploy.stack import free_port
from service.app import build_router
from service.contract import Rules
from service.core.settings import Settings
from service.events.loaded_rules import LoadedRules
from service.events.schemas import Schemas
from service.http.limits import GuardedProtocol
from service.http.protocol import DirectRoutes, protocol_of


@contextlib.asynccontextmanager
async def serving(transport: str) -> AsyncIterator[int]:
    """Run a service whose POSTs go below ASGI (`direct`), or through it (`asgi`); yields its port."""
    settings = Settings(kafka="127.0.0.1:1", redis="redis://127.0.0.1:1/0", instance="test", request_timeout_ms=1_000)
    router = build_router(settings, LoadedRules(Rules(), Schemas(Rules()), ()), lambda _: None)
    app, posts = router.app, router.current.endpoint
    direct = protocol_of(DirectRoutes(posts.routes, posts.guard.body_bytes_max, posts.guard.bodies))
    port, protocol = free_port(), direct if transport == "direct" else GuardedProtocol
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, http=protocol, lifespan="on", log_config=None, access_log=False, loop="uvloop")
    )
    running = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await running
