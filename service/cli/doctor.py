"""`fencepost doctor`: checks login, brokers, ACLs, topics, Redis, clocks, Schema Registry and issuers.

It writes nothing but MEASUREMENTS records of the journal without answers, whose timestamps are the broker's clock.
"""

import hashlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final

from service.cli import (
    check_access,
    check_brokers,
    check_clocks,
    check_issuers,
    check_login,
    check_redis,
    check_registry,
    check_topics,
)
from service.cli.check_clocks import ClockOffset
from service.cli.check_redis import Rate
from service.cli.finding import Finding, Level
from service.cli.parts import kafka_admin, keys_view
from service.cli.redis_view import KeysView
from service.contract import Rules
from service.contract.wire.control import ttl_of_retention
from service.contract.wire.journal import encode_answers
from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.names import transactional_id
from service.contract.wire.versions import WireError
from service.core.problems import KafkaAway, StoreAway, StoreUnanswered
from service.core.redis_address import kind_of
from service.core.settings import Settings
from service.kafka.acl_inspector import AclInspector, ClusterSnapshot, Operation
from service.kafka.admin import KafkaAdmin
from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.reader import high_watermarks, offsets_since, read_between
from service.kafka.records import Record, RecordMetadata
from service.kafka.topic_admin import Topic, TopicAdmin
from service.kafka.topics import InternalTopics

# The period over which the ledger's growth is measured, and the records of each partition that are sampled for it.
GROWTH_S: Final = 600
SAMPLE_RECORDS: Final = 200
# Measurements of a clock. The one with the shortest round trip counts, because its error is the smallest.
MEASUREMENTS: Final = 3

Now = Callable[[], float]
"""Returns this machine's time, ms since the Unix epoch."""


def now_ms() -> float:
    return time.time() * 1000


def rules_file(settings: Settings, rules: Rules) -> list[Finding]:
    """Tell which rules a service would take now, to compare with `fencepost_rules_info`; nothing without a file."""
    if not settings.rules:
        return []
    counts = ", ".join(
        f"{len(tables)} {section.name}" for section in fields(rules) if (tables := getattr(rules, section.name))
    )
    digest = hashlib.sha256(Path(settings.rules).read_bytes()).hexdigest()
    return [Finding("rules.file", Level.OK, f"{settings.rules}: {counts or 'no tables'}; sha256 {digest}")]


async def examine(settings: Settings, rules: Rules, rate: float | None = None, now: Now = now_ms) -> list[Finding]:
    """Run all checks; one finding for each. `rate` is in events/s, measured from the ledger if not given."""
    async with kafka_admin(settings) as kafka, keys_view(settings) as keys:
        findings, measured = await _kafka(kafka, settings, rules, now)
        known = Rate(rate, "as given") if rate is not None else measured
        findings += await _redis(keys, settings, known, now)
    return findings + await check_registry.examine(settings, rules) + await check_issuers.examine(rules)


# ----------------------------------------------------------------------------------------------------------- Kafka


async def _kafka(kafka: KafkaAdmin, settings: Settings, rules: Rules, now: Now) -> tuple[list[Finding], Rate | None]:
    findings = await check_login.examine(settings, kafka.security.tokens)
    if any(finding.level is Level.ERROR for finding in findings):
        return findings, None
    inspector, topics = AclInspector(kafka), TopicAdmin(kafka)
    internal = InternalTopics(topics, settings, rules.longest_ttl_s)
    own = [internal.ledger, internal.requests, internal.control]
    rate = None
    try:
        of_groups = [OFFSETS_TOPIC] if check_access.has_groups(rules) else []
        snapshot = await inspector.snapshot([*own, *check_access.names_of_rules(rules), *of_groups])
        findings.append(Finding("kafka.reachable", Level.OK, f"{settings.kafka} answers"))
        findings += check_brokers.brokers(snapshot)
        if all(node.why_not for node in snapshot.nodes):
            return findings, None
        async for found in _brokers(inspector, settings, snapshot, own):
            findings += found  # kept if a later request has no answer
        findings += await _access(inspector, settings, snapshot, own)
        if of_groups:
            findings += await _groups(inspector, settings, rules, snapshot)
        findings += await _topics(topics, settings, rules, snapshot, internal, own)
        if settings.rules and _may(snapshot, internal.control, Operation.READ):
            before_s = await remembered_retention(kafka, internal.control)
            findings += check_topics.retention(before_s, internal.longest_ttl_s, settings.key_ttl_s)
        if _may(snapshot, internal.ledger, Operation.READ):
            rate = await ledger_rate(kafka, internal.ledger, snapshot.topics[internal.ledger].partitions, now())
        if _may(snapshot, internal.requests, Operation.WRITE):
            findings.append(await _brokers_clock(kafka, settings, internal.requests, now))
    except KafkaAway as error:
        change = "check FENCEPOST_KAFKA, the network, and the settings FENCEPOST_KAFKA_SECURITY_PROTOCOL and after it"
        return [*findings, Finding("kafka.reachable", Level.ERROR, str(error), change)], None
    return findings, rate


