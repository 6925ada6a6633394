"""Computes how long a process may take to stop."""

from service.__main__ import DRAIN_EXTRA_S
from service.app import JOURNAL_TIMEOUT_S, TRACES_TIMEOUT_S
from service.core.settings import Settings
from service.http.server import LINGER_S
from service.kafka.session import CLOSE_TIMEOUT_S


def drain_s(settings: Settings) -> float:
    """Compute the time from SIGTERM until every accepted request has its answer."""
    return LINGER_S + settings.request_timeout_ms / 1000 + DRAIN_EXTRA_S


def way_out_s(settings: Settings) -> float:
    """Compute the time from SIGTERM to the end if everything takes its longest time: Kafka and Redis are unreachable.

    Pool.stop waits for the slots, and once more after cancelling them; a producer closes two sessions.
    """
    slots_s = 2 * settings.timeouts_ms / 1000
    return drain_s(settings) + slots_s + JOURNAL_TIMEOUT_S + TRACES_TIMEOUT_S + 3 * CLOSE_TIMEOUT_S
