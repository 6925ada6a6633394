"""Tests traces: the spans that a collector gets over OTLP, and the contexts in records."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from service.contract.wire.headers import TRACE_HEADER
from service.contract.wire.ids import event_id
from tests.conftest import MakeTopic
from tests.integration.client import Client
from tests.integration.conftest import Stage
from tests.integration.judge import read_committed

TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID: Final = "b7ad6b7169203331"


class Collector:
    """Accepts spans over OTLP/HTTP, as an OpenTelemetry collector does, and keeps them."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def spans(self, kind: int) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.kind == kind
        ]

    def resource(self) -> dict[str, str]:
        (resource, *_) = self.requests[0].resource_spans
        return {each.key: each.value.string_value for each in resource.resource.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def text(span: Span, name: str) -> str:
    return str(next(each.value.string_value for each in span.attributes if each.key == name))


async def post(client: Client, url: str, key: str, body: object, path: str = "/events") -> httpx.Response:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"} | ({"Idempotency-Key": key} if key else {})
    response = await client.http.post(url + path, json=body, headers=headers)
    assert response.status_code in (201, 207), response.text
    return response


async def test_spans_reach_a_collector_and_records_carry_their_contexts(
    stage: Stage, client: Client, collector: Collector, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    service = stage.service(tracing="otlp")
    service.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
    service.env["OTEL_BSP_SCHEDULE_DELAY"] = "60000"  # the end of the process must still send waiting spans
    await stage.start(service)
    await post(client, service.url, "a", {"topic": topic, "value": 1})
    members = [{"topic": topic, "value": n, "idempotency_key": f"b-{n}"} for n in range(2)]
    await post(client, service.url, "", {"events": members}, "/events/batch")
    await post(
        client, service.url, "c", {"atomic": True, "events": [{"topic": topic, "value": 9}] * 2}, "/events/batch"
    )
    assert collector.requests == []
    await asyncio.to_thread(service.stop)
    created = collector.spans(Span.SPAN_KIND_PRODUCER)
    assert len(created) == 5
    assert {span.name for span in created} == {f"create {topic}"}
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in created} == {(TRACE_ID, PARENT_ID)}
    assert collector.resource()["service.name"] == "fencepost"
    assert collector.resource()["service.instance.id"] == "service-0"
    # Each record carries the context of its own span, whose attributes have the record's coordinates.
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    carried = {dict(record.headers)[TRACE_HEADER].decode(): record.place[2] for record in records}
    expected = {
        f"00-{TRACE_ID}-{span.span_id.hex()}-01": next(
            each.value.int_value for each in span.attributes if each.key == "messaging.kafka.offset"
        )
        for span in created
    }
    assert carried == expected
    assert event_id("a").hex() in {text(span, "messaging.message.id") for span in created}
    # Every event is in one group, whose span links to it.
    sent = collector.spans(Span.SPAN_KIND_CLIENT)
    assert sorted(link.span_id for span in sent for link in span.links) == sorted(span.span_id for span in created)


async def test_an_unreachable_collector_delays_neither_answers_nor_the_stop(
    stage: Stage, client: Client, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    service = stage.service(tracing="otlp")
    service.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    await stage.start(service)
    await post(client, service.url, "a", {"topic": topic, "value": 1})
    began = asyncio.get_running_loop().time()
    await asyncio.to_thread(service.stop)
    assert asyncio.get_running_loop().time() - began < 15
    assert service.exit_code == 0
