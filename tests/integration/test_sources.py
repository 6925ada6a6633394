"""Tests webhook sources: deliveries that the senders' own libraries sign, sent twice, are in Kafka once."""

import asyncio
import base64
import hashlib
import hmac
import json
import random
from datetime import UTC, datetime
from pathlib import Path

import httpx
import standardwebhooks
import stripe

from deploy.examples import stripe_webhook
from service.contract import Rules
from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id
from tests.conftest import MakeTopic
from tests.integration.conftest import Stage
from tests.integration.judge import ledger_faults, read_committed

OLD, NEW = "whsec_b2xkIG9sZCBvbGQgb2xk", "whsec_bmV3IG5ldyBuZXcgbmV3"


def rules_for(folder: Path, charges: str, customers: str, orders: str = "orders", letters: str = "letters") -> Path:
    (folder / "order.json").write_text('{"type": "object", "required": ["total"]}')
    (folder / "old.secret").write_text(f"{OLD}\n")
    (folder / "new.secret").write_text(f"{NEW}\n")
    path = folder / "rules.toml"
    path.write_text(
        f"""
[[sources]]
name = "stripe"
topic_pointer = "/type"
topics = {{ "charge.succeeded" = "{charges}", "customer.created" = "{customers}" }}
record_key = "/data/object/customer"
idempotency_key = {{ pointer = "/id" }}
signature = {{ scheme = "stripe", secret_files = ["new.secret", "old.secret"] }}
key_ttl_s = 345600
quarantine = "{letters}"

[[sources]]
name = "users"
topic = "{customers}"
idempotency_key = {{ header = "webhook-id" }}
keep_headers = ["Webhook-Id"]
signature = {{ scheme = "standard-webhooks", secret_files = ["new.secret"] }}

[[sources]]
name = "forms"
topic = "{charges}"
idempotency_key = {{ sha256 = "body" }}
signature = {{ scheme = "hmac", secret_files = ["old.secret"], header = "X-Sign", encoding = "base64" }}

[[topics]]
pattern = "{orders}"
schema = "order.json"
quarantine = "{letters}"

[[callers]]
name = "shop"
token_sha256 = "{hashlib.sha256(b"token").hexdigest()}"
"""
    )
    return path


def by_stripe(body: str, secret: str) -> dict[str, str]:
    return {"stripe-signature": stripe.WebhookSignature.generate_signature_header(body, secret)}


def by_standard_webhooks(id: str, body: str) -> dict[str, str]:
    at = datetime.now(UTC)
    signature = standardwebhooks.Webhook(NEW).sign(id, at, body)
    return {"webhook-id": id, "webhook-timestamp": str(int(at.timestamp())), "webhook-signature": signature}


