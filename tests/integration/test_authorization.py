"""Tests that no caller can read, replay, block or probe the keys of another: every route, every pair of callers.

Callers by static tokens and by JSON Web Tokens, some of one name, and a webhook source use the same idempotency keys.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from service.claims.state_codec import pack
from service.claims.states import Claimed
from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id, member_id
from tests.conftest import MakeTopic
from tests.integration.conftest import Stage
from tests.integration.judge import read_committed
from tests.unit.identity.signing import Signer, key_set

CORP, BRANCH, STRANGER = Signer.new("corp"), Signer.new("branch"), Signer.new("corp")
# A term that no slot has had yet: a claim of it is in progress for ever.
LATER_TERM = 1 << 40


def token(signer: Signer, iss: str, name: str, life_s: int = 86_400) -> str:
    return signer.sign({"iss": iss, "aud": "fencepost", "sub": name, "exp": int(time.time()) + life_s})


# By the scope of a caller's keys, its token.
TOKENS = {
    "shop": "token-of-shop",
    "till": "token-of-till",
    "issuer:corp:shop": token(CORP, "https://corp", "shop"),
    "issuer:corp:till": token(CORP, "https://corp", "till"),
    "issuer:branch:shop": token(BRANCH, "https://branch", "shop"),
    "issuer:branch:corp:shop": token(BRANCH, "https://branch", "corp:shop"),
    "issuer:corp:source:shop": token(CORP, "https://corp", "source:shop"),
}
SOURCE = "source:shop"
# Tokens of nobody.
REFUSED = {
    "no": "",
    "unknown": "token-of-nobody",
    "expired": token(CORP, "https://corp", "shop", -300),
    "forged": token(STRANGER, "https://corp", "shop"),
    "of another issuer's key": token(Signer(BRANCH.key, "corp", "ES256"), "https://corp", "shop"),
}


class Answer(NamedTuple):
    """An answer to one event: its status, whether it is a replay, where the record is, and the problem's code."""

    status: int
    replayed: bool
    place: object
    code: str


Write = Callable[[str, str, str], Awaitable[Answer]]
"""Writes a value under a key, with a token."""


@dataclass
class Api:
    """The service's routes, called with a token."""

    http: httpx.AsyncClient
    url: str
    topic: str
    strict: str  # a topic whose schema takes no string

    @property
    def routes(self) -> list[Write]:
        """All that write an event."""
        return [
            self.event,
            self.cloudevent,
            self.quarantined,
            self.batch,
            self.lines,
            self.atomic,
            self.v2,
            self.v3,
            self.v3_batch,
            self.waiting,
        ]

    async def post(self, path: str, token: str, body: object, **headers: str) -> httpx.Response:
        """Post JSON, or text as it is."""
        content = body if isinstance(body, str) else json.dumps(body)
        sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        if token:
            sent["authorization"] = f"Bearer {token}"
        return await self.http.post(f"{self.url}{path}", content=content, headers=sent)

    async def state(self, token: str, key: str, method: str = "GET") -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await self.http.request(method, f"{self.url}/events/{key}", headers=headers)

    async def event(self, token: str, key: str, value: str) -> Answer:
        body = {"topic": self.topic, "value": value}
        return _of_event(await self.post("/events", token, body, idempotency_key=key))

    async def waiting(self, token: str, key: str, value: str) -> Answer:
        body = {"topic": self.topic, "value": value}
        return _of_event(await self.post("/events", token, body, idempotency_key=key, prefer="wait=4"))

    async def cloudevent(self, token: str, key: str, value: str) -> Answer:
        attributes = {"ce_specversion": "1.0", "ce_id": key, "ce_source": "/s", "ce_type": "t", "ce_topic": self.topic}
        return _of_event(await self.post("/events", token, value, content_type="text/plain", **attributes))

    async def quarantined(self, token: str, key: str, value: str) -> Answer:
        body = {"topic": self.strict, "value": value}
        return _of_event(await self.post("/events", token, body, idempotency_key=key))

    async def batch(self, token: str, key: str, value: str) -> Answer:
        event = {"topic": self.topic, "value": value, "idempotency_key": key}
        return _of_result(await self.post("/events/batch", token, {"events": [event]}))

    async def lines(self, token: str, key: str, value: str) -> Answer:
        line = json.dumps({"topic": self.topic, "value": value, "idempotency_key": key}) + "\n"
        return _of_result(await self.post("/events/batch", token, line, content_type="application/x-ndjson"))

    async def atomic(self, token: str, key: str, value: str) -> Answer:
        body = {"atomic": True, "events": [{"topic": self.topic, "value": value}]}
        return _of_event(await self.post("/events/batch", token, body, idempotency_key=key))

    async def v2(self, token: str, key: str, value: str) -> Answer:
        kind = "application/vnd.kafka.json.v2+json"
        body = {"records": [{"value": value}]}
        return _of_event(await self.post(f"/topics/{self.topic}", token, body, content_type=kind, idempotency_key=key))

    async def v3_batch(self, token: str, key: str, value: str) -> Answer:
        body = {"entries": [{"id": "0", "value": {"type": "JSON", "data": value}}]}
        path = f"/v3/clusters/any/topics/{self.topic}/records:batch"
        answer = await self.post(path, token, body, idempotency_key=key)
        body = answer.json()
        if answer.status_code != 207:
            return _of_event(answer)
        (entry,) = body["successes"] + body["failures"]
        replayed = answer.headers.get("idempotent-replayed") == "true"
        return Answer(int(str(entry.get("error_code", 200))[:3]), replayed, entry, "")

    async def v3(self, token: str, key: str, value: str) -> Answer:
        body = {"value": {"type": "JSON", "data": value}}
        path = f"/v3/clusters/any/topics/{self.topic}/records"
        answer = await self.post(path, token, body, idempotency_key=key)
        status = int(str(answer.json()["error_code"])[:3])  # that of the record
        return _of_event(answer)._replace(status=status)


