"""Reads a metric from a scrape."""

from service.core.metrics import Telemetry


def sample(telemetry: Telemetry, name: str, **labels: str) -> float:
    """Return a sample's value; 0 if it was never counted."""
    return telemetry.registry.get_sample_value(name, labels) or 0.0
