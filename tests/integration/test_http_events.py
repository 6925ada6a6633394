"""Tests the HTTP contract for written events: the answer, its replay, and the record in the log."""

import asyncio
import base64
import contextlib
import email.utils
import http.client
import json
import re
import time
from typing import Any

import pytest

from deploy.stack import Kafka, Service
from service.contract.wire.headers import Stamp
from service.contract.wire.ids import event_id, fingerprint
from tests.conftest import MakeTopic
from tests.integration.client import Asked, Client, events
from tests.integration.conftest import Stage, plan_of
from tests.integration.judge import Delivered, read_committed
from tests.integration.plan import Fault, until


@pytest.fixture(scope="module", params=["direct", "asgi"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def send(client: Client, service: Service, key: str, fields: dict[str, Any], **headers: str) -> Any:
    head = {"Content-Type": "application/json", "Idempotency-Key": key, **headers}
    return await client.http.post(f"{service.url}/events", content=json.dumps(fields).encode(), headers=head)


async def only_record(kafka: Kafka, topic: str) -> Delivered:
    (record,) = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    return record


async def test_a_201_and_its_replay_have_the_same_body(
    served: Service, topic: str, client: Client, kafka: Kafka
) -> None:
    fields = {"topic": topic, "key": "customer-7", "value": {"a": 1}}
    before = time.time()
    first = await send(client, served, "replayed", fields)
    again = await send(client, served, "replayed", fields)
    quoted = await send(client, served, '"replayed"', fields)

    assert first.status_code == again.status_code == quoted.status_code == 201
    assert first.content == again.content == quoted.content
    metadata = first.json()
    assert list(metadata) == ["id", "topic", "partition", "offset", "timestamp"]
    assert metadata["id"] == event_id("replayed").hex()
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == quoted.headers["idempotent-replayed"] == "true"
    assert first.headers["location"] == "/events/replayed"
    assert first.headers["idempotency-key"] == quoted.headers["idempotency-key"] == "replayed"
    assert first.headers["content-type"] == "application/json"
    expires = email.utils.parsedate_to_datetime(first.headers["idempotency-key-expires"]).timestamp()
    assert abs(expires - before - 86_400) < 10
    assert again.headers["idempotency-key-expires"] == first.headers["idempotency-key-expires"]
    record = await only_record(kafka, topic)
    assert record.place == (metadata["topic"], metadata["partition"], metadata["offset"])
    assert record.timestamp[1] == metadata["timestamp"]


async def test_another_event_under_the_key_is_a_conflict(served: Service, topic: str, client: Client) -> None:
    asked = {"topic": topic, "key": "k", "value": 1, "headers": {"a": "1", "b": "2"}}
    assert (await send(client, served, "fought over", asked)).status_code == 201
    for other in ({"value": 2}, {"key": "l"}, {"headers": {"a": "1"}}, {"partition": 0}, {"value": 1.0}):
        response = await send(client, served, "fought over", {**asked, **other})
        assert (response.status_code, response.json()["code"]) == (422, "fingerprint-mismatch"), other
    same = await send(client, served, "fought over", {**asked, "headers": {"b": "2", "a": "1"}, "timestamp": 1})
    assert (same.status_code, same.headers["idempotent-replayed"]) == (201, "true")


async def test_a_key_that_tells_an_age_past_its_retention_is_refused(
    served: Service, topic: str, client: Client, kafka: Kafka
) -> None:
    digits = f"{int(time.time() * 1000) - 86_401_000:012x}"
    old = await send(client, served, f"{digits[:8]}-{digits[8:]}-7000-8000-000000000000", {"topic": topic, "value": 1})
    assert (old.status_code, old.json()["code"]) == (412, "key-expired")
    digits = f"{int(time.time() * 1000):012x}"
    new = await send(client, served, f"{digits[:8]}-{digits[8:]}-7000-8000-000000000000", {"topic": topic, "value": 1})
    assert new.status_code == 201
    await only_record(kafka, topic)


async def test_bytes_stay_as_they_were_sent(served: Service, topic: str, client: Client, kafka: Kafka) -> None:
    texts = [
        b'{"z" : 1.0e400,\n "\xc3\xbc": "\\u00fc" , "a":[ ]}',
        b"123456789012345678901234567890.0",
        b'"\\ud83d\\ude00 \\/"',
        b"[" * 63 + b"]" * 63,
        b"-0",
        b"false",
    ]
    for number, text in enumerate(texts):
        answer = await client.post(served.url, Asked(f"bytes-{number}", topic, text, record_key="", partition=1))
        assert answer.status == 201, answer.body
    found = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    assert [record.value for record in found] == texts
    assert {record.key for record in found} == {b""}


async def test_base64_is_decoded_and_null_is_a_tombstone(
    served: Service, topic: str, client: Client, kafka: Kafka
) -> None:
    raw = bytes(range(256))
    fields: dict[str, Any] = {"topic": topic, "partition": 2}
    coded = await send(client, served, "b64", {**fields, "value_base64": base64.b64encode(raw).decode()})
    empty = await send(client, served, "b64 empty", {**fields, "value_base64": ""})
    grave = await send(client, served, "grave", {**fields, "value": None, "key": "gone"})
    assert [response.status_code for response in (coded, empty, grave)] == [201, 201, 201]
    found = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    assert [(record.key, record.value) for record in found] == [(None, raw), (None, b""), (b"gone", None)]


async def test_a_record_has_its_key_fencepost_and_callers_headers(
    served: Service, topic: str, client: Client, kafka: Kafka
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"content-type": "x", "ü": "ä"}
    fields = {"topic": topic, "key": "k", "value": 1, "headers": headers}
    before_ms = time.time_ns() // 1_000_000
    metadata = (await send(client, served, '"with \\"quotes\\""', fields, traceparent=trace)).json()

    record = await only_record(kafka, topic)
    names = [name for name, _ in record.headers]
    found = dict(record.headers)
    assert names == ["idempotency-key", "fencepost", "traceparent", "content-type", "ü"]
    assert found["idempotency-key"] == b'with "quotes"'
    assert found["traceparent"] == trace.encode()
    assert found["ü"] == "ä".encode()
    stamp = Stamp.decode(found["fencepost"])
    assert stamp.id.hex() == metadata["id"]
    own = [(name, content.encode()) for name, content in headers.items()]
    assert stamp.fingerprint == fingerprint(topic, None, b"k", own, b"1")
    assert before_ms - 5 <= stamp.accepted_at <= time.time_ns() // 1_000_000 + 5
    assert stamp.slot in range(4)
    assert stamp.instance == f"127.0.0.1:{served.port}"


async def test_the_answer_has_the_timestamp_of_the_record(
    served: Service, make_topic: MakeTopic, client: Client, kafka: Kafka
) -> None:
    kept, stamped = make_topic(1), make_topic(1, {"message.timestamp.type": "LogAppendTime"})
    for topic in (kept, stamped):
        metadata = (
            await send(client, served, f"time {topic}", {"topic": topic, "value": 1, "timestamp": 1_000})
        ).json()
        record = await only_record(kafka, topic)
        assert record.timestamp[1] == metadata["timestamp"]
        assert (metadata["timestamp"] == 1_000) is (topic == kept)


async def test_keyed_events_of_one_key_share_a_partition_and_keep_their_order(
    served: Service, make_topic: MakeTopic, client: Client, kafka: Kafka
) -> None:
    topic = make_topic(5)
    for number in range(20):
        asked = Asked(f"ordered-{number}", topic, b"%d" % number, record_key=f"r{number % 2}")
        assert (await client.post(served.url, asked)).status == 201
    found = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    for key in (b"r0", b"r1"):
        mine = [record for record in found if record.key == key]
        assert len({record.place[1] for record in mine}) == 1
        values = [int(record.value or b"") for record in sorted(mine, key=lambda record: record.place)]
        assert values == sorted(values)


async def test_the_state_of_a_key(stage: Stage, topic: str) -> None:
    service = await stage.started(faults=(Fault("commit", "hold"),), slots=1)
    http = stage.client.http
    key, location = 'a/b c"%\\', "/events/a%2Fb%20c%22%25%5C"
    assert (await http.get(service.url + location)).status_code == 404
    asked = Asked(key, topic, b"1")
    posting = asyncio.create_task(stage.client.post(service.url, asked))
    await asyncio.to_thread(until, lambda: plan_of(service).happened("commit"))

    under_way = await http.get(service.url + location)
    assert (under_way.status_code, under_way.json()["state"]) == (200, "in_progress")
    second = asyncio.create_task(stage.client.post(service.url, asked))  # waits for the only slot
    plan_of(service).let_go("commit")
    metadata = json.loads((await posting).body)
    done = (await http.get(service.url + location)).json()
    assert done == {"state": "committed", **metadata}
    assert (await second).kind in ("ok", "busy")
    await stage.assert_exactly_once(topic)


@pytest.mark.parametrize("key", [" a", "a ", '"a"', "   ", '"', "a//b", "../a", "a?b#c", ".", ".."])
async def test_a_location_leads_back_to_its_key(served: Service, client: Client, topic: str, key: str) -> None:
    quoted = '"' + key.replace('"', '\\"') + '"'
    body = {"topic": topic, "value": 1}
    made = await client.http.post(f"{served.url}/events", json=body, headers={"Idempotency-Key": quoted})
    there = await client.http.get(served.url + made.headers["location"])
    assert (made.status_code, there.status_code) == (201, 200)
    assert there.json()["id"] == made.json()["id"]


async def test_a_client_may_prefer_an_async_response_or_a_wait(stage: Stage, topic: str) -> None:
    writer = stage.service(faults=(Fault("commit", "hold"),), only_slots=(0,), slots=1)
    other = stage.service(only_slots=(1,), slots=1)
    await stage.start(writer, other)
    fields = {"topic": topic, "value": 1}
    # 202 as soon as the claim stands; the outcome is found by the key.
    accepted = await send(stage.client, writer, "whenever", fields, Prefer="respond-async")
    assert (accepted.status_code, accepted.headers["preference-applied"]) == (202, "respond-async")
    assert accepted.json() == {"id": event_id("whenever").hex(), "state": "in_progress"}
    state = writer.url + accepted.headers["location"]
    assert (await stage.client.http.get(state)).json()["state"] == "in_progress"
    await asyncio.to_thread(until, lambda: plan_of(writer).happened("commit"))
    # Another process waits as long as `Prefer` says.
    soon = await send(stage.client, other, "whenever", fields, Prefer="wait=1")
    assert (soon.status_code, soon.headers["preference-applied"]) == (409, "wait=1")
    patient = asyncio.create_task(send(stage.client, other, "whenever", fields, Prefer="wait=4"))
    await asyncio.sleep(0.2)
    plan_of(writer).let_go("commit")
    replayed = await patient
    assert (replayed.status_code, replayed.headers["idempotent-replayed"]) == (201, "true")
    assert replayed.headers["preference-applied"] == "wait=4"
    metadata = {name: value for name, value in replayed.json().items() if name != "id"}
    done = (await stage.client.http.get(state)).json()
    assert done == {"state": "committed", "id": event_id("whenever").hex(), **metadata}
    # A committed event is answered as usual.
    again = await send(stage.client, writer, "whenever", fields, Prefer="respond-async")
    assert (again.status_code, again.content) == (201, replayed.content)
    (record,) = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert record.place == (metadata["topic"], metadata["partition"], metadata["offset"])


async def test_a_key_is_in_progress_at_another_process_and_in_doubt_when_that_process_dies(
    stage: Stage, topic: str
) -> None:
    writer = stage.service(faults=(Fault("commit", "hold"),), only_slots=(0,), slots=1)
    other = stage.service(only_slots=(1,), slots=1)  # takes no dead slot, so that the doubt remains visible
    await stage.start(writer, other)
    asked = Asked("contested", topic, b"1")
    posting = asyncio.create_task(stage.client.post(writer.url, asked))
    await asyncio.to_thread(until, lambda: plan_of(writer).happened("commit"))

    busy = await stage.client.post(other.url, asked)
    assert (busy.status, busy.code) == (409, "in-progress")
    response = await stage.client.http.post(
        f"{other.url}/events",
        content=asked.body(),
        headers={"Content-Type": "application/json", "Idempotency-Key": "contested"},
    )
    assert (response.status_code, response.headers["retry-after"]) == (409, "1")

    writer.kill()
    assert (await posting).kind == "info"
    await asyncio.to_thread(until, lambda: stage.dead_slots() == [0])
    found = await stage.client.http.get(f"{other.url}/events/contested")
    assert found.json()["state"] == "in_doubt"
    heir = await stage.started(slots=1)
    assert (await stage.client.settle([heir.url, other.url], asked)).kind == "ok"
    await stage.assert_exactly_once(topic)


async def test_a_key_is_in_doubt_at_the_process_that_recovers_its_slot(stage: Stage, topic: str) -> None:
    """The process keeps the slot's lease, so that another process can only answer "in progress"."""
    faults = (Fault("commit.done", "TimeoutError"), Fault("slot.fence", "hold", first=2))
    writer = stage.service(faults=faults, only_slots=(0,), slots=1)
    other = stage.service(only_slots=(1,), slots=1)
    await stage.start(writer, other)
    asked = Asked("doubted", topic, b"1")
    answer = await stage.client.post(writer.url, asked)
    assert (answer.status, answer.code) == (504, "outcome-unknown")

    async def state_at(service: Service) -> str:
        return str((await stage.client.http.get(f"{service.url}/events/doubted")).json()["state"])

    assert (await state_at(writer), await state_at(other)) == ("in_doubt", "in_progress")
    plan_of(writer).let_go("slot.fence")
    assert (await stage.client.settle([writer.url], asked)).kind == "ok"
    assert await state_at(writer) == "committed"
    await stage.assert_exactly_once(topic)


async def test_50_posts_of_one_key_on_two_processes(stage: Stage, topic: str) -> None:
    services = [stage.service(), stage.service()]
    await stage.start(*services)
    asked = Asked("the one", topic, b'{"n": 1}')
    answers = await asyncio.gather(*(stage.client.post(services[n % 2].url, asked) for n in range(50)))
    assert {answer.status for answer in answers} <= {201, 409}
    settled = await asyncio.gather(*(stage.client.settle([services[n % 2].url], asked) for n in range(10)))
    assert len({answer.body for answer in settled}) == 1
    assert sum(answer.status == 201 and not answer.replayed for answer in stage.client.history) == 1
    await stage.assert_exactly_once(topic)


def test_a_connection_that_rests_is_kept(served: Service, topic: str) -> None:
    """uvicorn would end it sooner, and a load balancer's next request on it would be a 502."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    with contextlib.closing(connection):
        for number, rest_s in enumerate((5.5, 0)):
            head = {"Content-Type": "application/json", "Idempotency-Key": f"rested-{number}"}
            connection.request("POST", "/events", json.dumps({"topic": topic, "value": 1}), head)
            used = connection.sock
            answer = connection.getresponse()
            assert (answer.status, len(answer.read())) == (201, int(answer.headers["content-length"]))
            time.sleep(rest_s)
            assert connection.sock is used is not None


async def test_probes_metrics_and_the_openapi_document_are_served(served: Service, topic: str, client: Client) -> None:
    for asked in events(topic, 3, "metered"):
        assert (await client.post(served.url, asked)).status == 201
    ready = await client.http.get(f"{served.url}/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert (await client.http.get(f"{served.url}/startupz")).status_code == 200
    assert (await client.http.get(f"{served.url}/livez")).status_code == 200
    metrics = (await client.http.get(f"{served.url}/metrics")).text
    assert 'fencepost_answers_total{code="",status="201"}' in metrics
    document = (await client.http.get(f"{served.url}/openapi.json")).json()
    for path in ("/events", "/events/batch"):
        operation = document["paths"][path]["post"]
        assert {"201", "207", "400", "503", "504"} <= operation["responses"].keys()
        for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(operation)):
            assert reference in document["components"]["schemas"]