def _of_event(answer: httpx.Response) -> Answer:
    body = answer.json()
    names = ("id", "topic", "partition", "partition_id", "offset", "offsets", "results")
    place = {name: body[name] for name in names if name in body}
    replayed = answer.headers.get("idempotent-replayed") == "true"
    return Answer(answer.status_code, replayed, place, body.get("code", ""))


def _of_result(answer: httpx.Response) -> Answer:
    body = answer.json()
    if answer.status_code != 207:
        return Answer(answer.status_code, False, {}, body["code"])
    (result,) = body.get("results", [body])
    problem = result.get("problem", {})
    place = {name: result.get(name) for name in ("id", "partition", "offset")}
    return Answer(result["status"], result.get("replayed", False), place, problem.get("code", ""))


def rules_for(folder: Path, topic: str, strict: str, letters: str) -> Path:
    (folder / "corp.json").write_bytes(key_set(CORP))
    (folder / "branch.json").write_bytes(key_set(BRANCH))
    (folder / "number.json").write_text('{"type": "number"}')
    path = folder / "rules.toml"
    callers = "".join(
        f'[[callers]]\nname = "{name}"\ntoken_sha256 = "{hashlib.sha256(TOKENS[name].encode()).hexdigest()}"\n'
        for name in ("shop", "till")
    )
    issuers = "".join(
        f'[[issuers]]\nname = "{name}"\nissuer = "https://{name}"\naudience = "fencepost"\n'
        f'jwks_file = "{name}.json"\nalgorithms = ["ES256"]\n'
        for name in ("corp", "branch")
    )
    path.write_text(
        f"""{callers}{issuers}
[[sources]]
name = "shop"
topic = "{topic}"
signature = "none"
idempotency_key = {{ header = "x-key" }}
[[topics]]
pattern = "{strict}"
schema = "number.json"
quarantine = "{letters}"
"""
    )
    return path


@pytest.fixture
async def api(stage: Stage, topic: str, make_topic: MakeTopic, tmp_path: Path) -> Api:
    strict, letters = make_topic(), make_topic()
    service = await stage.started(rules=rules_for(tmp_path, topic, strict, letters))
    return Api(stage.client.http, service.url, topic, strict)


