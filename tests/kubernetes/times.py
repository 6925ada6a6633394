"""How long a process may take to leave."""

from service.__main__ import DRAIN_EXTRA_S
from service.app import JOURNAL_TIMEOUT_S, TRACES_TIMEOUT_S
from service.core.settings import Settings
from service.http.limits import LINGER_S
from service.kafka.session import CLOSE_TIMEOUT_S


def drain_s(settings: Settings) -> float:
    """From SIGTERM until every request that was accepted has its answer."""
    return LINGER_S + settings.request_timeout_ms / 1000 + DRAIN_EXTRA_S


def way_out_s(settings: Settings) -> float:
    """From SIGTERM to the end, where everything takes as long as it may: Kafka and Redis are away.

    The slots are waited for, and once more when they have been cut off (Pool.stop); a producer hangs up twice.
    """
    slots_s = 2 * (settings.request_timeout_ms + settings.transaction_timeout_ms) / 1000
    return drain_s(settings) + slots_s + JOURNAL_TIMEOUT_S + TRACES_TIMEOUT_S + 3 * CLOSE_TIMEOUT_S
