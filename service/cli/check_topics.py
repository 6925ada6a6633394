"""Checks Fencepost's own topics and those for events: pure functions of a snapshot."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from service.cli.check_brokers import MIN_ISR, REPLICAS, UNCLEAN_ELECTION
from service.cli.finding import Finding, Level, grouped, judged
from service.core.settings import EVENT_BYTES_MAX
from service.kafka.acl_inspector import ClusterSnapshot, VisibleTopic
from service.kafka.topic_admin import Topic
from service.kafka.topics import OWN_MESSAGE_BYTES, InternalTopics

# The audit runs hourly, and a failed run is noticed and repeated within a day.
RETENTION_LEAST_MS: Final = 24 * 3_600_000
# Bytes around an event: of the record, of our headers, and of the batch.
ENVELOPE_BYTES: Final = 2_048
_CREATE_AGAIN: Final = "restart a process, which creates it again. Recovery and audit cannot read its records any more"


def own_topics(
    topics: Mapping[str, Topic], internal: InternalTopics, snapshot: ClusterSnapshot, slots_max: int
) -> list[Finding]:
    """Check the settings, partitions and replicas of Fencepost's own topics, which the first start creates."""
    rows: list[tuple[str, Finding]] = []
    for name, topic in topics.items():
        faults = internal.faults(topic)
        for fault in faults:
            found, _, change = fault.partition(": ")
            rows.append((name, Finding("topics.own-settings", Level.ERROR, found, change)))
        if not faults:
            rows.append((name, Finding("topics.own-settings", Level.OK, "cleanup, retention and timestamps are right")))
        rows += [(name, finding) for finding in _takes_our_records(topic, internal)]
        rows.append((name, replicas("topics.own-replicas", topic, snapshot.topics[name])))
        rows += [(name, finding) for finding in unclean_election("topics.own-unclean-election", topic)]
    if topics:
        gone = {internal.ledger, internal.requests, internal.control} - snapshot.topics.keys() - snapshot.hidden
        missing = Finding("topics.own-there", Level.ERROR, "not there, and others are", _CREATE_AGAIN)
        rows += [(name, missing) for name in sorted(gone)]
    ledger = topics.get(internal.ledger)
    if ledger is not None and ledger.partitions < slots_max:
        text = f"{ledger.partitions} partitions, which the next start raises to FENCEPOST_SLOTS_MAX={slots_max}"
        rows.append((ledger.name, Finding("topics.own-partitions", Level.OK, text)))
    return grouped(rows)


def retention(before_s: int | None, longest_s: int, key_ttl_s: int) -> list[Finding]:
    """Compare the longest retention of keys by the rules with the longest that the control topic remembers, in seconds.

    `before_s` is None if no process has written to the topic; `key_ttl_s` is that of keys for which no rule sets one.
    """
    remembered_s = max(before_s or 0, key_ttl_s)
    if before_s is None or longest_s == remembered_s == key_ttl_s:
        return []
    if longest_s > remembered_s:
        found = f"keys live for {longest_s} s, by earlier rules for {remembered_s} s at most"
        change = (
            "let the running processes take these rules (SIGHUP) before any process starts with them: a start does not "
            "know that keys were remembered for less, and may write again what was forgotten"
        )
        return [Finding("rules.retention", Level.WARNING, found, change)]
    more = f"; the recovery of a lost Redis reads back {remembered_s} s, as earlier rules need it"
    found = f"keys live for {longest_s} s at most{more if longest_s < remembered_s else ''}"
    return [Finding("rules.retention", Level.OK, found)]


