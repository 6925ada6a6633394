"""Tests callers whom JSON Web Tokens name: what is kept of a token, and how requests wait for keys."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from service.contract import CallerRule, IssuerRule, Rules
from service.core.metrics import Telemetry
from service.core.problems import FORBIDDEN_TOPIC, INVALID_TOKEN, UNAUTHORIZED, Problem
from service.core.settings import Settings
from service.http import token_callers as module
from service.http.caller import Caller
from service.http.callers import TOKEN_CHARS_MAX, Callers
from service.http.events import EventsEndpoint
from service.http.lines import lines_exchange
from service.http.produce import ProduceRequests
from service.http.produce_listing import ListingParts, ProduceListing
from service.http.request_guard import RequestGuard
from service.http.streaming import StreamEndpoint
from service.http.token_callers import TokenCallers
from service.identity import issuer_keys
from service.identity.refusals import JwksPending
from service.identity.tokens import Issuers, VerifiedToken
from service.pipeline.admission import Admission
from tests.unit.http.apps import add_routes, produce_routes
from tests.unit.http.test_events import Commits
from tests.unit.http.test_rates import sent
from tests.unit.identity.signing import CLAIMS, ISSUER, NOW, Published, Signer, key_set

SIGNER, NEWER = Signer.new(), Signer.new("k2")
RULE = IssuerRule(
    "corp", ISSUER, ("fencepost",), algorithms=("ES256",), topics=("orders*",), topics_claim=("topics",), rate=2
)
STATIC = CallerRule("alice", (hashlib.sha256(b"s3cret").hexdigest(),))
SENT = {"idempotency-key": "k", "content-type": "application/json"}


class World:
    """Callers by tokens, at a time that the test chooses."""

    def __init__(self, rule: IssuerRule = RULE, static: Sequence[CallerRule] = (STATIC,)) -> None:
        self.now = float(NOW)
        self.published = Published(key_set(SIGNER))
        self.issuers = Issuers([rule], Telemetry(), now=lambda: self.now, sources={rule.name: self.published})
        self.tokens = TokenCallers(self.issuers, now=lambda: self.now)
        self.callers = Callers(static, tokens=self.tokens)

    async def of(self, token: str) -> Caller:
        return await self.callers.find(f"Bearer {token}")


def token(signer: Signer = SIGNER, **changes: Any) -> str:
    return signer.sign({**CLAIMS, "topics": ["*"], **changes})


async def test_a_token_names_a_caller_whom_no_rule_of_a_static_one_can_name() -> None:
    world = World()
    assert (await world.of("s3cret")).scope == "alice"
    caller = await world.of(token())
    assert (caller.scope, caller.sender.scope) == ("issuer:corp:alice", "issuer:corp:alice")
    with pytest.raises(Problem) as caught:
        await world.of("another")
    assert caught.value.kind is INVALID_TOKEN


async def test_without_static_callers_a_token_is_asked_for() -> None:
    callers = World(static=()).callers
    assert not callers.are_missing
    for header in (None, "Basic s3cret", f"Basic {token()}", token()):
        with pytest.raises(Problem) as caught:
            callers.of(header)
        assert caught.value.kind is UNAUTHORIZED


async def test_a_verified_token_is_kept_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    caller = await world.of(token())
    verify = world.issuers.verify
    verified: list[str] = []

    def counted(text: str) -> VerifiedToken:
        verified.append(text)
        return verify(text)

    monkeypatch.setattr(world.issuers, "verify", counted)
    once = token(sub="bob")
    bob = await world.of(once)
    assert [await world.of(once) for _ in range(3)] == [bob] * 3
    assert verified == [once]
    caller.check_validity()
    world.now = NOW + 60 + RULE.leeway_s
    with pytest.raises(Problem, match="exp: the token has expired"):
        await world.of(once)
    with pytest.raises(Problem, match="exp: the token has expired"):
        caller.check_validity()


async def test_a_token_is_verified_again_after_a_change_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_keys, "REFETCH_LEAST_S", 0.0)
    world = World()
    text = token()
    await world.of(text)
    world.published.content = key_set(NEWER)
    await world.of(token(NEWER))
    with pytest.raises(Problem):
        await world.of(text)


async def test_a_stream_goes_on_while_the_issuer_has_the_key_of_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_keys, "REFETCH_LEAST_S", 0.0)
    world = World()
    caller = await world.of(token())

    async def publish(content: bytes) -> None:
        world.published.content = content
        with contextlib.suppress(Problem):
            await world.of(token(Signer.new("unknown")))  # has the keys read

    await publish(key_set(NEWER, SIGNER))
    caller.check_validity()
    for content in (key_set(NEWER), key_set(NEWER, SIGNER._replace(key=Signer.new().key)), key_set()):
        await publish(content)
        with pytest.raises(Problem, match="the issuer corp has withdrawn the token's key") as caught:
            caller.check_validity()
        assert caught.value.kind is INVALID_TOKEN


async def test_all_tokens_of_a_caller_share_its_rate_and_nobody_elses() -> None:
    world = World()
    first, second, bob = [await world.of(text) for text in (token(jti="1"), token(jti="2"), token(sub="bob"))]
    assert first is not second
    assert [await sent(caller) for caller in (first, second, first, second)] == [0, 0, 1, 1]
    assert await sent(bob) == 0
    assert first.burst == 2


async def test_a_caller_writes_to_topics_that_rule_and_token_allow() -> None:
    caller = await World().of(token(topics=["*.eu", "*.us"]))
    caller.check("orders.eu")
    for topic in ("orders.asia", "audit.eu"):
        with pytest.raises(Problem) as caught:
            caller.check(topic)
        assert caught.value.kind is FORBIDDEN_TOPIC


async def test_kept_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_BYTES_MAX", 3 * module.TOKEN_BYTES)
    world = World()
    for n in range(5):
        await world.of(token(sub=f"s{n}"))
    assert len(world.tokens) == 2  # they have texts too


def test_a_long_token_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    callers = World().callers
    monkeypatch.setattr(hashlib, "sha256", None)
    with pytest.raises(Problem, match=f"a token has at most {TOKEN_CHARS_MAX} characters"):
        callers.of("Bearer " + "a" * TOKEN_CHARS_MAX)


# --------------------------------------------------------------------------------------------------------- requests


def app_of(world: World) -> FastAPI:
    """Make the routes that ask for a caller."""
    app = FastAPI()
    posts = EventsEndpoint(
        RequestGuard(Settings(rules="rules"), world.callers),
        cast(Admission, Commits()),
        Telemetry(),
        Settings(rules="rules").key_ttl_s,
    )
    add_routes(app, posts)
    produce = ProduceRequests(posts.guard, posts.admission, posts.telemetry, Rules(), 1)
    app.router.routes += [*produce_routes(produce), *ProduceListing(posts.guard, cast(ListingParts, None)).routes()]
    return app


EVERY_ROUTE = [
    ("POST", "/events", SENT),
    ("POST", "/events/batch", SENT),
    ("POST", "/events/batch", {**SENT, "content-type": "application/x-ndjson"}),
    ("POST", "/topics/orders", {**SENT, "content-type": "application/vnd.kafka.json.v2+json"}),
    ("POST", "/v3/clusters/c/topics/orders/records", {**SENT, "content-length": "2"}),
    ("POST", "/v3/clusters/c/topics/orders/records", {**SENT, "transfer-encoding": "chunked"}),
    ("GET", "/events/k", {}),
    ("HEAD", "/events/k", {}),
    ("GET", "/topics", {}),
    ("GET", "/topics/orders", {}),
    ("GET", "/v3/clusters", {}),
    ("GET", "/v3/clusters/c/topics/orders/partitions/0", {}),
]


async def answer_of(
    http: httpx.AsyncClient, request: tuple[str, str, dict[str, str]], authorization: str
) -> httpx.Response:
    method, path, headers = request

    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    content: Any = chunks() if "transfer-encoding" in headers else b"{}" if method == "POST" else None
    return await http.request(method, path, headers={**headers, "authorization": authorization}, content=content)


@pytest.mark.parametrize("request_", EVERY_ROUTE, ids=lambda each: f"{each[0]} {each[1]}")
async def test_each_route_waits_for_keys_and_tells_what_is_wrong_with_a_token(
    request_: tuple[str, str, dict[str, str]],
) -> None:
    world = World()
    expired, unknown = token(exp=NOW - 100), token(NEWER)
    transport = httpx.ASGITransport(app_of(world))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        refused = await answer_of(http, request_, f"Bearer {expired}")  # waited for the keys, and found that
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Bearer error="invalid_token"')
        assert world.published.reads == 1
        missing = await answer_of(http, request_, "Bearer")
        assert missing.status_code == 401
        world.published.content = "no route"
        away = await answer_of(http, request_, f"Bearer {unknown}")
        assert (away.status_code, int(away.headers["retry-after"]) > 0) == (503, True)
        if request_[0] != "HEAD":
            assert "exp: the token has expired" in refused.text
            assert "the keys of the issuer corp were read a moment ago" in away.text
        for answer in (refused, missing, away):
            assert not any(piece in answer.text for piece in (*expired.split("."), *unknown.split(".")))


async def test_a_post_whose_key_is_being_read_is_answered_when_it_is_known() -> None:
    world = World()
    admission = Commits()
    posts = EventsEndpoint(
        RequestGuard(Settings(rules="rules"), world.callers),
        cast(Admission, admission),
        Telemetry(),
        Settings(rules="rules").key_ttl_s,
    )
    app = FastAPI()
    add_routes(app, posts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        sent = [
            http.post(
                "/events",
                content=b'{"topic":"orders","value":1}',
                headers={**SENT, "idempotency-key": f"k{n}", "authorization": f"Bearer {token(sub=f's{n}')}"},
            )
            for n in range(20)
        ]
        answers = await asyncio.gather(*sent)
    assert {answer.status_code for answer in answers} == {201}
    assert world.published.reads == 1
    assert len({event.id for event in admission.events}) == 20


async def test_a_stream_ends_when_its_token_expires() -> None:
    world = World(IssuerRule("corp", ISSUER, ("fencepost",), algorithms=("ES256",)))
    guard = RequestGuard(Settings(rules="rules"), world.callers)
    endpoint = StreamEndpoint(guard, cast(Admission, Commits()), Telemetry(), lines_exchange)
    coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    def say(n: int) -> None:
        line = b'{"topic":"orders","value":1,"idempotency_key":"k%d"}\n' % n
        coming.put_nowait({"type": "http.request", "body": line, "more_body": True})

    headers = {b"host": b"x", b"content-type": b"application/x-ndjson", b"authorization": b"Bearer " + token().encode()}
    scope = {"type": "http", "http_version": "1.1", "client": None, "headers": [*headers.items()]}
    serving = asyncio.create_task(endpoint(scope, cast(Any, coming.get), send))
    say(1)
    async with asyncio.timeout(5.0):
        while len(sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        world.now = NOW + 1_000.0
        say(2)
        await serving
    lines = [json.loads(line) for line in b"".join(message.get("body", b"") for message in sent).splitlines()]
    assert [line["status"] for line in lines] == [201, 401]
    assert "what is behind the last result was not written" in lines[1]["problem"]["detail"]


def test_who_cannot_wait_for_keys_gets_a_503() -> None:
    problem = JwksPending("why", cast("asyncio.Task[None]", None))
    assert (problem.kind.status, problem.retry_after_s) == (503, 1)
