"""The supported versions of Kafka: `python -m tests.kafka_versions` runs tests of the service's Kafka client on each.

The lock files here are of older versions; the newest is the broker of all other tests, `deploy/install/kafka.lock`.
"""

import os
from pathlib import Path
from typing import Final

from deploy.console import StackError
from deploy.install import jars

VARIABLE: Final = "TEST_KAFKA"
TRANSACTIONS_VARIABLE: Final = "TEST_TRANSACTIONS"
TESTS: Final = (
    "tests/contract/test_producer_and_slot.py",
    "tests/contract/test_vectors.py",
    "tests/integration/test_http_events.py",
    "tests/integration/test_batches.py",
    "tests/integration/test_idempotent.py",
    "tests/integration/test_reading.py",
    "tests/integration/test_managed.py",
)


def broker_of(lock: Path) -> str:
    """Return the version of the broker in a lock."""
    return next(jar.version for jar in jars.read_lock("kafka", lock) if jar.artifact == "kafka_2.13")


def release_of(lock: Path) -> str:
    """Return the release of the broker in a lock, as in "4.4"."""
    return broker_of(lock).rpartition(".")[0]


# By release. Before `use`, jars.LOCKS names the broker of all other tests.
LOCKS: Final = {release_of(path): path for path in (*sorted(Path(__file__).parent.glob("*.lock")), jars.LOCKS["kafka"])}


def transactions() -> str:
    """Return the setting of the service's transactions in tests with real brokers: "1", or what TEST_TRANSACTIONS has.

    `auto` has them use version 2 where the brokers have it (4.0 and newer).
    """
    return os.environ.get(TRANSACTIONS_VARIABLE, "1")


def running() -> str:
    """Return the release of the brokers of this process."""
    return release_of(jars.LOCKS["kafka"])


def have_version_2() -> bool:
    """Whether the brokers of this process have transactions of version 2 (KIP-890), as 4.0 and newer ones do."""
    return int(running().partition(".")[0]) >= 4


def use() -> None:
    """Have the brokers of this process run the version that TEST_KAFKA names, if it does. Raises StackError."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    if wanted not in LOCKS:
        raise StackError(f"{VARIABLE}={wanted} is no version that has a lock: set one of {', '.join(LOCKS)}")
    jars.LOCKS["kafka"] = LOCKS[wanted]
