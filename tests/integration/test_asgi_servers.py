"""Tests the app on another ASGI server, without the limits of `python -m service`."""

import json
import sys
import uuid
from collections.abc import Iterator

import pytest

from deploy import places
from deploy.stack import Kafka, Redis, Service
from tests.conftest import MakeTopic
from tests.integration.client import Asked, Client
from tests.integration.conftest import SETTINGS
from tests.integration.judge import read_committed


class PlainUvicorn(Service):
    """`uvicorn --factory service.app:create_app`, with one of uvicorn's own HTTP protocols."""

    http = "auto"

    def start(self, wait_ready: bool = True, timeout_s: float = 60.0) -> None:
        command = [sys.executable, "-m", "uvicorn", "--factory", "service.app:create_app"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--http", self.http]
        self.spawn(command, env={**places.hermetic_environment(), **self.env}, cwd=places.ROOT)
        if wait_ready:
            self.wait_ready(timeout_s)


@pytest.fixture(scope="module", params=["httptools", "h11"])
def plain(
    kafka: Kafka, redis: Redis, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Service]:
    environment = {**SETTINGS, "FENCEPOST_NAMESPACE": f"m-{uuid.uuid4().hex[:12]}"}
    folder = tmp_path_factory.mktemp("plain")
    service = PlainUvicorn(folder, kafka=kafka.bootstrap, redis=redis.url, env=environment)
    service.http = request.param
    with service:
        yield service
    assert "Traceback" not in service.log.read_text(), service.tail(60)


async def test_an_event_is_written_once(plain: Service, make_topic: MakeTopic, client: Client, kafka: Kafka) -> None:
    topic = make_topic(1)
    first = await client.post(plain.url, Asked("k", topic, b"1"))
    again = await client.post(plain.url, Asked("k", topic, b"1"))
    assert [(answer.status, answer.replayed) for answer in (first, again)] == [(201, False), (201, True)]
    assert [record.value for record in read_committed(kafka.bootstrap, [topic])] == [b"1"]


async def test_lines_are_answered_as_they_come_to_be_known(
    plain: Service, make_topic: MakeTopic, client: Client
) -> None:
    topic = make_topic(1)
    lines = [json.dumps({"topic": topic, "value": n, "idempotency_key": f"l{n}"}) for n in range(2_500)]
    response = await client.http.post(
        f"{plain.url}/events/batch", content="\n".join(lines), headers={"content-type": "application/x-ndjson"}
    )
    assert (response.status_code, response.headers["transfer-encoding"]) == (207, "chunked")
    assert [json.loads(line)["offset"] for line in response.text.splitlines()] == sorted(
        json.loads(line)["offset"] for line in response.text.splitlines()
    )
    assert response.text.count('"status":201') == 2_500


async def test_a_body_over_the_limit_is_refused(plain: Service, client: Client) -> None:
    response = await client.http.post(
        f"{plain.url}/events",
        content=bytes(9 * 1024 * 1024),
        headers={"content-type": "application/json", "idempotency-key": "large"},
    )
    assert (response.status_code, response.json()["code"]) == (413, "too-large")
