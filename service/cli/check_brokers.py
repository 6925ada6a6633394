"""Checks the brokers: pure functions of a snapshot. Names of settings are Kafka's own."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from service.cli.finding import Finding, Level, grouped, judged
from service.core.settings import Settings
from service.kafka.acl_inspector import ClusterSnapshot
from service.kafka.admin import TRANSACTIONS_1
from service.kafka.protocol import EPOCH_PER_TRANSACTION

# With these, Kafka keeps all acknowledged records although one broker is lost.
REPLICAS: Final = 3
MIN_ISR: Final = 2
UNCLEAN_ELECTION: Final = "unclean.leader.election.enable"
TRANSACTION_LOG: Final = "__transaction_state"
VERIFICATION: Final = "transaction.partition.verification.enable"
# The shortest acceptable expiry of transactional ids: a slot whose id has expired must be recovered at its next use.
ID_EXPIRATION_LEAST_MS: Final = 24 * 3_600_000

# The newest metadata.version of each release since 3.6 (MetadataVersion in Kafka), and of those before.
RELEASES: Final = {
    14: "3.6",
    19: "3.7",
    20: "3.8",
    21: "3.9",
    25: "4.0",
    27: "4.1",
    29: "4.2",
    30: "4.3",
    33: "4.4",
}
OLDEST: Final = 11
# The shortest time between two logins on a connection.
SESSION_LEAST_MS: Final = 5_000

# WriteTxnMarkers has version 2 since Kafka 4.2 (KIP-1228), the first release that skips markers.
WRITE_TXN_MARKERS: Final = 27
MARKERS_SKIPPED_SINCE: Final = 2

# Releases with a fault of transactions of version 2 that a later patch level has mended: an abort that raises the epoch
# twice. No release refuses markers that a coordinator sends again (KAFKA-19999): 4.2.0 has the mend.
PATCHED: Final = {"4.0": "KAFKA-19367"}

BrokerSettings = Mapping[int, Mapping[str, str]]
"""The effective settings of each broker, by its number."""


def brokers(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """Check the number of brokers, and that each is reached at its advertised address."""
    number = len(snapshot.nodes)
    yield judged(
        "kafka.brokers",
        number >= REPLICAS,
        f"{number} broker{'s' if number != 1 else ''}",
        f"run {REPLICAS} or more, in as many zones: fewer cannot keep what one of them acknowledged",
    )
    yield from grouped(
        (
            f"broker {node.id}",
            judged(
                "kafka.advertised",
                not node.why_not,
                "reached at its advertised address" if not node.why_not else f"{node.address}: {node.why_not}",
                "set advertised.listeners on it to an address that clients reach from here",
            ),
        )
        for node in snapshot.nodes
    )


def release(metadata_version: int) -> str:
    """Return the release of Kafka whose newest metadata.version this is; "" if it is newer than the last one known."""
    return next((name for newest, name in RELEASES.items() if metadata_version <= newest), "")


def releases(metadata_versions: Mapping[int, int | None]) -> list[Finding]:
    """Name the release of each broker that tells it, by its metadata.version."""
    check, last = "kafka.release", [*RELEASES.values()][-1]
    rows = []
    for node, version in metadata_versions.items():
        if version is None:
            continue
        name = release(version)
        found = f"Kafka {name}" if name else f"newer than Kafka {last}, the newest that was tested"
        tested = version > OLDEST
        change = "run 3.6 or newer (KIP-890)"
        rows.append((f"broker {node}", judged(check, tested, found if tested else "older than Kafka 3.6", change)))
    return grouped(rows)


def skips_markers(versions: Mapping[int, int]) -> bool:
    """Whether a broker's version completes transactions without the markers of leaderless partitions.

    `versions` as `AclInspector.versions_of` has them. No release up to 4.4.0 fixes it (KAFKA-20734).
    """
    return versions.get(WRITE_TXN_MARKERS, 0) >= MARKERS_SKIPPED_SINCE


def transaction_markers(versions: Mapping[int, Mapping[int, int]]) -> Iterator[Finding]:
    """Check that brokers write all markers of a transaction; `versions` of requests, by the broker's number."""
    yield from grouped(
        (
            f"broker {node}",
            judged(
                "kafka.transaction-markers",
                not skips_markers(of),
                "4.2 or newer: after a crash it may leave transactions open (KAFKA-20734)"
                if skips_markers(of)
                else "older than 4.2: it leaves no transaction without its markers",
                "nothing, where the service may Read its topics: it ends what hangs; no release up to 4.4.0 mends it, "
                "so replace one broker at a time, and never run `kafka-transactions abort` on a slot's transaction",
                Level.WARNING,
            ),
        )
        for node, of in versions.items()
    )


def transactions(levels: Mapping[int, int], metadata_versions: Mapping[int, int | None], allowed: str) -> list[Finding]:
    """Name the version of transactions at each broker, by its finalized transaction.version; `allowed` by the setting.

    Releases in PATCHED have faults of version 2 in their first patch levels; a broker does not report its patch level.
    """
    rows = []
    for node, level in levels.items():
        is_second = level >= EPOCH_PER_TRANSACTION and allowed != TRANSACTIONS_1
        name = release(metadata_versions.get(node) or 0)
        faults = PATCHED.get(name, "") if is_second else ""
        found = f"transactions of version {2 if is_second else 1} (transaction.version={level})"
        change = f"run the newest patch level of Kafka {name} ({faults}), or set FENCEPOST_KAFKA_TRANSACTIONS=1"
        if faults:
            found += f", and Kafka {name}, whose first patch level may leave them unfinished"
        rows.append((f"broker {node}", judged("kafka.transactions", not faults, found, change, Level.WARNING)))
    return grouped(rows)


