"""Names of topics and of processes, the names of a namespace's own topics, and those of transactional ids."""

import re
from typing import Final

INSTANCE: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# Kafka's rule for topic names, which need no escaping in JSON.
TOPIC_CHARS_MAX: Final = 249
TOPIC: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{TOPIC_CHARS_MAX}}}")


def ledger_topic(namespace: str) -> str:
    """Name the topic whose partition n belongs to slot n; it has slots_max partitions."""
    return f"{namespace}.ledger"


def requests_topic(namespace: str) -> str:
    """Name the topic of the journal of answers."""
    return f"{namespace}.requests"


def control_topic(namespace: str) -> str:
    """Name the topic of the generations and barriers; one partition, compacted."""
    return f"{namespace}.control"


def findings_topic(namespace: str) -> str:
    """Name the topic of the audit's findings, keyed by finding; compacted."""
    return f"{namespace}.findings"


def internal_topics(namespace: str) -> tuple[str, ...]:
    """Name all of a namespace's own topics."""
    return tuple(name(namespace) for name in (ledger_topic, requests_topic, control_topic, findings_topic))


def is_kafka_topic(topic: str) -> bool:
    """Check whether a topic is one of Kafka's own, such as __consumer_offsets."""
    return topic.startswith("__")


def transactional_id(namespace: str, slot: int) -> str:
    """Name the `transactional.id` of a slot, which outlives each process (KIP-98)."""
    return f"{namespace}.slot.{slot}"
