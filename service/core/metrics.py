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

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.core.logs import dropped_lines

NAMESPACE: Final = "fencepost"
LATENCY_S: Final = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
GROUP_EVENTS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
SOURCE_OUTCOMES: Final = ("written", "duplicate", "quarantined", "bad_signature", "refused", "failed", "challenge")
RELOAD_OUTCOMES: Final = ("applied", "refused")
STAGES: Final = ("queue", "claim", "kafka", "mark")
RECOVERY_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

# The `_created` series would double the number of series, and only repeat the start of the process.
disable_created_metrics()  # type: ignore[no-untyped-call]


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
        self._buckets: dict[str, list[int]] = {}  # by the label's value
        self._sums: defaultdict[str, float] = defaultdict(float)
        for value in known if label else [""]:
            self.observe(0, value, 0)

    def observe(self, value: float, label_value: str = "", count: int = 1) -> None:
        """Count `count` observations of a value."""
        buckets = self._buckets.get(label_value)
        if buckets is None:
            buckets = self._buckets[label_value] = [0] * (len(self._bounds) + 1)
        buckets[bisect_left(self._bounds, value)] += count
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


class DroppedLines(Collector):
    """Shows how many lines the log of this process has dropped, read at each scrape: its handler counts them."""

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            f"{NAMESPACE}_log_lines_dropped", "Lines of the log that were dropped: nobody read it", dropped_lines()
        )

    describe = collect