class Rule(NamedTuple):
    """A check of a broker's setting: its name, when it passes, and otherwise its level and what to change."""

    check: str
    setting: str
    well: Callable[[str], bool]
    otherwise: Level
    change: str


def at_least(least: int) -> Callable[[str], bool]:
    return lambda value: int(value) >= least


def broker_rules(settings: Settings, topics_there: bool) -> Iterator[Rule]:
    """List the checks of brokers. `topics_there`: Fencepost's own topics exist, so defaults do not concern them."""
    yield from _replication_rules(topics_there)
    yield from _transaction_rules(settings)
    if settings.kafka_sasl:
        yield _SESSION_RULE


def _replication_rules(topics_there: bool) -> Iterator[Rule]:
    """List the checks of what keeps acknowledged records: replicas, and the election of leaders."""
    default = Level.WARNING if topics_there else Level.ERROR
    yield Rule(
        "kafka.default-replication",
        "default.replication.factor",
        at_least(REPLICAS),
        default,
        f"set {REPLICAS} on the brokers: Fencepost makes its own topics with it",
    )
    yield Rule(
        "kafka.min-isr",
        "min.insync.replicas",
        at_least(MIN_ISR),
        default,
        f"set {MIN_ISR} on the brokers: with less, a record on a single disk is acknowledged, and lost with that disk",
    )
    yield Rule(
        "kafka.unclean-election",
        UNCLEAN_ELECTION,
        lambda value: value == "false",
        Level.ERROR,
        "set false on the brokers: a leader that lags removes acknowledged events",
    )


def _transaction_rules(settings: Settings) -> Iterator[Rule]:
    """List the checks of what transactions and their ids need."""
    yield Rule(
        "kafka.transaction-verification",
        VERIFICATION,
        lambda value: value == "true",
        Level.ERROR,
        "set true on the brokers: without it a late write can leave a transaction open for ever (KIP-890)",
    )
    yield Rule(
        "kafka.transaction-log-min-isr",
        "transaction.state.log.min.isr",
        at_least(MIN_ISR),
        Level.ERROR,
        f"set {MIN_ISR} on the brokers: one disk alone must not decide the outcome of transactions",
    )
    yield Rule(
        "kafka.transaction-timeout",
        "transaction.max.timeout.ms",
        at_least(settings.transaction_timeout_ms),
        Level.ERROR,
        f"set {settings.transaction_timeout_ms} or more on the brokers, or a smaller "
        "FENCEPOST_TRANSACTION_TIMEOUT_MS: they refuse every producer otherwise",
    )
    yield Rule(
        "kafka.id-expiration",
        "transactional.id.expiration.ms",
        at_least(ID_EXPIRATION_LEAST_MS),
        Level.WARNING,
        f"set {ID_EXPIRATION_LEAST_MS} (a day) or more on the brokers: a slot that was idle for longer is recovered "
        "before its next event",
    )


# Of a listener with SASL.
_SESSION_RULE: Final = Rule(
    "kafka.reauthentication",
    "connections.max.reauth.ms",
    lambda value: int(value) == 0 or int(value) >= SESSION_LEAST_MS,
    Level.WARNING,
    f"set {SESSION_LEAST_MS} or more for the listener, or 0: a login that takes longer than a tenth of that "
    "time comes too late, and the connection ends (KIP-368)",
)


def broker_settings(found: BrokerSettings, settings: Settings, topics_there: bool) -> Iterator[Finding]:
    """Check the settings of each broker."""
    if not found:
        yield Finding(
            "kafka.settings",
            Level.WARNING,
            "the brokers' settings may not be read, so they are not checked",
            "allow this user DescribeConfigs on the cluster, or run the doctor as a user who has it",
        )
        return
    yield from grouped(
        (
            f"broker {node}",
            judged(
                "kafka.version",
                VERIFICATION in values,
                "3.6 or newer" if VERIFICATION in values else "older than 3.6: it cannot verify transactions",
                "run 3.6 or newer (KIP-890)",
            ),
        )
        for node, values in found.items()
    )
    for rule in broker_rules(settings, topics_there):
        yield from grouped(
            (
                f"broker {node}",
                judged(
                    rule.check,
                    rule.well(values[rule.setting]),
                    f"{rule.setting}={values[rule.setting]}",
                    rule.change,
                    rule.otherwise,
                ),
            )
            for node, values in found.items()
            if rule.setting in values
        )


def transaction_log(snapshot: ClusterSnapshot, found: BrokerSettings) -> Iterator[Finding]:
    """Check the replication of the transaction log: as it is, or as it would be created."""
    name = "transaction.state.log.replication.factor"
    seen = snapshot.topics.get(TRANSACTION_LOG)
    if seen is not None:
        replication, text = seen.replication, f"{TRANSACTION_LOG} has {seen.replication} replica(s)"
    elif found:
        replication = min(int(values.get(name, REPLICAS)) for values in found.values())
        text = f"{name}={replication}"
    else:
        return
    yield judged(
        "kafka.transaction-log",
        replication >= REPLICAS,
        text,
        f"set {name}={REPLICAS} on the brokers, and reassign {TRANSACTION_LOG} if it is there already",
    )