def _takes_our_records(topic: Topic, internal: InternalTopics) -> Iterator[Finding]:
    """Check that one of the own topics takes records of the needed size and time, if its settings may be read."""
    if "max.message.bytes" in topic.settings:
        yield judged(
            "topics.own-message-bytes",
            topic.message_bytes_max >= OWN_MESSAGE_BYTES,
            f"max.message.bytes={topic.message_bytes_max}",
            f"set {OWN_MESSAGE_BYTES} or more, or expect smaller groups and so more transactions, and 413 for atomic "
            "batches that the ledger has no room for",
            Level.WARNING,
        )
    timestamp_type = topic.settings.get("message.timestamp.type")
    if topic.name == internal.control and timestamp_type is not None:
        yield judged(
            "topics.own-timestamps",
            timestamp_type == "LogAppendTime",
            f"message.timestamp.type={timestamp_type}",
            "set LogAppendTime on it, as on new ones: otherwise a wrong clock, or bounds on timestamps, may make Kafka "
            "refuse records that each start needs",
            Level.WARNING,
        )


def replicas(check: str, topic: Topic, seen: VisibleTopic) -> Finding:
    """Check the replication and the min ISR of a topic, the latter if it may be read."""
    least = topic.settings.get("min.insync.replicas")
    return judged(
        check,
        seen.replication >= REPLICAS and int(least or MIN_ISR) >= MIN_ISR,
        f"replication {seen.replication}" + (f", min.insync.replicas={least}" if least else ""),
        f"reassign it to {REPLICAS} replicas and set min.insync.replicas={MIN_ISR} on it",
    )


def unclean_election(check: str, topic: Topic) -> Iterator[Finding]:
    """Report a topic that allows unclean elections, by a setting of its own or by that of the brokers."""
    if topic.settings.get(UNCLEAN_ELECTION) == "true":
        change = f"set {UNCLEAN_ELECTION}=false on it: a leader that lags removes acknowledged events"
        yield Finding(check, Level.ERROR, f"{UNCLEAN_ELECTION}=true", change)


def data_topic_settings(
    topics: Mapping[str, Topic], found: Mapping[str, VisibleTopic], quarantine: Collection[str] = ()
) -> list[Finding]:
    """Check the settings of the topics for events that may be read; `quarantine`: those for what is refused."""
    rows: list[tuple[str, Finding]] = []
    for name, topic in topics.items():
        rows.append((name, replicas("topics.data-replicas", topic, found[name])))
        rows += [(name, finding) for finding in unclean_election("topics.data-unclean-election", topic)]
        if topic.settings:
            rows += [(name, finding) for finding in _of_data_topic(topic)]
        if name in quarantine and "compact" in topic.settings.get("cleanup.policy", ""):
            change = "set cleanup.policy=delete: what has no record key cannot be written there, and is answered 503"
            rows.append((name, Finding("topics.quarantine-policy", Level.ERROR, "it is compacted", change)))
    return grouped(rows)


def _of_data_topic(topic: Topic) -> Iterator[Finding]:
    policy = topic.settings.get("cleanup.policy", "delete")
    yield judged(
        "topics.data-compaction",
        "compact" not in policy,
        f"cleanup.policy={policy}",
        "note that events without a key are refused, and that the audit cannot count compacted records",
        Level.WARNING,
    )
    yield judged(
        "topics.data-message-bytes",
        topic.message_bytes_max >= EVENT_BYTES_MAX + ENVELOPE_BYTES,
        f"max.message.bytes={topic.message_bytes_max}",
        f"set {EVENT_BYTES_MAX + ENVELOPE_BYTES} or more, or expect 413 for larger events, which the service takes up "
        f"to {EVENT_BYTES_MAX} bytes otherwise",
        Level.WARNING,
    )
    kept_ms = int(topic.settings.get("retention.ms", -1))
    yield judged(
        "topics.data-retention",
        "delete" not in policy or kept_ms < 0 or kept_ms >= RETENTION_LEAST_MS,
        "kept for ever" if kept_ms < 0 else f"kept for {kept_ms / 3_600_000:g} h",
        f"set retention.ms={RETENTION_LEAST_MS} or more: the audit cannot read deleted records",
        Level.WARNING,
    )