async def test_a_delivery_that_is_sent_again_is_written_once(
    own_stage: Stage, topic: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    stage = own_stage
    customers, orders, letters = make_topic(), make_topic(), make_topic(2)
    rules = rules_for(tmp_path, topic, customers, orders, letters)
    services = [stage.service(rules=rules), stage.service(rules=rules, transport="asgi")]
    await stage.start(*services)

    async def post(source: str, body: str, headers: dict[str, str], service: int = 0) -> httpx.Response:
        content_type = {"content-type": "application/json"}
        url = f"{services[service].url}/sources/{source}"
        return await stage.client.http.post(url, content=body.encode(), headers=content_type | headers)

    # Stripe signs each attempt again, here with the secrets before and after it is replaced, to another process.
    charge = '{"id": "evt_1", "type": "charge.succeeded", "data": {"object": {"customer": "cus_7"}}}'
    customer = '{"id": "evt_2", "type": "customer.created", "data": {"object": {}}}'
    first = [await post("stripe", body, by_stripe(body, OLD)) for body in (charge, customer)]
    again = [await post("stripe", body, by_stripe(body, NEW), service=1) for body in (charge, customer)]
    assert [answer.status_code for answer in first + again] == [201] * 4
    assert [answer.content for answer in first] == [answer.content for answer in again]
    assert [answer.json()["topic"] for answer in first] == [topic, customers]
    assert [answer.headers.get("idempotent-replayed") for answer in (*first, *again)] == [None, None, "true", "true"]

    # Copies that arrive at once, at two processes.
    user = '{"type": "user.created"}'
    copies = await asyncio.gather(*[post("users", user, by_standard_webhooks("evt_1", user), n % 2) for n in range(6)])
    assert [(copy.status_code, copy.content) for copy in copies] == [(201, copies[0].content)] * 6
    form = "name=é&n=1"
    signature = hmac.digest(OLD.encode(), form.encode(), "sha256")
    sign = {"x-sign": base64.b64encode(signature).decode(), "content-type": "text/plain"}
    assert [(await post("forms", form, sign, n)).status_code for n in (0, 1)] == [201, 201]

    deleted = customer.replace("created", "deleted").replace("evt_2", "evt_3")
    refused = [
        await post("stripe", charge, by_stripe(customer, NEW)),
        await post("users", user, {"authorization": "Bearer token"}),
        await post("users", "{}", by_standard_webhooks("evt_1", "{}")),
        await post("nobody", user, {}),
    ]
    codes = ["bad-signature", "bad-signature", "fingerprint-mismatch", "unknown-source"]
    assert [answer.json()["code"] for answer in refused] == codes

    # What cannot be used is quarantined: the answer is the same one from each process, and after a loss of the store.
    sold = {"topic": orders, "key": "cus_7", "value": {"sum": 1}}
    of_shop = {"authorization": "Bearer token", "idempotency-key": "order-1"}

    async def quarantined(service: int) -> list[httpx.Response]:
        unusable = await post("stripe", deleted, by_stripe(deleted, OLD), service)
        return [unusable, await stage.client.http.post(f"{services[service].url}/events", json=sold, headers=of_shop)]

    first = await quarantined(0)
    problems = [answer.json() for answer in first]
    assert [(answer.status_code, problem["code"]) for answer, problem in zip(first, problems, strict=True)] == [
        (422, "unusable-body"),
        (422, "schema-mismatch"),
    ]
    assert [(problem["quarantined"], problem["topic"]) for problem in problems] == [(True, letters)] * 2
    stage.redis.flush()
    for service in (1, 0):
        again = await quarantined(service)
        while any(answer.status_code == 503 for answer in again):  # until the store is recovered
            await asyncio.sleep(0.1)
            again = await quarantined(service)
        assert [answer.content for answer in again] == [answer.content for answer in first]
        assert [answer.headers["idempotent-replayed"] for answer in again] == ["true"] * 2
    state = await stage.client.http.get(f"{services[0].url}/events/order-1", headers=of_shop)
    assert (state.json()["state"], state.json()["problem"]) == ("quarantined", problems[1])
    dead = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [letters])
    assert sorted(record.value or b"" for record in dead) == sorted([deleted.encode(), b'{"sum":1}'])
    assert sorted(dict(record.headers)["fencepost-caller"] for record in dead) == [b"shop", b"source:stripe"]
    assert {record.place for record in dead} == {(letters, each["partition"], each["offset"]) for each in problems}
    assert await asyncio.to_thread(ledger_faults, stage.kafka.bootstrap, stage.namespace, [letters]) == []

    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic, customers])
    written = {(record.place[0], Stamp.decode(dict(record.headers)[STAMP_HEADER]).id): record for record in records}
    key_of_form = hashlib.sha256(form.encode()).hexdigest()
    ids = {
        (topic, event_id("evt_1", "source:stripe")): (b"cus_7", charge),
        (customers, event_id("evt_2", "source:stripe")): (None, customer),
        (customers, event_id("evt_1", "source:users")): (None, user),
        (topic, event_id(key_of_form, "source:forms")): (None, form),
    }
    assert len(records) == len(written)
    assert {place: (record.key, (record.value or b"").decode()) for place, record in written.items()} == ids
    of_user = dict(written[customers, event_id("evt_1", "source:users")].headers)
    assert (of_user["webhook-id"], of_user["idempotency-key"]) == (b"evt_1", b"evt_1")
    assert dict(written[topic, event_id(key_of_form, "source:forms")].headers)["content-type"] == b"text/plain"
    await stage.assert_exactly_once()

    # What was first sent before the retention of its key, and is unknown, is refused over each transport.
    for process in services:
        late = {"authorization": "Bearer token", "repeatability-request-id": f"late-{process.port}"}
        for headers, status in (({"repeatability-first-sent": "Sun, 06 Nov 1994 08:49:37 GMT"}, 412), ({}, 201)):
            body = {"topic": topic, "value": 1}
            answer = await stage.client.http.post(f"{process.url}/events", json=body, headers=late | headers)
            assert answer.status_code == status
            assert answer.headers.get("repeatability-result") == ("accepted" if status == 201 else None)

    # A caller's key is another key, also if it has the same text.
    event = {"topic": topic, "value": 1}
    headers = {"authorization": "Bearer token", "idempotency-key": "evt_1"}
    answer = await stage.client.http.post(f"{services[0].url}/events", json=event, headers=headers)
    assert (answer.status_code, answer.headers.get("idempotent-replayed")) == (201, None)


