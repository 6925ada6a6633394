"""Makes Prometheus metrics in a registry."""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from service.core.logs import dropped_lines

NAMESPACE: Final = "fencepost"
# The bounds of histograms of latency, in seconds.
LATENCY_S: Final = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

# The `_created` series would double the number of series, and only repeat the start of the process.
disable_created_metrics()  # type: ignore[no-untyped-call]


class DroppedLines(Collector):
    """Shows how many lines the log of this process has dropped, read at each scrape: its handler counts them."""

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            f"{NAMESPACE}_log_lines_dropped", "Lines of the log that were dropped: nobody read it", dropped_lines()
        )

    describe = collect


class MetricFactory:
    """Makes the metrics of a registry, with the prefix of all metrics of the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)