async def _brokers(
    inspector: AclInspector, settings: Settings, snapshot: ClusterSnapshot, own: list[str]
) -> AsyncIterator[Iterable[Finding]]:
    """Check the settings, the releases and the versions of transactions of the brokers that can be reached."""
    reached = [node.id for node in snapshot.nodes if not node.why_not]
    found = {node: values for node in reached if (values := await inspector.settings_of(node)) is not None}
    yield check_brokers.broker_settings(found, settings, topics_there=all(name in snapshot.topics for name in own))
    yield check_brokers.transaction_log(snapshot, found)
    releases = {node: await inspector.metadata_version_of(node) for node in reached}
    yield check_brokers.releases(releases)
    levels = {node: await inspector.transaction_version_of(node) for node in reached}
    yield check_brokers.transactions(levels, releases, settings.kafka_transactions)
    yield check_brokers.transaction_markers({node: await inspector.versions_of(node) for node in reached})


async def _access(
    inspector: AclInspector, settings: Settings, snapshot: ClusterSnapshot, own: list[str]
) -> list[Finding]:
    absent = [name for name in own if name not in snapshot.topics and name not in snapshot.hidden]
    creatable = {name: await inspector.may_create(name) for name in absent}
    ledger = snapshot.topics.get(own[0])
    grows = ledger is not None and ledger.partitions < settings.slots_max
    slots = sorted({0, settings.slots_max - 1})
    may = {slot: await inspector.may_produce_as(transactional_id(settings.namespace, slot)) for slot in slots}
    return [
        *check_access.own_topics_allowed(snapshot, own, creatable, grows),
        *check_access.slots_allowed(may, settings.namespace),
    ]


async def _groups(
    inspector: AclInspector, settings: Settings, rules: Rules, snapshot: ClusterSnapshot
) -> list[Finding]:
    groups = [*check_access.groups_of_rules(rules), check_access.group_of_slots(settings.namespace)]
    may = {group: await inspector.may_with_group(group) for group in groups}
    return [
        *check_access.groups_allowed(may, settings.namespace),
        *check_access.offsets_topic_allowed(snapshot),
    ]


async def _topics(
    topics: TopicAdmin,
    settings: Settings,
    rules: Rules,
    snapshot: ClusterSnapshot,
    internal: InternalTopics,
    own: list[str],
) -> list[Finding]:
    theirs = check_access.data_topics(snapshot, rules, internal)
    ours = await _described(topics, [name for name in own if name in snapshot.topics])
    return [
        *check_topics.own_topics(ours, internal, snapshot, settings.slots_max),
        *check_access.data_topics_allowed(snapshot, theirs, rules),
        *check_topics.data_topic_settings(await _described(topics, list(theirs)), theirs, rules.quarantine_topics),
    ]


async def _described(topics: TopicAdmin, names: list[str]) -> Mapping[str, Topic]:
    return await topics.describe(names) if names else {}


def _may(snapshot: ClusterSnapshot, topic: str, operation: Operation) -> bool:
    return topic in snapshot.topics and operation in snapshot.topics[topic].may


