"""Tests traces: an event's span and context, a group's span with its links, and that none are made when off."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from structlog.testing import capture_logs

from deploy.places import ROOT
from deploy.stack import free_port
from service.contract.wire.headers import TRACE_HEADER
from service.contract.wire.ids import event_id
from service.events.event import Event, event_of
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.pipeline.request import Committed
from service.pipeline.tracing import LINKS_VARIABLE, Exporter, Tracing
from tests.unit.fakes import FakeProducer, World, end_of_term, ended, make_event, until

TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = f"00-{TRACE_ID}-b7ad6b7169203331-01".encode()


class Traced(World):
    """A world whose spans are kept in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.opened = self.tracing = Tracing("host:1", SimpleSpanProcessor(self.exporter))
        super().__init__()

    def spans(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is kind]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    traced = Traced()
    yield traced
    traced.opened.close()


def with_parent(key: str, headers: list[tuple[str, bytes]] | None = None, traceparent: bytes | None = PARENT) -> Event:
    return event_of(key, event_id(key), "orders", None, b"1", headers or [], 2, None, traceparent)


def identity(context: SpanContext | None) -> tuple[int, int]:
    assert context is not None
    return context.trace_id, context.span_id


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_an_event_has_a_producers_span_whose_context_its_record_carries(world: Traced) -> None:
    serving = world.serve(await world.slot(1))
    answer = await world.ask(with_parent("a"), ago_s=0.5)
    assert isinstance(answer, Committed)
    await ended(serving)
    (span,) = world.spans(SpanKind.PRODUCER)
    assert span.name == "create orders"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    context = span.get_span_context()
    assert context is not None
    assert f"{context.trace_id:032x}" == TRACE_ID
    (record,) = world.producers[1].written[0]
    assert dict(record.headers)[TRACE_HEADER] == f"00-{TRACE_ID}-{context.span_id:016x}-01".encode()
    assert attributes(span) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "2",
        "messaging.client.id": "host:1",
        "messaging.message.id": event_id("a").hex(),
        "messaging.kafka.offset": answer.deliveries[0][1].offset,
        "fencepost.replayed": False,
    }
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0.5e9 < span.end_time - span.start_time < 5e9  # from its arrival
    assert "a" not in attributes(span).values()  # no attribute has its key


async def test_a_group_has_a_clients_span_with_links_to_its_events(world: Traced) -> None:
    asked = [world.submit(key) for key in "abc"]
    await until(lambda: world.queue.events == 3)
    serving = world.serve(await world.slot(1))
    for each in asked:
        await each
    await ended(serving)
    (sent,) = world.spans(SpanKind.CLIENT)
    created = world.spans(SpanKind.PRODUCER)
    assert sent.name == "send orders"
    assert sent.parent is None
    assert attributes(sent)["messaging.batch.message_count"] == 3
    assert attributes(sent)["fencepost.slot"] == 1
    assert sorted(map(identity, (link.context for link in sent.links))) == sorted(
        map(identity, (span.get_span_context() for span in created))
    )
    assert len({identity(span.get_span_context())[0] for span in created}) == 3  # no request had a trace context


async def test_a_large_group_keeps_all_of_its_links(world: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [world.submit(str(n)) for n in range(300)]
    await until(lambda: world.queue.events == 300)
    serving = world.serve(await world.slot())
    for each in asked:
        await each
    await ended(serving)
    (sent,) = world.spans(SpanKind.CLIENT)
    assert (len(sent.links), sent.dropped_links) == (300, 0)
    monkeypatch.setenv(LINKS_VARIABLE, "7")
    limits = Tracing("host:1", SimpleSpanProcessor(InMemorySpanExporter()))._tracer._span_limits  # type: ignore[attr-defined]
    assert limits.max_links == 7


async def test_a_header_of_the_clients_own_stays_as_it_was_and_is_the_parent(world: Traced) -> None:
    serving = world.serve(await world.slot())
    await world.ask(with_parent("a", [(TRACE_HEADER, PARENT)], None))
    await ended(serving)
    (record,) = world.producers[0].written[0]
    assert [content for name, content in record.headers if name == TRACE_HEADER] == [PARENT]
    (span,) = world.spans(SpanKind.PRODUCER)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE_ID


async def test_spans_tell_a_replay_from_a_refusal(world: Traced) -> None:
    serving = world.serve(await world.slot())
    await world.submit("a")
    await world.submit("a")
    await world.ask(make_event("a", value=b"another"))
    await ended(serving)
    first, again, refused = world.spans(SpanKind.PRODUCER)
    assert [attributes(span)["fencepost.replayed"] for span in (first, again)] == [False, True]
    assert attributes(refused)["error.type"] == "fingerprint-mismatch"
    assert refused.status.status_code is StatusCode.ERROR
    assert len(world.spans(SpanKind.CLIENT)) == 1


async def test_a_failed_transaction_is_an_error_with_its_verdict(world: Traced) -> None:
    slot = await world.slot()
    assert isinstance(slot.producer, FakeProducer)
    slot.producer.trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "a fault"))
    asked = world.submit("a")
    await until(lambda: bool(world.queue.events))
    await end_of_term(world.serve(slot))
    (sent,) = world.spans(SpanKind.CLIENT)
    assert attributes(sent)["error.type"] == "unknown"
    assert sent.status.status_code is StatusCode.ERROR
    assert world.spans(SpanKind.PRODUCER) == []  # not answered yet
    world.resolver.resolve(world.writer.unwritten.parked[0], world.resolver.too_late(world.writer.unwritten.parked[0]))
    await asked
    (span,) = world.spans(SpanKind.PRODUCER)
    assert attributes(span)["error.type"] == "outcome-unknown"


async def test_an_unsampled_event_passes_its_context_on_and_exports_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    world = Traced()
    serving = world.serve(await world.slot())
    await world.ask(with_parent("a", traceparent=PARENT[:-2] + b"00"))
    await ended(serving)
    (record,) = world.producers[0].written[0]
    carried = dict(record.headers)[TRACE_HEADER].decode()
    assert carried.startswith(f"00-{TRACE_ID}-")
    assert carried.endswith("-00")
    assert world.exporter.get_finished_spans() == ()
    world.opened.close()


class Collector(BaseHTTPRequestHandler):
    """Accepts all spans."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_an_unreachable_collector_logs_one_line_and_its_return_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry logs one for each attempt: more than a thousand for an outage of an hour."""
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")  # of which it waits 1 s, and tries again
    exporter = Exporter()
    with capture_logs() as logs:
        assert [exporter.export([]) for _ in range(2)] == [SpanExportResult.FAILURE] * 2
        with HTTPServer(("127.0.0.1", port), Collector) as server:
            serving = threading.Thread(target=server.serve_forever)
            serving.start()
            assert [exporter.export([]) for _ in range(2)] == [SpanExportResult.SUCCESS] * 2
            server.shutdown()
            serving.join()
    exporter.shutdown()  # type: ignore[no-untyped-call]
    away, again = logs
    assert (away["event"], again["event"], again["failures"]) == ("traces are not taken", "traces are taken again", 2)
    assert "Connection refused" in away["why"]
    assert caplog.records == []


def test_the_opentelemetry_sdk_is_not_imported_without_tracing() -> None:
    # redis-py imports OpenTelemetry for metrics, if it is installed; nothing imports it for traces.
    code = (
        "import sys, service.__main__; "
        "unwanted = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'service.pipeline.tracing'); "
        "sys.exit(any(name.startswith(unwanted) "
        "for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
