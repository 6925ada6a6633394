"""Reads a metric from a scrape."""

from service.core.metrics import Telemetry


def sample(telemetry: Telemetry, name: str, **labels: str) -> float:
    """Return a sample's value after a scrape; 0 if it was never counted."""
    telemetry.render()
    return telemetry.registry.get_sample_value(name, labels) or 0.0
