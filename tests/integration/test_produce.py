"""Tests Confluent's produce API on the real stack: its answers beside those of its peers, and what is written."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from deploy.stack import Kafka, Service
from service.contract.wire.ids import event_id, member_id
from tests.integration.conftest import Stage
from tests.integration.judge import ledger_faults, read_committed
from tests.integration.peers import ANSWER_V2, BATCH, JSON, V2, V3, Compared, differences

JSON_V2 = "application/vnd.kafka.json.v2+json"


def filled(pattern: Any, names: dict[str, str]) -> Any:
    """Put the names of this stack into the texts of a recorded request or answer."""
    match pattern:
        case str():
            for name, text in names.items():
                pattern = pattern.replace(f"{{{name}}}", text)
            return pattern
        case dict():
            return {name: filled(each, names) for name, each in pattern.items()}
        case list():
            return [filled(each, names) for each in pattern]
    return pattern


def answer_of(response: httpx.Response, asked: Compared) -> Any:
    """Read an answer: JSON, or for several v3 records a list of JSON."""
    if isinstance(asked.answer, list):
        return [json.loads(line) for line in response.text.splitlines()]
    return response.json()


async def differing(http: httpx.AsyncClient, asked: Compared, names: dict[str, str]) -> dict[str, object]:
    """Send a recorded request; returns our values where they are not the peer's."""
    headers = {"content-type": asked.content_type} if asked.method == "POST" else {}
    path = filled(asked.path, names)
    response = await http.request(asked.method, path, content=asked.content.encode(), headers=headers)
    wanted = ANSWER_V2 if path.startswith("/topics") else JSON
    assert response.headers["content-type"] == wanted, asked.name
    found = dict(differences(filled(asked.answer, names), answer_of(response, asked)))
    if response.status_code != asked.status:
        found["status"] = response.status_code
    for at, ours in asked.differs.items():  # a text for people may be any
        if isinstance(ours, type) and isinstance(found.get(at), ours):
            found[at] = ours
    return found


async def test_answers_are_those_of_the_peers_but_for_what_the_tables_say(served: Service, topic: str) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=20.0) as http:
        cluster = (await http.get("/v3/clusters")).json()["data"][0]["cluster_id"]
        names = {"topic": topic, "cluster": cluster}
        for asked in (*V2, *V3, *BATCH):
            assert await differing(http, asked, names) == asked.differs, f"{asked.name} ({asked.origin})"
            assert bool(asked.differs) == bool(asked.why), asked.name


async def test_records_are_written_once_also_across_a_crash(stage: Stage, topic: str) -> None:
    """Requests with a key of their own or a made one, and records with their own key, by another process too."""
    first, second = stage.service(), stage.service()
    await stage.start(first, second)

    def v3(text: str, key: str = "") -> bytes:
        own = [{"name": "idempotency-key", "value": base64.b64encode(key.encode()).decode()}] if key else []
        return json.dumps({"headers": own, "value": {"type": "STRING", "data": text}}).encode()

    v2 = json.dumps({"records": [{"key": {"n": 1}, "value": {"n": [1, 2]}}, {"value": "x"}]}).encode()
    v3_path = f"/v3/clusters/any/topics/{topic}/records"
    each = [{"id": id, "value": {"type": "JSON", "data": id}} for id in ("first", "second")]
    entries = json.dumps({"entries": each}).encode()
    requests = {
        "keyed": (f"/topics/{topic}", v2, {"content-type": JSON_V2, "idempotency-key": "request-1"}),
        "made": (f"/topics/{topic}/partitions/1", v2, {"content-type": JSON_V2}),
        "records": (v3_path, v3("a", "a 1") + v3("b", "b 1"), {"content-type": JSON}),
        "batch": (f"/kafka{v3_path}:batch", entries, {"content-type": JSON, "idempotency-key": "batch"}),
        "many": (
            v3_path,
            b"".join(v3(f"{n}") for n in range(1_500)),
            {"content-type": JSON, "idempotency-key": "many"},
        ),
    }
    answers: dict[str, httpx.Response] = {}
    async with httpx.AsyncClient(base_url=first.url, timeout=20.0) as http:
        for name, (path, body, headers) in requests.items():
            answers[name] = await http.post(path, content=body, headers=headers)
            assert answers[name].status_code == (207 if name == "batch" else 200)
    made = answers["made"].headers["idempotency-key"]
    first.kill()
    async with httpx.AsyncClient(base_url=second.url, timeout=20.0) as http:
        for name, (path, body, headers) in requests.items():
            again = await http.post(path, content=body, headers={"idempotency-key": made, **headers})
            assert again.content == answers[name].content, name
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert len(records) == 2 + 2 + 2 + 2 + 1_500
    ids = {record.idempotency_key for record in records}
    assert ids == {"request-1", made, "a 1", "b 1", "batch", "many"}
    written = {member_id("request-1", 0), member_id("request-1", 1), member_id(made, 0), event_id("a 1")}
    written |= {member_id("batch", "first"), member_id("batch", "second")}
    stamps = {dict(record.headers)["fencepost"].split(b";")[1] for record in records}
    assert {id.hex().encode() for id in written} <= stamps
    assert len(stamps) == len(records)
    (keyed,) = [record for record in records if record.key and record.idempotency_key == "request-1"]
    assert (keyed.key, keyed.value) == (b'{"n":1}', b'{"n": [1, 2]}')
    faults = await asyncio.to_thread(ledger_faults, stage.kafka.bootstrap, stage.namespace, [topic])
    assert faults == []


class FullDuplex:
    """A client that sends a record and reads its answer before the next, as the example client of kafka-rest does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def begin(cls, url: httpx.URL, path: str, key: str) -> "FullDuplex":
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nIdempotency-Key: {key}\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        return cls(reader, writer)

    def send(self, record: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(record), record))

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> bytes:
        """Read the next chunk; b"" is the end."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def end(self) -> bytes:
        """End the request; returns the rest of the answers."""
        self._writer.write(b"0\r\n\r\n")
        rest = [each async for each in self._rest()]
        self.cut()
        return b"".join(rest)

    def cut(self) -> None:
        self._writer.close()

    async def _rest(self) -> AsyncIterator[bytes]:
        while chunk := await self.answer():
            yield chunk


async def test_a_stream_is_answered_record_by_record_and_replayed_after_a_cut(
    served: Service, kafka: Kafka, topic: str
) -> None:
    path = f"/v3/clusters/any/topics/{topic}/records"
    records = [json.dumps({"value": {"type": "JSON", "data": n}}).encode() for n in range(20)]
    cut = await FullDuplex.begin(httpx.URL(served.url), path, "stream")
    answers = []
    async with asyncio.timeout(30.0):
        for n, record in enumerate(records[:10]):
            cut.send(record)
            if n == 0:
                assert b"idempotency-key: stream" in await cut.head()
            answers.append(await cut.answer())
        cut.send(records[10])
        cut.cut()  # nobody reads its answer
        lines = [b""]
        while any(b"50003" in line for line in lines) or lines == [b""]:  # the last record may still be in progress
            whole = await FullDuplex.begin(httpx.URL(served.url), path, "stream")
            for record in records:
                whole.send(record)
            await whole.head()
            lines = (await whole.end()).split(b"\r\n")
    assert lines[:10] == [answer.removesuffix(b"\r\n") for answer in answers]
    assert [json.loads(line)["error_code"] for line in lines[:-1]] == [200] * 20
    written = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    assert sorted(int(record.value or b"") for record in written) == [*range(20)]
