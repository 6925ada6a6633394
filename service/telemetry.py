"""Metrics by Prometheus' conventions, and the log. Labels are bounded; keys appear in neither."""

import logging
import sys
from collections.abc import Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

NAMESPACE: Final = "fencepost"
LATENCY_S: Final = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
GROUP_EVENTS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
RECOVERY_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Telemetry:
    """Every metric of one process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = self._counter("answers", "Answers to events, by status and code", "status", "code")
        self.replays = self._counter("replays", "Answers that were given before")
        self.latency = self._histogram("request_seconds", "From the request to its answer", LATENCY_S, "outcome")
        self.stages = self._histogram("stage_seconds", "Time of a group in a stage of its path", LATENCY_S, "stage")
        self.groups = self._histogram("group_events", "Events in one transaction", GROUP_EVENTS)
        self.queued = self._gauge("queue_events", "Events that wait or are being written")
        self.queued_bytes = self._gauge("queue_bytes", "Bytes of events that wait or are being written")
        self.in_doubt = self._gauge("in_doubt_events", "Events whose fate recovery has yet to tell")
        self.slots = self._gauge("slots", "Slots of this process by state", "state")
        self.slot_recoveries = self._histogram(
            "slot_recovery_seconds", "Duration of slot recoveries that ended well", RECOVERY_S
        )
        self.terms_ended = self._counter("terms_ended", "Terms that ended otherwise than by being given back", "why")
        self.generation = self._gauge("generation", "The generation that this process works with")
        self.store_recoveries = self._histogram(
            "store_recovery_seconds", "Duration of store recoveries that this process made", RECOVERY_S
        )
        self.marks_failed = self._counter("marks_failed", "Marks that did not succeed at once")
        self.journal_dropped = self._counter("journal_dropped", "Answers that the journal had to drop")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)

    def answered(self, code: str, status: int, latency_s: float) -> None:
        """Count one answer."""
        self.answers.labels(status, code).inc()
        self.latency.labels("ok" if status == 201 else "problem").observe(latency_s)

    def render(self) -> bytes:
        """The text format of /metrics."""
        return generate_latest(self.registry)


def configure_logging() -> None:
    """JSON lines, or a console's, to standard error; libraries speak from WARNING up."""
    timestamper = structlog.processors.TimeStamper(fmt="iso", utc=True)
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        timestamper,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("service").setLevel(logging.INFO)
    # aiokafka tells of each disconnect at ERROR; what it means for an event is told by the slot, once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