class Sender:
    """A sender of signed deliveries whose connections end at random: amid its request, or before the answer."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self.cut = 0

    async def deliver(self, body: str) -> bytes:
        """Send a body, signed by Stripe's library, until an answer has come; returns its head and body."""
        for _ in range(100):
            ((_, signature),) = by_stripe(body, NEW).items()
            head = f"POST /sources/stripe HTTP/1.1\r\nhost: x\r\nstripe-signature: {signature}\r\nconnection: close\r\n"
            request = f"{head}content-length: {len(body.encode())}\r\n\r\n{body}".encode()
            if answer := await self._attempt(request):
                return answer
            self.cut += 1
        raise AssertionError("no answer to 100 attempts")

    async def _attempt(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        fault = self._random.choice(["amid the request", "at once", "after a while", "never", "never"])
        try:
            writer.write(request[: self._random.randrange(len(request))] if fault == "amid the request" else request)
            await writer.drain()
            if fault == "never":
                return await reader.read()
            await asyncio.sleep(self._random.uniform(0, 0.02) if fault == "after a while" else 0)
            return b""
        finally:
            writer.transport.abort()


async def test_deliveries_over_connections_that_are_cut_at_random_are_written_once(
    stage: Stage, topic: str, tmp_path: Path
) -> None:
    service = await stage.started(rules=rules_for(tmp_path, topic, topic))
    senders = [Sender(service.port, seed) for seed in range(8)]
    bodies = {n: json.dumps({"id": f"evt_{n}", "type": "charge.succeeded", "n": n}) for n in range(80)}

    async def run(n: int, sender: Sender) -> list[bytes]:
        return [await sender.deliver(bodies[m]) for m in range(n, len(bodies), len(senders))]

    answers = [answer for each in await asyncio.gather(*map(run, range(8), senders)) for answer in each]
    assert all(answer.startswith(b"HTTP/1.1 201 ") for answer in answers)
    assert sum(sender.cut for sender in senders) > len(bodies) / 2
    assert any(b"idempotent-replayed: true" in answer for answer in answers)  # some were cut after they were written
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert sorted(json.loads(record.value or b"")["n"] for record in records) == list(bodies)

    # The example, by the same secret: its rules are right, and its sender is answered.
    example = Rules.read(str(Path(stripe_webhook.__file__).with_name("stripe.toml"))).sources
    assert [(source.name, source.topic) for source in example] == [("stripe", "demo")]
    answer = await asyncio.to_thread(
        stripe_webhook.deliver, f"{service.url}/sources/stripe", NEW, stripe_webhook.event("evt_x")
    )
    assert (answer.status_code, answer.json()["topic"]) == (201, topic)