async def remembered_retention(kafka: KafkaAdmin, control: str) -> int | None:
    """Find the longest retention of keys that the control topic remembers, in seconds, 0 for none.

    None if the topic has no record. Raises KafkaAway.
    """
    until = (await high_watermarks(kafka, control, [0]))[0]
    start = (await offsets_since(kafka, control, [0], 0))[0]
    if start is None or start >= until:
        return None
    longest_s = 0
    async for items in read_between(kafka, control, {0: (start, until)}, kafka.timeout_s):
        longest_s = max([longest_s, *(ttl_of_retention(item.key) or 0 for item in items)])
    return longest_s


async def ledger_rate(kafka: KafkaAdmin, ledger: str, partitions: int, now: float) -> Rate | None:
    """Estimate events a second: the ledger's growth over GROWTH_S, times the events in a sample of its last records.

    None if the ledger did not grow. Raises KafkaAway.
    """
    numbers = range(partitions)
    until = await high_watermarks(kafka, ledger, numbers)
    since = await offsets_since(kafka, ledger, numbers, int(now) - GROWTH_S * 1000)
    grown = {n: until[n] - start for n, start in since.items() if start is not None and start < until[n]}
    if not grown:
        return None
    sampled = {n: (max(until[n] - SAMPLE_RECORDS, until[n] - count), until[n]) for n, count in grown.items()}
    events = 0
    async for items in read_between(kafka, ledger, sampled, kafka.timeout_s):
        for item in items:
            try:
                record = decode_ledger(item.value)
            except WireError:
                continue
            events += len(record.entries) if isinstance(record, LedgerRecord) else 0
    offsets = sum(until - start for start, until in sampled.values())
    rate = events / offsets * sum(grown.values()) / GROWTH_S
    return Rate(round(rate, 3), f"measured over {GROWTH_S // 60} minutes") if events else None


async def _brokers_clock(kafka: KafkaAdmin, settings: Settings, requests: str, now: Now) -> Finding:
    """Check a broker's clock by the timestamp (LogAppendTime) of a journal record without answers."""
    producer = IdempotentProducer(kafka, "doctor")
    record = Record(requests, 0, None, encode_answers(settings.name, []), [], int(now()))
    try:
        await producer.identity()

        async def broker_time() -> float:
            (result,) = await producer.write([record])
            if not isinstance(result, RecordMetadata):
                raise KafkaAway(f"{requests}: {result.why if result else 'no clean answer'}")
            return result.timestamp

        return check_clocks.clock("clocks.kafka", "the brokers'", await _measure(broker_time, now))
    finally:
        await producer.close()


# ----------------------------------------------------------------------------------------------------------- Redis


async def _redis(keys: KeysView, settings: Settings, rate: Rate | None, now: Now) -> list[Finding]:
    seeds = check_redis.seeds(*await keys.seeds(), kind_of(settings.redis))
    try:
        info = await keys.info()
        clock = await _measure(keys.clock_ms, now)
    except (StoreAway, StoreUnanswered) as error:
        change = "check FENCEPOST_REDIS (and its password), the network, and FENCEPOST_REDIS_CAFILE"
        return [*seeds, Finding("redis.reachable", Level.ERROR, str(error), change)]
    return [
        *seeds,
        Finding("redis.reachable", Level.OK, "answers"),
        *check_redis.server(info),
        await _script(keys),
        *check_redis.replicas(info, kind_of(settings.redis)),
        *check_redis.memory(info, settings, rate),
        *check_redis.allocator(info),
        check_clocks.clock("clocks.redis", "Redis's", clock),
    ]


async def _script(keys: KeysView) -> Finding:
    """Run a script as the service does, on a key of the namespace."""
    try:
        demand = await keys.try_script()
    except (StoreAway, StoreUnanswered) as error:
        change = "look at its log, and at the state of its cluster: the service waits until a script runs"
        return Finding("redis.script", Level.ERROR, str(error), change)
    return check_redis.demanded(demand)


async def _measure(clock: Callable[[], Awaitable[float]], now: Now) -> ClockOffset:
    """Measure a clock a few times; returns the quickest measurement, which is the most exact."""
    measured: list[ClockOffset] = []
    for _ in range(MEASUREMENTS):
        before = now()
        seen = await clock()
        after = now()
        measured.append(ClockOffset(seen - statistics.mean((before, after)), (after - before) / 2))
    return min(measured, key=lambda each: each.give_or_take_ms)
