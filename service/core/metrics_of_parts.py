"""The metrics of single parts of a process. Each class makes those of one part."""

from typing import Final

from service.core.collectors import LATENCY_S, MetricFactory

RECOVERY_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
RELOAD_OUTCOMES: Final = ("applied", "refused")


class RecoveryMetrics:
    """The recoveries of slots and of the store."""

    def __init__(self, make: MetricFactory) -> None:
        self.fences = make.counter("fences", "Transactional ids fenced (InitProducerId), by the recovery's kind", "of")
        self.slot_seconds = make.histogram(
            "slot_recovery_seconds", "Duration of successful slot recoveries", RECOVERY_S
        )
        self.store_seconds = make.histogram(
            "store_recovery_seconds", "Duration of store recoveries that this process made", RECOVERY_S
        )
        self.replayed = make.counter("replayed_keys", "Keys read back from the ledger, by the recovery's kind", "of")
        self.replay_remaining = make.gauge(
            "replay_remaining_records", "Offsets of the ledger that this process's store recovery has not read yet"
        )
        self.hanging_ended = make.counter(
            "hanging_ended", "Hanging transactions ended, one for each partition, by verdict", "verdict"
        )


class StoreMetrics:
    """The store, and its generation."""

    def __init__(self, make: MetricFactory) -> None:
        self.state = make.gauge("store_state", "Whether the store is in this state (1) or not (0)", "state")
        self.losses = make.counter("store_losses", "How often the store was lost")
        self.generation = make.gauge("generation", "The generation that this process works with, 0 without any")
        self.generation_changes = make.counter("generation_changes", "Changes from one generation to another")


class KafkaMetrics:
    """Requests to Kafka, and what is watched of its topics."""

    def __init__(self, make: MetricFactory) -> None:
        self.errors = make.counter("kafka_errors", "Failed requests to Kafka, by operation", "operation")
        self.stalled = make.gauge(
            "stalled_partitions", "Partitions whose last stable offset does not move, by owner of the transaction", "of"
        )
        self.stalled_oldest = make.gauge("stalled_oldest_seconds", "Longest time for which one has not moved", "of")
        self.own_message_bytes = make.gauge(
            "own_topic_message_bytes", "max.message.bytes of Fencepost's own topics: groups are made to fit", "topic"
        )
        self.own_topic_faults = make.gauge(
            "own_topic_faults", "Settings of Fencepost's own topics that were changed, and topics that were deleted"
        )


class SchemaRegistryMetrics:
    """The Schema Registry, and the schemas that were read from it."""

    def __init__(self, make: MetricFactory) -> None:
        self.requests = make.counter("registry_requests", "Requests to the Schema Registry, by outcome", "outcome")
        self.seconds = make.histogram(
            "registry_request_seconds", "Duration of requests to the Schema Registry", LATENCY_S
        )
        self.away = make.gauge(
            "registry_away", "Whether the last request to the Schema Registry has failed (1) or not (0)"
        )
        self.unserved = make.counter(
            "registry_unserved", "Events answered 503 because their schema could not be looked up"
        )
        self.schemas = make.gauge("registry_schemas", "Schemas in memory, ready to encode")
        self.schema_bytes = make.gauge("registry_schema_bytes", "Bytes of the texts of schemas in memory")


class TlsMetrics:
    """TLS of the HTTP listener."""

    def __init__(self, make: MetricFactory) -> None:
        self.handshakes = make.counter("http_tls_handshakes", "TLS handshakes of clients, by outcome", "outcome")
        self.valid_until = make.gauge(
            "http_tls_certificate_expiry_timestamp_seconds",
            "When the certificate of new connections expires, Unix time; 0 without TLS",
        )
        self.successful = make.gauge(
            "http_tls_last_reload_successful", "Whether the files of the certificate could be used (1) or not (0)"
        )
        self.successful.set(1)


class RulesMetrics:
    """The rules in force, and their reloads. The names of the last two are Prometheus' own for its configuration."""

    def __init__(self, make: MetricFactory) -> None:
        self._info = make.gauge(
            "rules_info",
            "The rules in force (1): SHA-256 of their file, and of the schemas that it names",
            "sha256",
            "schemas",
        )
        self._reloads = make.counter("rules_reloads", "Readings of changed rules, by outcome", "outcome")
        for outcome in RELOAD_OUTCOMES:
            self._reloads.labels(outcome)
        self._successful = make.gauge(
            "rules_last_reload_successful", "Whether the last reading of the rules was taken (1) or refused (0)"
        )
        self._success_at = make.gauge(
            "rules_last_reload_success_timestamp_seconds", "When the rules in force were taken, Unix time"
        )

    def in_force(self, sha256: str, schemas_sha256: str, at: float) -> None:
        """Show the digests (hexadecimal, or empty) of the rules in force, which were taken at this Unix time."""
        self._info.clear()
        self._info.labels(sha256, schemas_sha256).set(1)
        self._successful.set(1)
        self._success_at.set(at)

    def read(self, *, applied: bool) -> None:
        """Count a reading of changed rules: they were taken, or could not be used."""
        self._successful.set(applied)
        self._reloads.labels("applied" if applied else "refused").inc()
