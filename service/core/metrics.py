"""The metrics of one process, by Prometheus' conventions. All labels are bounded, and contain no keys.

Metrics that count requests or groups bind their labels once, because a look-up costs more than counting. Metrics that
show the state of a part read it at each scrape (`set_function`).
"""

from bisect import bisect_left
from collections import Counter as CountedBy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.core.collectors import LATENCY_S, NAMESPACE, DroppedLines, MetricFactory
from service.core.metrics_of_parts import (
    KafkaMetrics,
    RecoveryMetrics,
    RulesMetrics,
    SchemaRegistryMetrics,
    StoreMetrics,
    TlsMetrics,
)

GROUP_EVENTS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
SOURCE_OUTCOMES: Final = ("written", "duplicate", "quarantined", "bad_signature", "refused", "failed", "challenge")
STAGES: Final = ("queue", "claim", "kafka", "mark")


class FastHistogram(Collector):
    """A histogram for each request or group: the library's own takes longer to observe a value.

    It can observe several equal values at once, and has at most one label.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str = "", known: Sequence[str] = ()
    ) -> None:
        """`known`: values of the label that are shown before their first observation."""
        self._name, self._text, self._bounds = name, text, bounds
        self._labels = [label] if label else []
        self._buckets = defaultdict[str, list[int]](lambda: [0] * (len(bounds) + 1))  # by the label's value
        self._sums: defaultdict[str, float] = defaultdict(float)
        for value in known if label else [""]:
            self.observe(0, value, 0)

    def observe(self, value: float, label_value: str = "", count: int = 1) -> None:
        """Count `count` observations of a value."""
        self._buckets[label_value][bisect_left(self._bounds, value)] += count
        self._sums[label_value] += count * value

    def collect(self) -> Iterator[Metric]:
        (family,) = self.describe()
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for label_value, buckets in self._buckets.items():
            counts = list(zip(bounds, accumulate(buckets), strict=True))
            family.add_metric([label_value] if self._labels else [], counts, self._sums[label_value])
        yield family

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Describe the metric, without samples."""
        yield HistogramMetricFamily(f"{NAMESPACE}_{self._name}", self._text, labels=self._labels)


class Telemetry:
    """All metrics of one process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(DroppedLines())
        make = MetricFactory(self.registry)
        self._make_request_metrics(make)
        self._make_process_metrics(make)
        self.recovery = RecoveryMetrics(make)
        self.store = StoreMetrics(make)
        self.kafka = KafkaMetrics(make)
        self.schema_registry = SchemaRegistryMetrics(make)
        self.tls = TlsMetrics(make)
        self.rules = RulesMetrics(make)

    def _make_request_metrics(self, make: MetricFactory) -> None:
        """Make the metrics of requests, of the events in them, and of the queue."""
        self._requests = make.counter("requests", "HTTP requests to write, by status and code", "status", "code")
        self._answers = make.counter("answers", "Answers to events, by status and code", "status", "code")
        # Counts since the last scrape, by status and code: the library's counters take a lock for each increment.
        self._requested: CountedBy[tuple[int, str]] = CountedBy()
        self._answered: CountedBy[tuple[int, str]] = CountedBy()
        self._replays = make.counter("replays", "Replayed answers")
        self._replayed = 0
        self._source_requests = make.counter(
            "source_requests", "Requests to a webhook source, by its name and outcome", "source", "outcome"
        )
        self.latency = FastHistogram("request_seconds", "From the request to its answer", LATENCY_S, "outcome")
        self.stages = FastHistogram(
            "stage_seconds", "Time of a group in a stage of its write", LATENCY_S, "stage", STAGES
        )
        self.groups = FastHistogram("group_events", "Events in one transaction", GROUP_EVENTS)
        for histogram in (self.latency, self.stages, self.groups):
            self.registry.register(histogram)
        self.queued = make.gauge("queue_events", "Events that wait or are being written")
        self.queued_bytes = make.gauge("queue_bytes", "Bytes of events that wait or are being written")
        self.in_doubt = make.gauge("in_doubt_events", "Events without an outcome until a slot recovery")
        self.in_doubt_oldest = make.gauge(
            "in_doubt_oldest_seconds", "Longest time for which an event has been in doubt"
        )
        self.marks_failed = make.counter("marks_failed", "Marks that did not succeed at once")
        self.journal_dropped = make.counter("journal_dropped", "Answers that the journal has dropped")
        self.journal_waiting = make.gauge("journal_waiting_answers", "Answers that wait to be written to the journal")

    def _make_process_metrics(self, make: MetricFactory) -> None:
        """Make the metrics of the process, of its slots, and of Redis."""
        self.ready = make.gauge("ready", "Whether the process can write (1): a slot is ready, Redis and Kafka answer")
        self.task_failures = make.counter("task_failures", "Background tasks that ended with an error, by task", "task")
        self.clock_ahead = make.gauge(
            "clock_ahead_seconds", "By how much this machine's clock is ahead, at least (negative: behind)", "of"
        )
        self.slots = make.gauge("slots", "Slots of this process by state", "state")
        self.slot_down = make.gauge("slot_down_oldest_seconds", "Longest time for which a slot has been down")
        self.terms_ended = make.counter("terms_ended", "Terms that ended without giving the slot back", "why")
        self.redis_errors = make.counter("redis_errors", "Calls to Redis that failed, by how", "error")
        self.redis_memory = make.gauge("redis_memory_bytes", "Memory that Redis uses")
        self.redis_memory_limit = make.gauge(
            "redis_memory_limit_bytes", "maxmemory of Redis, or the memory of its machine if that is not set"
        )
        self.issuer_fetches = make.counter(
            "issuer_fetches", "Reads of the keys of an issuer of tokens, by its name and outcome", "issuer", "outcome"
        )

    def requested(self, status: int, code: str) -> None:
        """Count an HTTP request to write, by its answer's status and problem code."""
        self._requested[status, code] += 1

    def answered(self, code: str, status: int, latency_s: float, count: int = 1, *, replayed: bool = False) -> None:
        """Count `count` equal answers after `latency_s`, a replay once; an atomic batch has one answer."""
        self._answered[status, code] += count
        self._replayed += replayed
        self.latency.observe(latency_s, "ok" if status == 201 else "problem", count)

    def of_source(self, source: str) -> Mapping[str, Counter]:
        """Return the counters of the requests to a source, by outcome (SOURCE_OUTCOMES)."""
        return {outcome: self._source_requests.labels(source, outcome) for outcome in SOURCE_OUTCOMES}

    def render(self) -> bytes:
        """Render all metrics in the text format of /metrics."""
        for counter, counted in ((self._requests, self._requested), (self._answers, self._answered)):
            for labels, count in counted.items():
                counter.labels(*labels).inc(count)
            counted.clear()
        self._replays.inc(self._replayed)
        self._replayed = 0
        return generate_latest(self.registry)
