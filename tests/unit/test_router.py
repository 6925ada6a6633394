"""Tests that changed rules decide about the next request, on open connections too, and never about one that has begun.

Kafka and Redis are unreachable: a request that is let in is answered 503.
"""

import asyncio
import contextlib
import gc
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import uvicorn
from joserfc import jwt
from joserfc.jwk import ECKey

from deploy.stack import free_port
from service import rules_reload
from service.app import Service, build_router
from service.contract import Rules
from service.core.settings import Settings
from service.events.loaded_rules import LoadedRules, load_rules
from service.http.protocol import protocol_of
from service.router import Router
from tests.unit.fakes import until

EVENT = b'{"topic": "orders", "value": 1}'
SETTINGS = Settings(
    kafka="127.0.0.1:1", redis="redis://127.0.0.1:1/0", instance="test", rules="rules", request_timeout_ms=100
)
LET_IN, UNKNOWN = (503, "not-written"), (401, "unauthorized")


def loaded(folder: Path, *names: str, more: str = "") -> LoadedRules:
    path = folder / "rules.toml"
    callers = (
        f'[[callers]]\nname = "{name}"\ntoken_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{more}'
        for name in names
    )
    path.write_text("".join(callers))
    return load_rules(str(path))


@pytest.fixture(params=["direct", "asgi"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Router, int]]:
    router = build_router(SETTINGS, loaded(tmp_path, "shop"), lambda _: None)
    posts = router.direct if request.param == "direct" else None
    config = uvicorn.Config(
        router.app, port=free_port(), http=protocol_of(posts), lifespan="on", log_config=None, loop="uvloop"
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    yield router, config.port
    server.should_exit = True
    await running


class Connection:
    """A connection that is kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self._writer.write(part)
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))

    async def ask(
        self, token: str, method: str = "POST", path: str = "/events", more: str = ""
    ) -> tuple[int, str | int]:
        await self.send(*request_of(token, method, path, more))
        status, _, body = await self.answer()
        return status, json.loads(body).get("code") or json.loads(body)["error_code"]

    def close(self) -> None:
        self._writer.close()


def request_of(token: str, method: str = "POST", path: str = "/events", more: str = "") -> tuple[bytes, bytes]:
    """Make the head and the body of a request."""
    body = EVENT if method == "POST" else b""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nidempotency-key: k\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode(), body


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield connection
    finally:
        connection.close()


async def test_changed_rules_decide_about_the_next_request_of_each_route(
    served: tuple[Router, int], tmp_path: Path
) -> None:
    router, port = served
    async with connected(port) as client:
        for _ in range(2):  # whole, and as a second request of its connection
            assert await client.ask("shop") == LET_IN
            assert await client.ask("till") == UNKNOWN
        router.build(loaded(tmp_path, "till"))()
        assert await client.ask("shop") == UNKNOWN
        assert await client.ask("till") == LET_IN
        assert await client.ask("shop", "GET", "/events/k") == UNKNOWN
        assert await client.ask("till", "GET", "/events/k") == (503, "store-incomplete")
        assert await client.ask("shop", path="/topics/orders") == (401, 40101)
        assert await client.ask("shop", "GET", "/topics") == (401, 40101)
        assert await client.ask("shop", path="/events/batch", more="content-encoding: identity\r\n") == UNKNOWN


async def test_the_running_app_takes_a_file_that_changed_before_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_reload, "LOOK_S", 0.01)
    settings = replace(SETTINGS, rules=str(tmp_path / "rules.toml"))
    router = build_router(settings, loaded(tmp_path, "shop"), lambda _: None)
    changed = loaded(tmp_path, "till")
    async with router.app.router.lifespan_context(router.app):
        await until(lambda: router.current.loaded.sha256 == changed.sha256)


async def test_the_retention_of_each_rules_in_between_counts_for_the_keys_of_then(
    tmp_path: Path,
) -> None:
    settings = replace(SETTINGS, key_ttl_s=86_400)
    longer = '[[topics]]\npattern = "*"\nkey_ttl_s = 900000\n'
    router = build_router(settings, loaded(tmp_path, "shop", more=longer), lambda _: None)
    for more in ("", longer):
        router.build(loaded(tmp_path, "shop", more=more))()
    made_ms = int(time.time() * 1000) - 2 * 86_400_000
    key = f"{made_ms >> 16:08x}-{made_ms & 0xFFFF:04x}-7000-8000-000000000000"
    assert router.current.endpoint.admission.checks.keys.is_old(key, "orders")


async def test_a_request_that_has_begun_keeps_its_rules(served: tuple[Router, int], tmp_path: Path) -> None:
    router, port = served
    head, body = request_of("shop")
    async with connected(port) as client, connected(port) as other:
        await client.send(head, body[:5])
        assert await other.ask("till") == UNKNOWN  # the head was read before this was answered
        router.build(loaded(tmp_path, "till"))()
        assert await other.ask("till") == LET_IN
        await client.send(body[5:])
        status, _, _ = await client.answer()
        assert status == LET_IN[0]
        assert await client.ask("shop") == UNKNOWN


async def test_a_stream_that_has_begun_keeps_its_rules(served: tuple[Router, int], tmp_path: Path) -> None:
    router, port = served
    head = (
        b"POST /events/batch HTTP/1.1\r\nhost: x\r\nauthorization: Bearer shop\r\ntransfer-encoding: chunked\r\n"
        b"content-type: application/x-ndjson\r\n\r\n"
    )
    line = b'{"topic": "orders", "value": 1, "idempotency_key": "a"}\n'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    async with asyncio.timeout(20):
        for _ in range(3):
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            assert b'"code":"not-written"' in await reader.readuntil(b'"a"}\n')
            router.build(loaded(tmp_path, "till"))()
        writer.write(b"0\r\n\r\n")
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"\r\n0\r\n\r\n")
        writer.write(b"".join(request_of("shop")))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_web_pages_may_be_allowed_and_forbidden_on_an_open_connection(
    served: tuple[Router, int], tmp_path: Path
) -> None:
    router, port = served
    page = request_of("shop", more="origin: https://shop.example\r\n")
    cors = '[[cors]]\norigins = ["https://shop.example"]\n'
    async with connected(port) as client:
        for rules in ("", cors, ""):
            router.build(loaded(tmp_path, "shop", more=rules))()
            await client.send(*page)
            status, headers, _ = await client.answer()
            assert (status, "access-control-allow-origin" in headers) == (503, bool(rules))


async def test_a_rate_is_not_given_anew_with_changed_rules(served: tuple[Router, int], tmp_path: Path) -> None:
    router, port = served
    async with connected(port) as client:
        router.build(loaded(tmp_path, "shop", more="rate = 0.01\n"))()
        assert await client.ask("shop") == LET_IN
        assert await client.ask("shop") == (429, "rate-limited")
        router.build(loaded(tmp_path, "shop", "till", more="rate = 0.01\n"))()
        assert await client.ask("shop") == (429, "rate-limited")
        assert await client.ask("till") == LET_IN


async def test_requests_share_the_bounds_of_the_process_whatever_their_rules(
    served: tuple[Router, int], tmp_path: Path
) -> None:
    router, _ = served
    before = router.current
    router.build(loaded(tmp_path, "till"))()
    after = router.current
    assert after.endpoint is not before.endpoint
    assert after.endpoint.guard.bodies is before.endpoint.guard.bodies
    assert after.endpoint.guard.stopping is before.endpoint.guard.stopping
    assert after.endpoint.admission is not before.endpoint.admission
    await asyncio.wait_for(before.endpoint.admission.drain(), 10)
    assert not after.endpoint.admission.is_accepting


def reachable(roots: Iterable[object]) -> Iterator[object]:
    """List what these refer to, but not through a whole service, which has the parts of its first rules."""
    seen: set[int] = set()
    left = [*roots]
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, Service | ModuleType | type | asyncio.AbstractEventLoop):
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, FunctionType):  # not its module's globals
            left += [found.__closure__, found.__defaults__, found.__kwdefaults__]
        else:
            left += gc.get_referents(found)


async def test_nothing_that_decides_about_requests_refers_to_the_rules_before(tmp_path: Path) -> None:
    """A part that kept them would judge some requests by two files."""
    router = build_router(SETTINGS, loaded(tmp_path, "shop"), lambda _: None)
    router.build(loaded(tmp_path, "till"))()
    current = router.current
    parts = [current.callers, current.endpoint, current.sources, current.routes, router.direct.routes]
    found = {id(each): each for each in reachable(parts) if isinstance(each, Rules)}
    assert [*found.values()] == [current.loaded.rules]


ISSUER = '[[issuers]]\nname = "corp"\nissuer = "https://id.example"\naudience = "fencepost"\njwks_file = "keys.json"\n'


async def test_the_keys_of_issuers_are_read_on_until_an_issuer_changes(
    served: tuple[Router, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.token_callers.ISSUERS_KEPT_S", 0.0)
    router, port = served
    key = ECKey.generate_key("P-256", {"kid": "1"})
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
    claims = {"iss": "https://id.example", "aud": "fencepost", "sub": "till", "exp": int(time.time()) + 600}
    token = jwt.encode({"alg": "ES256", "kid": "1"}, claims, key, algorithms=["ES256"])
    issuer = ISSUER + 'algorithms = ["ES256"]\n'
    async with connected(port) as client:
        for more, answer in (
            ("", UNKNOWN),
            (issuer, LET_IN),
            (issuer + '[[topics]]\npattern = "a"\n', LET_IN),
            (issuer + "leeway_s = 10\n", LET_IN),
            ("", UNKNOWN),
        ):
            before = router.current.callers.tokens
            router.build(loaded(tmp_path, "shop", more=more))()
            after = router.current.callers.tokens
            if before is not None and after is not None:
                after.of(token, b"")  # the keys are there at once, else JwksPending
            assert await client.ask(token) == answer, more
            assert (after is before) is ("topics" in more or before is after is None), more