class Telemetry:
    """All metrics of one process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.ready = self._gauge("ready", "Whether the process can write (1): a slot is ready, Redis and Kafka answer")

        # Requests, and the events in them.
        self._requests = self._counter("requests", "HTTP requests to write, by status and code", "status", "code")
        self._answers = self._counter("answers", "Answers to events, by status and code", "status", "code")
        # Counts since the last scrape, by status and code: the library's counters take a lock for each increment.
        self._requested: CountedBy[tuple[int, str]] = CountedBy()
        self._answered: CountedBy[tuple[int, str]] = CountedBy()
        self.replays = self._counter("replays", "Replayed answers")
        self._source_requests = self._counter(
            "source_requests", "Requests to a webhook source, by its name and outcome", "source", "outcome"
        )
        self.latency = FastHistogram("request_seconds", "From the request to its answer", LATENCY_S, "outcome")
        self.stages = FastHistogram(
            "stage_seconds", "Time of a group in a stage of its write", LATENCY_S, "stage", STAGES
        )
        self.groups = FastHistogram("group_events", "Events in one transaction", GROUP_EVENTS)
        for histogram in (self.latency, self.stages, self.groups):
            self.registry.register(histogram)
        self.queued = self._gauge("queue_events", "Events that wait or are being written")
        self.queued_bytes = self._gauge("queue_bytes", "Bytes of events that wait or are being written")
        self.in_doubt = self._gauge("in_doubt_events", "Events without an outcome until a slot recovery")
        self.in_doubt_oldest = self._gauge(
            "in_doubt_oldest_seconds", "Longest time for which an event has been in doubt"
        )

        # Slots, and the store.
        self.slots = self._gauge("slots", "Slots of this process by state", "state")
        self.slot_down = self._gauge("slot_down_oldest_seconds", "Longest time for which a slot has been down")
        self.fences = self._counter("fences", "Transactional ids fenced (InitProducerId), by the recovery's kind", "of")
        self.slot_recoveries = self._histogram(
            "slot_recovery_seconds", "Duration of successful slot recoveries", RECOVERY_S
        )
        self.terms_ended = self._counter("terms_ended", "Terms that ended without giving the slot back", "why")
        self.store_state = self._gauge("store_state", "Whether the store is in this state (1) or not (0)", "state")
        self.store_losses = self._counter("store_losses", "How often the store was lost")
        self.store_recoveries = self._histogram(
            "store_recovery_seconds", "Duration of store recoveries that this process made", RECOVERY_S
        )
        self.generation = self._gauge("generation", "The generation that this process works with, 0 without any")
        self.generation_changes = self._counter("generation_changes", "Changes from one generation to another")
        self.replayed = self._counter("replayed_keys", "Keys read back from the ledger, by the recovery's kind", "of")
        self.replay_remaining = self._gauge(
            "replay_remaining_records", "Offsets of the ledger that this process's store recovery has not read yet"
        )
        self.marks_failed = self._counter("marks_failed", "Marks that did not succeed at once")
        self.journal_dropped = self._counter("journal_dropped", "Answers that the journal has dropped")
        self.journal_waiting = self._gauge("journal_waiting_answers", "Answers that wait to be written to the journal")

        # Redis, Kafka and this process.
        self.redis_errors = self._counter("redis_errors", "Calls to Redis that failed, by how", "error")
        self.redis_memory = self._gauge("redis_memory_bytes", "Memory that Redis uses")
        self.redis_memory_limit = self._gauge(
            "redis_memory_limit_bytes", "maxmemory of Redis, or the memory of its machine if that is not set"
        )
        self.stalled = self._gauge(
            "stalled_partitions", "Partitions whose last stable offset does not move, by owner of the transaction", "of"
        )
        self.stalled_oldest = self._gauge("stalled_oldest_seconds", "Longest time for which one has not moved", "of")
        self.hanging_ended = self._counter(
            "hanging_ended", "Hanging transactions ended, one for each partition, by verdict", "verdict"
        )
        self.own_message_bytes = self._gauge(
            "own_topic_message_bytes", "max.message.bytes of Fencepost's own topics: groups are made to fit", "topic"
        )
        self.own_topic_faults = self._gauge(
            "own_topic_faults", "Settings of Fencepost's own topics that were changed, and topics that were deleted"
        )
        self.task_failures = self._counter(
            "task_failures", "Background tasks that ended with an error, by task", "task"
        )
        self.registry.register(DroppedLines())
        self.clock_ahead = self._gauge(
            "clock_ahead_seconds", "By how much this machine's clock is ahead, at least (negative: behind)", "of"
        )
        self.registry_requests = self._counter(
            "registry_requests", "Requests to the Schema Registry, by outcome", "outcome"
        )
        self.registry_seconds = self._histogram(
            "registry_request_seconds", "Duration of requests to the Schema Registry", LATENCY_S
        )
        self.registry_away = self._gauge(
            "registry_away", "Whether the last request to the Schema Registry has failed (1) or not (0)"
        )
        self.registry_unserved = self._counter(
            "registry_unserved", "Events answered 503 because their schema could not be looked up"
        )
        self.registry_schemas = self._gauge("registry_schemas", "Schemas in memory, ready to encode")
        self.registry_schema_bytes = self._gauge("registry_schema_bytes", "Bytes of the texts of schemas in memory")
        self.issuer_fetches = self._counter(
            "issuer_fetches", "Reads of the keys of an issuer of tokens, by its name and outcome", "issuer", "outcome"
        )
        self.kafka_errors = self._counter("kafka_errors", "Failed requests to Kafka, by operation", "operation")

        # TLS of the HTTP listener.
        self.tls_handshakes = self._counter("http_tls_handshakes", "TLS handshakes of clients, by outcome", "outcome")
        self.tls_valid_until = self._gauge(
            "http_tls_certificate_expiry_timestamp_seconds",
            "When the certificate of new connections expires, Unix time; 0 without TLS",
        )
        self.tls_successful = self._gauge(
            "http_tls_last_reload_successful", "Whether the files of the certificate could be used (1) or not (0)"
        )
        self.tls_successful.set(1)

        # The rules. The names of the last two are Prometheus' own for its configuration.
        self._rules_info = self._gauge(
            "rules_info",
            "The rules in force (1): SHA-256 of their file, and of the schemas that it names",
            "sha256",
            "schemas",
        )
        self._rules_reloads = self._counter("rules_reloads", "Readings of changed rules, by outcome", "outcome")
        for outcome in RELOAD_OUTCOMES:
            self._rules_reloads.labels(outcome)
        self._rules_successful = self._gauge(
            "rules_last_reload_successful", "Whether the last reading of the rules was taken (1) or refused (0)"
        )
        self._rules_success_at = self._gauge(
            "rules_last_reload_success_timestamp_seconds", "When the rules in force were taken, Unix time"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)

    def requested(self, status: int, code: str) -> None:
        """Count an HTTP request to write, by its answer's status and problem code."""
        self._requested[status, code] += 1

    def answered(self, code: str, status: int, latency_s: float, count: int = 1) -> None:
        """Count `count` equal answers after `latency_s`; an atomic batch has one."""
        self._answered[status, code] += count
        self.latency.observe(latency_s, "ok" if status == 201 else "problem", count)

    def of_source(self, source: str) -> Mapping[str, Counter]:
        """Return the counters of the requests to a source, by outcome (SOURCE_OUTCOMES)."""
        return {outcome: self._source_requests.labels(source, outcome) for outcome in SOURCE_OUTCOMES}

    def rules_in_force(self, sha256: str, schemas_sha256: str, at: float) -> None:
        """Show the digests (hexadecimal, or empty) of the rules in force, which were taken at this Unix time."""
        self._rules_info.clear()
        self._rules_info.labels(sha256, schemas_sha256).set(1)
        self._rules_successful.set(1)
        self._rules_success_at.set(at)

    def rules_read(self, *, applied: bool) -> None:
        """Count a reading of changed rules: they were taken, or could not be used."""
        self._rules_successful.set(applied)
        self._rules_reloads.labels("applied" if applied else "refused").inc()

    def render(self) -> bytes:
        """Render all metrics in the text format of /metrics."""
        for counter, counted in ((self._requests, self._requested), (self._answers, self._answered)):
            for labels, count in counted.items():
                counter.labels(*labels).inc(count)
            counted.clear()
        return generate_latest(self.registry)
