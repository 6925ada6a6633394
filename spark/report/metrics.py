"""metrics.prom: the counts of a report in the text format of Prometheus."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, cast, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from spark.report.model import SINK_COUNTS, Document, Evidence, Run, SilenceState, Sink, TopicCounts
from spark.rules.kinds import KINDS

PREFIX: Final = "fencepost_audit_"


def text(document: Document) -> str:
    """Encode the metrics of a document: gauges, with labels and values of this run only."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OfDocument(document))
    return generate_latest(registry).decode()


class _OfDocument(Collector):
    def __init__(self, document: Document) -> None:
        self._document = document

    def collect(self) -> Iterable[GaugeMetricFamily]:
        document = self._document
        yield from _of_run(document["run"])
        yield _gauges(
            "ids",
            "Ids of the window by state in the balance; state=records counts records.",
            ("state",),
            (((state,), cast(int, count)) for state, count in document["balance"].items()),
        )
        yield from _of_findings(document)
        yield from _of_topics(document["topics"])
        delivery = document["webhook"]
        failed = delivery is not None and delivery["error"] is not None
        yield _gauge("webhook_failed", "1 if the last run could not deliver findings to the webhook, else 0.", failed)
        yield from _of_evidence(document["evidence"])
        yield from _of_sinks(document["sinks"])
        yield _gauges(
            "step_seconds",
            "Time of the last run by step.",
            ("step",),
            (((step,), taken_s) for step, taken_s in document["cost"]["seconds"].items()),
        )


def _of_run(run: Run) -> Iterable[GaugeMetricFamily]:
    """Yield the metrics of the run itself."""
    yield _gauge("run", "Number of the last run.", run["number"])
    frozen_s = datetime.fromisoformat(run["frozen_at"]).timestamp()
    yield _gauge("frozen_timestamp_seconds", "When the ends of the last run were frozen.", frozen_s)
    yield _gauge("clean", "1 if the last run has no findings, else 0.", run["verdict"] == "clean")


def _of_findings(document: Document) -> Iterable[GaugeMetricFamily]:
    """Yield the metrics of the findings, and of those that are silenced."""
    yield _gauges(
        "findings",
        "Findings of the window by kind, without those that are silenced.",
        ("kind", "severity"),
        (((name, KINDS[name].severity), count) for name, count in document["kinds"].items()),
    )
    yield _gauges(
        "silenced_findings",
        "Silenced findings of the window by kind.",
        ("kind",),
        (((kind,), count) for kind, count in document["silenced"].items()),
    )
    states = Counter(silence["state"] for silence in document["silences"])
    yield _gauges(
        "silences",
        "Silences by state: active, expired, unmatched (of no finding).",
        ("state",),
        (((state,), states[state]) for state in get_args(SilenceState)),
    )
    yield _gauges(
        "finding_records",
        "Records of findings (surplus copies of duplicates and conflicts) by kind, topic and cause, without those "
        "of silenced findings.",
        ("kind", "topic", "cause"),
        (((row["kind"], row["topic"] or "", row["cause"] or ""), row["records"]) for row in document["causes"]),
    )


def _of_topics(topics: Sequence[TopicCounts]) -> Iterable[GaugeMetricFamily]:
    """Yield the metrics by topic."""
    yield _gauges(
        "delivered_ids",
        "Delivered ids of the window by topic.",
        ("topic",),
        (((row["topic"],), row["ids"]) for row in topics),
    )
    yield _gauges(
        "copies_extra",
        "Copies of the window beyond the first of their id, by topic.",
        ("topic",),
        (((row["topic"],), row["copies_extra"]) for row in topics),
    )


def _of_evidence(evidence: Evidence) -> Iterable[GaugeMetricFamily]:
    """Yield the metrics of what could not be decoded, and of what an open transaction blocks."""
    yield _gauge("rejects", "Records that could not be decoded.", evidence["rejects"])
    yield _gauge("held_up_partitions", "Partitions blocked by an open transaction.", len(evidence["held_up"]))
    oldest_s = max((log["age_s"] or 0 for log in evidence["held_up"]), default=0)
    yield _gauge(
        "held_up_oldest_seconds", "Age of the oldest of these transactions when the ends were frozen.", oldest_s
    )


def _of_sinks(sinks: Sequence[Sink]) -> Iterable[GaugeMetricFamily]:
    """Yield the metrics of the sinks; none of their families has a value without sinks."""
    yield _gauges(
        "sink_ids",
        "Ids of the window by sink and state in the sink's balance.",
        ("sink", "state"),
        (((sink["name"], state), sink[state]) for sink in sinks for state in SINK_COUNTS),
    )
    yield _gauges(
        "sink_readable",
        "0 if the last run could not read the sink, else 1.",
        ("sink",),
        (((sink["name"],), sink["unreadable"] is None) for sink in sinks),
    )
    yield _gauges(
        "sink_judged_until_timestamp_seconds",
        "The sink's watermark: every event that was accepted before is judged.",
        ("sink",),
        (
            ((sink["name"],), datetime.fromisoformat(judged).timestamp())
            for sink in sinks
            if (judged := sink["judged_until"]) is not None
        ),
    )


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, help, value=float(value))


def _gauges(
    name: str, help: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, help, labels=labels)
    for found, value in values:
        family.add_metric(found, value)
    return family