async def test_each_caller_is_alone_with_its_keys(api: Api, stage: Stage) -> None:
    routes = api.routes

    async def go(route: Write) -> None:
        key = f"key-of-{route.__name__}"
        of_source = await api.http.post(f"{api.url}/sources/shop", content=b"x", headers={"x-key": key})
        assert (of_source.status_code, of_source.headers.get("idempotent-replayed")) == (201, None)
        written: dict[str, Answer] = {}
        for scope, token in TOKENS.items():
            await nothing_is_known(scope, key)
            answer = written[scope] = await route(token, key, f"value of {scope}")
            wanted = 422 if route == api.quarantined else 200 if route in (api.v2, api.v3, api.v3_batch) else 201
            assert (answer.status, answer.replayed) == (wanted, False), (route.__name__, scope, answer)
        assert len({str(answer.place) for answer in written.values()}) == len(TOKENS)
        for scope, token in TOKENS.items():
            again = await route(token, key, f"value of {scope}")
            assert again == written[scope]._replace(replayed=True), (route.__name__, scope, again)

    async def nothing_is_known(scope: str, key: str) -> None:
        """Check that the state of a key that others have used is, to a caller, that of a key that nobody has used."""
        for method in ("GET", "HEAD"):
            used, unused = [await api.state(TOKENS[scope], name, method) for name in (key, f"never-{key}"[: len(key)])]
            assert (used.status_code, used.content) == (unused.status_code, unused.content) == (404, used.content)
            assert without_date(used) == without_date(unused)

    await asyncio.gather(*map(go, routes))
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [api.topic])
    ids = [Stamp.decode(dict(record.headers)[STAMP_HEADER]).id for record in records]
    single = [api.event, api.batch, api.lines, api.waiting]
    expected = [event_id(f"key-of-{route.__name__}", scope) for route in single for scope in TOKENS]
    expected += [event_id("/s key-of-cloudevent", scope) for scope in TOKENS]
    expected += [
        member_id(f"key-of-{route.__name__}", 0, scope) for route in (api.atomic, api.v2, api.v3) for scope in TOKENS
    ]
    expected += [member_id("key-of-v3_batch", "0", scope) for scope in TOKENS]  # the entry's own id
    expected += [event_id(f"key-of-{route.__name__}", SOURCE) for route in routes]
    assert sorted(ids) == sorted(expected)


def without_date(answer: httpx.Response) -> list[tuple[str, str]]:
    return [(name, text) for name, text in answer.headers.items() if name != "date"]


async def test_no_caller_waits_for_anothers_write(api: Api, stage: Stage) -> None:
    """Each caller in turn has writes in progress that never end; all others write under the same keys at once."""
    slot = min(stage.leases())
    routes = [route for route in api.routes if route != api.cloudevent]  # its key is made of source and id
    at_ms = int(time.time() * 1000)
    held = pack(Claimed(slot, LATER_TERM, at_ms, b"f" * 8))
    with stage.redis.client() as store:
        for owner in (*TOKENS, SOURCE):
            for route in routes:
                key = f"{route.__name__}-of-{owner}"
                for id in (event_id(key, owner), member_id(key, 0, owner), member_id(key, "0", owner)):
                    store.set(f"{{{stage.namespace}:0}}k".encode() + id, held, px=600_000)

    async def go(route: Write, owner: str, scope: str) -> None:
        key = f"{route.__name__}-of-{owner}"
        if route == api.waiting and owner == scope:
            return  # it waits, as it asks
        answer = await route(TOKENS[scope], key, "x")
        if owner == scope:
            assert answer.status in (409, 500, 503), (route.__name__, answer)  # v3's code is 50003
        else:
            assert answer.status in (200, 201, 422), (route.__name__, owner, scope, answer)
            assert (answer.replayed, answer.code) in ((False, ""), (False, "schema-mismatch"))

    began = time.monotonic()
    for owner in (*TOKENS, SOURCE):
        await asyncio.gather(*[go(route, owner, scope) for route in routes for scope in TOKENS])
    assert time.monotonic() - began < 20.0  # none of the 49 requests with `Prefer: wait=4` has waited


async def test_who_is_nobody_learns_and_writes_nothing(api: Api, stage: Stage) -> None:
    body = {"topic": api.topic, "value": 1}
    assert (await api.post("/events", TOKENS["shop"], body, idempotency_key="k")).status_code == 201
    for why, token in REFUSED.items():
        for route in api.routes:
            answer = await route(token, "k", "x")
            assert answer.status == 401, (why, route.__name__, answer)
        for method in ("GET", "HEAD"):
            for key in ("k", "unused"):
                state = await api.state(token, key, method)
                assert state.status_code == 401, (why, method)
                assert not token or token not in state.text
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [api.topic, api.strict])
    assert len(records) == 1
