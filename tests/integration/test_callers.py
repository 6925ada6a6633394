"""Tests the callers of the rules: each has a token, keys, topics and a rate of its own."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx

from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id, member_id
from tests.conftest import MakeTopic
from tests.integration.conftest import Stage
from tests.integration.judge import read_committed

NAMES = ("shop", "shop-new", "till", "slow")


def rules_for(folder: Path, topic: str) -> Path:
    path = folder / "rules.toml"
    digests = {name: hashlib.sha256(f"token-of-{name}".encode()).hexdigest() for name in NAMES}
    path.write_text(
        f'[[callers]]\nname = "shop"\ntoken_sha256 = ["{digests["shop"]}", "{digests["shop-new"]}"]\n'
        f'[[callers]]\nname = "till"\ntoken_sha256 = "{digests["till"]}"\ntopics = ["{topic}"]\n'
        f'[[callers]]\nname = "slow"\ntoken_sha256 = "{digests["slow"]}"\nrate = 2\n'
        '[[cors]]\norigins = ["https://shop.example"]\n'
    )
    return path


async def post(stage: Stage, url: str, caller: str | None, body: Any, key: str | None = "order-1") -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = key
    if caller is not None:
        headers["Authorization"] = f"Bearer token-of-{caller}"
    return await stage.client.http.post(url, content=json.dumps(body), headers=headers)


async def test_each_caller_has_keys_of_its_own(stage: Stage, topic: str, make_topic: MakeTopic, tmp_path: Path) -> None:
    service = await stage.started(rules=rules_for(tmp_path, topic))
    url, batch = f"{service.url}/events", f"{service.url}/events/batch"
    event = {"topic": topic, "value": 1}

    refused = [await post(stage, url, None, event), await post(stage, batch, "nobody", {"events": [event]})]
    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(401, "unauthorized")] * 2
    assert refused[0].headers["www-authenticate"] == "Bearer"

    senders = ("shop", "shop", "shop-new", "till")  # shop's token is replaced between two attempts
    first, again, renewed, other = [await post(stage, url, name, event) for name in senders]
    assert [answer.status_code for answer in (first, again, renewed, other)] == [201] * 4
    assert first.content == again.content == renewed.content != other.content

    page = {"Origin": "https://shop.example"}  # of a browser, which asks first, without the token
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,idempotency-key"}
    preflight = await stage.client.http.options(url, headers={**page, **asked})
    headers = {**page, "Authorization": "Bearer token-of-shop", "Idempotency-Key": "order-1"}
    seen = await stage.client.http.post(url, json=event, headers=headers)
    assert (preflight.status_code, seen.content) == (200, first.content)
    assert preflight.headers["access-control-allow-origin"] == seen.headers["access-control-allow-origin"]
    assert "Idempotent-Replayed" in seen.headers["access-control-expose-headers"]

    elsewhere = {"topic": make_topic(), "value": 1}
    one = await post(stage, url, "till", elsewhere, "order-2")
    each = await post(stage, batch, "till", {"events": [{**elsewhere, "idempotency_key": "order-3"}]}, None)
    whole = await post(stage, batch, "till", {"atomic": True, "events": [event, elsewhere]}, "order-4")
    assert (one.status_code, whole.status_code) == (403, 403)
    assert whole.json()["detail"].startswith("events[1].topic")
    assert each.json()["results"][0]["problem"]["code"] == "forbidden-topic"

    assert (await post(stage, batch, "till", {"atomic": True, "events": [event]}, "order-5")).status_code == 201
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    written = {Stamp.decode(dict(record.headers)[STAMP_HEADER]).id for record in records}
    assert written == {event_id("order-1", "shop"), event_id("order-1", "till"), member_id("order-5", 0, "till")}

    states = [
        await stage.client.http.get(f"{url}/order-5", headers={"Authorization": f"Bearer token-of-{name}"})
        for name in ("till", "shop", "nobody")
    ]
    assert [state.status_code for state in states] == [200, 404, 401]


async def test_a_caller_past_its_rate_is_answered_429_with_retry_after_by_each_process(
    stage: Stage, topic: str, tmp_path: Path
) -> None:
    rules = rules_for(tmp_path, topic)
    services = [stage.service(rules=rules), stage.service(rules=rules, transport="asgi")]
    await stage.start(*services)
    (url, others), event = [f"{service.url}/events" for service in services], {"topic": topic, "value": 1}
    batch = {"events": [{**event, "idempotency_key": f"b{n}"} for n in range(20)]}
    written = await post(stage, f"{url}/batch", "slow", batch, None)
    assert written.status_code == 207
    await asyncio.sleep(0.1)  # the debt reaches the other process
    for refused in [await post(stage, each, "slow", event) for each in (others, url)]:
        assert (refused.status_code, refused.json()["code"]) == (429, "rate-limited")
        assert 7 <= int(refused.headers["retry-after"]) <= 10
        assert refused.headers["ratelimit-policy"] == '"events";q=2;w=1'
        assert refused.headers["ratelimit"].startswith('"events";r=0;t=')
    nothing: dict[str, Any] = {"events": []}
    for bad in (nothing, batch):  # bodies are not parsed if the request is refused anyway
        assert (await post(stage, f"{url}/batch", "slow", bad, None)).status_code == 429
    assert (await post(stage, url, "shop", event)).status_code == 201
    # The key was not used: another caller, or a later request, writes it.
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert len(records) == 21
