"""Checks the permissions of the service's user: pure functions of a snapshot. Operations are Kafka's own."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from service.cli.finding import Finding, Level, grouped, judged
from service.contract import Rules
from service.contract.wire.names import transactional_id
from service.kafka.acl_inspector import ClusterSnapshot, Operation, VisibleTopic
from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.topics import InternalTopics

# The operations of the service on its own topics, and on topics for events.
OWN: Final = (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.READ, Operation.WRITE)
THEIRS: Final = (Operation.DESCRIBE, Operation.WRITE)
# Operations that the service can do without, and what is missing then.
UNREAD: Final = {
    Operation.READ: "a hanging transaction is not found there, and the slot's next one ends it with its own verdict",
    Operation.DESCRIBE_CONFIGS: "its limits are unknown, so each record that the broker refuses fails a transaction",
}
# The same of OFFSETS_TOPIC.
OFFSETS_UNREAD: Final = {
    Operation.DESCRIBE: "a coordinator is looked up for each batch, and the ledger does not name the partition",
    Operation.READ: "a hanging transaction is not found there, and hides the offsets of acknowledged batches",
    Operation.DESCRIBE_CONFIGS: "its min.insync.replicas is unknown, so a group without replicas costs a slot its term",
}


def missing(needed: Sequence[Operation], may: frozenset[Operation]) -> str:
    """Format the operations that are needed and not allowed, as Kafka's tools write them."""
    return ", ".join(operation.name.title().replace("_", "") for operation in needed if operation not in may)


def own_topics_allowed(
    snapshot: ClusterSnapshot, names: Sequence[str], creatable: Mapping[str, bool], grows: bool
) -> list[Finding]:
    """Check the permissions on Fencepost's own topics; for absent topics, the permission to create them."""
    rows: list[tuple[str, Finding]] = []
    check = "access.own-topics"
    for name in names:
        if name in snapshot.hidden:
            rows.append((name, Finding(check, Level.ERROR, "may not be described", _allow("Describe"))))
        elif name in snapshot.topics:
            needed = (*OWN, Operation.ALTER) if grows and name.endswith(".ledger") else OWN
            denied = missing(needed, snapshot.topics[name].may)
            text = f"no permission to {denied}" if denied else "may be read and written"
            rows.append((name, judged(check, not denied, text, _allow(denied))))
        else:
            text = "not there yet, and may be made" if creatable[name] else "not there, and may not be made"
            rows.append((name, judged(check, creatable[name], text, _allow("Create"))))
    return grouped(rows)


def slots_allowed(may: Mapping[int, frozenset[Operation]], namespace: str) -> list[Finding]:
    """Check the permission to produce with the transactional ids of the slots."""
    remedy = _allow("Describe and Write", f"transactional ids that begin with {namespace}.slot.")
    rows: list[tuple[str, Finding]] = []
    for slot, operations in may.items():
        denied = missing((Operation.DESCRIBE, Operation.WRITE), operations)
        text = f"no permission to {denied}" if denied else "may be produced under"
        rows.append((transactional_id(namespace, slot), judged("access.slots", not denied, text, remedy)))
    return grouped(rows)


def groups_of_rules(rules: Rules) -> list[str]:
    """List the consumer groups that the rules name without a glob."""
    return sorted({group for group in _groups(rules) if not set(group) & set("*?[")})


def has_groups(rules: Rules) -> bool:
    """Whether the rules let a caller commit the offsets of any consumer group."""
    return bool(_groups(rules))


def _groups(rules: Rules) -> list[str]:
    of_callers = [group for caller in rules.callers for group in caller.groups]
    return of_callers + [group for issuer in rules.issuers for group in issuer.groups]


def group_of_slots(namespace: str) -> str:
    """Make the name of a group by which a slot ends hanging transactions in OFFSETS_TOPIC."""
    return f"{transactional_id(namespace, 0)}.0"


