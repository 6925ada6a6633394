"""Makes Prometheus metrics in a registry; has a histogram that is quicker than the library's own."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.core.logs import dropped_lines

NAMESPACE: Final = "fencepost"

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

    def fast_histogram(
        self, name: str, text: str, bounds: Sequence[float], label: str = "", known: Sequence[str] = ()
    ) -> FastHistogram:
        made = FastHistogram(name, text, bounds, label, known)
        self.registry.register(made)
        return made
