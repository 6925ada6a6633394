"""Traces by OpenTelemetry's conventions for messaging; imported only where FENCEPOST_TRACING asks for them.

Each event has a span of kind PRODUCER, from its arrival to its answer ("create orders"), whose context the record
carries in its `traceparent`; its parent is the request's. Each group has one of kind CLIENT ("send"), for its
transaction, which links to those of its events.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.contract.wire.headers import TRACE_HEADER
from service.core.logs import Incident
from service.core.settings import GROUP_LEDGER_BYTES_MAX
from service.events.event import Event
from service.kafka.outcomes import TransactionFailed
from service.pipeline.request import Committed, WriteRequest, WriteResult

log = structlog.get_logger(__name__)

# Links of a group's span, one for each event that its ledger record may hold; OpenTelemetry's default is 128.
LINKS_MAX: Final = GROUP_LEDGER_BYTES_MAX // 100
LINKS_VARIABLE: Final = "OTEL_SPAN_LINK_COUNT_LIMIT"
FLUSH_MS: Final = 2_000

_SYSTEM: Final = {"messaging.system": "kafka"}
_w3c: Final = TraceContextTextMapPropagator()


class Tracing:
    """The spans of one process. The standard OTEL_* variables set the exporter and the sampling."""

    def __init__(self, instance: str, processor: SpanProcessor | None = None) -> None:
        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "fencepost", "service.instance.id": instance}
        )
        limits = SpanLimits(max_links=None if LINKS_VARIABLE in os.environ else LINKS_MAX)
        self._provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(Exporter()))
        self._tracer = self._provider.get_tracer("fencepost")
        self._instance = instance

    def begin(self, request: WriteRequest, now: float) -> None:
        """Begin the spans of an admitted request; they end with its result. `now` is time.monotonic."""
        arrived_ns = time.time_ns() - int((now - request.arrived) * 1e9)
        request.spans = [self._create(event, arrived_ns) for event in request.events]

    def _create(self, event: Event, arrived_ns: int) -> Span:
        own = next((content for name, content in event.headers if name == TRACE_HEADER), None)
        parent = own or event.traceparent
        carrier = {} if parent is None else {TRACE_HEADER: parent.decode("latin-1")}
        span = self._tracer.start_span(
            f"create {event.topic}",
            _w3c.extract(carrier, Context()),
            SpanKind.PRODUCER,
            {
                **_SYSTEM,
                "messaging.operation.name": "create",
                "messaging.operation.type": "create",
                "messaging.destination.name": event.topic,
                "messaging.client.id": self._instance,
                "messaging.message.id": event.id.hex(),
                **({"messaging.kafka.message.tombstone": True} if event.value is None else {}),
            },
            start_time=arrived_ns,
        )
        if own is None:  # else the client's own header is written, as it was fingerprinted
            span_context = span.get_span_context()
            event.traceparent = (
                f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{span_context.trace_flags:02x}".encode()
            )
        return span

    def end(self, request: WriteRequest, answer: WriteResult) -> None:
        """End the spans of a request with its result."""
        spans = request.spans
        if isinstance(answer, Committed):
            for span, (_, state) in zip(spans, answer.deliveries, strict=True):
                span.set_attribute("messaging.destination.partition.id", str(state.partition))
                span.set_attribute("messaging.kafka.offset", state.offset)
                span.set_attribute("fencepost.replayed", answer.replayed)
        else:
            for span in spans:
                span.set_attribute("error.type", answer.kind.code)
                span.set_status(Status(StatusCode.ERROR, answer.kind.title))
        for span in spans:
            span.end()

    @contextmanager
    def sending(self, slot: int, requests: Sequence[WriteRequest]) -> Iterator[None]:
        """Make a context in which the write of a group is a span."""
        topics = {event.topic for request in requests for event in request.events}
        (topic,) = topics if len(topics) == 1 else ("",)
        spans = [span for request in requests for span in request.spans if span.is_recording()]
        sent = self._tracer.start_span(
            f"send {topic}".rstrip(),
            Context(),
            SpanKind.CLIENT,
            {
                **_SYSTEM,
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
                "messaging.batch.message_count": sum(len(request.events) for request in requests),
                "messaging.client.id": self._instance,
                "fencepost.slot": slot,
                **({"messaging.destination.name": topic} if topic else {}),
            },
            [Link(span.get_span_context()) for span in spans],
        )
        try:
            yield
        except Exception as error:
            kind = error.outcome.value if isinstance(error, TransactionFailed) else type(error).__name__
            sent.set_attribute("error.type", kind)
            sent.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            sent.end()

    def close(self) -> None:
        """Send the remaining spans for at most FLUSH_MS, and shut down. Blocks."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


class NotTaken(Exception):
    """The collector did not accept spans, which are dropped."""


class Exporter(OTLPSpanExporter):
    """An exporter that logs once when the collector is away and when it is back, instead of each try."""

    def __init__(self) -> None:
        super().__init__()
        self._trouble = Incident(log, "traces are not taken")
        self._why = ""
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(self._keep_cause)

    def _keep_cause(self, line: logging.LogRecord) -> bool:
        """Keep the first log line of a failure as its cause, and suppress all lines."""
        self._why = self._why or line.getMessage()
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._why = ""
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._trouble.add(NotTaken(self._why))
        elif failures := self._trouble.end():
            log.info("traces are taken again", **failures)
        return result