def groups_allowed(may: Mapping[str, frozenset[Operation]], namespace: str) -> list[Finding]:
    """Check the permission to commit the offsets of groups, and to end what hangs there by a slot's group."""
    check = "access.groups"
    rows: list[tuple[str, Finding]] = []
    for group, operations in may.items():
        if Operation.READ in operations:
            rows.append((group, Finding(check, Level.OK, "its offsets may be committed")))
        elif group == group_of_slots(namespace):
            text = f"no permission to Read: a hanging transaction in {OFFSETS_TOPIC} cannot be ended"
            remedy = _allow("Read", f"groups that begin with {namespace}.slot.")
            rows.append((group, Finding(check, Level.WARNING, text, remedy)))
        else:
            text = "no permission to Read: batches with its offsets are refused (403 forbidden-group)"
            rows.append((group, Finding(check, Level.ERROR, text, _allow("Read", "this group"))))
    return grouped(rows)


def offsets_topic_allowed(snapshot: ClusterSnapshot) -> list[Finding]:
    """Check the permissions on OFFSETS_TOPIC, without which offsets are committed, but less safely."""
    if OFFSETS_TOPIC not in snapshot.topics and OFFSETS_TOPIC not in snapshot.hidden:
        return []  # Kafka creates it for the first group
    may = snapshot.topics[OFFSETS_TOPIC].may if OFFSETS_TOPIC in snapshot.topics else frozenset[Operation]()
    denied = missing(tuple(OFFSETS_UNREAD), may)
    why = "; ".join(text for operation, text in OFFSETS_UNREAD.items() if operation not in may)
    text = f"no permission to {denied}: {why}" if denied else "may be read"
    found = judged("access.offsets-topic", not denied, text, _allow(denied), Level.WARNING)
    return grouped([(OFFSETS_TOPIC, found)])


def _allow(what: str, on: str = "this topic") -> str:
    return f"allow the service's user {what} on {on} (kafka-acls --add)"


def names_of_rules(rules: Rules) -> list[str]:
    """List the topics that the rules name without a glob, and those for what is refused."""
    named = [rule.pattern for rule in rules.topics if not set(rule.pattern) & set("*?[")]
    return [*dict.fromkeys([*named, *sorted(rules.quarantine_topics)])]


def data_topics(snapshot: ClusterSnapshot, rules: Rules, internal: InternalTopics) -> dict[str, VisibleTopic]:
    """Find the topics that the rules match; without rules, all that the service may write to."""
    others = {name: seen for name, seen in snapshot.topics.items() if not internal.reserved(name)}
    if not rules.topics:
        return {name: seen for name, seen in others.items() if Operation.WRITE in seen.may}
    patterns = [*(rule.pattern for rule in rules.topics), *rules.quarantine_topics]
    return {name: seen for name, seen in others.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def data_topics_allowed(snapshot: ClusterSnapshot, found: Mapping[str, VisibleTopic], rules: Rules) -> list[Finding]:
    """Check that the topics of the rules exist, and that events may be written to them."""
    check = "access.data-topics"
    rows: list[tuple[str, Finding]] = []
    for name in names_of_rules(rules):
        if name in snapshot.hidden:
            rows.append((name, Finding(check, Level.ERROR, "may not be described", _allow("Describe, Write"))))
        elif name not in snapshot.topics and name in rules.quarantine_topics:
            change = "create it: until then the service answers 503 to what should be quarantined there"
            rows.append((name, Finding("topics.quarantine-there", Level.ERROR, "not there", change)))
        elif name not in snapshot.topics:
            change = "create it: the service creates no topics for events, and answers 404 until then"
            rows.append((name, Finding("topics.data-there", Level.WARNING, "not there", change)))
    rows += [(name, _data_topic_allowed(seen)) for name, seen in found.items()]
    if not rows:
        change = "create a topic for events, or allow the service's user Write on one"
        rows.append(("", Finding(check, Level.WARNING, "no topic that may be written", change)))
        return [finding for _, finding in rows]
    return grouped(rows)


def _data_topic_allowed(seen: VisibleTopic) -> Finding:
    check = "access.data-topics"
    if denied := missing(THEIRS, seen.may):
        return Finding(check, Level.ERROR, f"no permission to {denied}", _allow(denied))
    unread = missing((Operation.READ, Operation.DESCRIBE_CONFIGS), seen.may)
    if not unread:
        return Finding(check, Level.OK, "may be written")
    why = [text for operation, text in UNREAD.items() if operation not in seen.may]
    return Finding(check, Level.WARNING, f"no permission to {unread}: {'; '.join(why)}", _allow(unread))
