"""A cluster that answers the requests of a plan without Kafka, and plans of its logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.contract import Rules, SharedSettings
from spark.errors import CannotRun
from spark.reading import planning
from spark.reading.kafka_admin import BlockingTransaction, Ends, Topic, TopicPartition
from spark.reading.run_plan import Plan
from spark.settings import Options, Settings
from tests.spark.rows import NOW_MS

LEDGER_TOPIC, REQUESTS_TOPIC = "fencepost.ledger", "fencepost.requests"


@dataclass
class FakeAdmin:
    """A cluster with one partition a topic (default); records the order in which ends are listed.

    `listed` and `has_failed` are those of LibrdkafkaAdmin, and stay as a test has set them.
    """

    topics: dict[str, Ends] = field(default_factory=dict)
    topic_ids: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, int] = field(default_factory=dict)
    other_ends: dict[TopicPartition, Ends] = field(default_factory=dict)
    first_timestamps: dict[TopicPartition, int] = field(default_factory=dict)
    epochs: dict[str, list[int]] = field(default_factory=dict)
    listed_topics: list[list[str]] = field(default_factory=list)
    created_meanwhile: dict[str, Ends] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    listed: dict[TopicPartition, Ends] = field(default_factory=dict)
    has_failed: bool = False

    def names(self) -> list[str]:
        return sorted(self.topics)

    def describe(self, names: Sequence[str], *, strict: bool = True) -> dict[str, Topic]:
        return {
            name: Topic(name, self.topic_ids.get(name, "one"), self.partitions.get(name, 1))
            for name in names
            if name in self.topics
        }

    def compacted(self, names: Sequence[str]) -> set[str]:
        if self.forbidden & set(names):
            raise CannotRun("not allowed")
        return {name for name in names if name.startswith("compacted")}

    def ends(self, partitions: Sequence[TopicPartition], *, strict: bool = True) -> dict[TopicPartition, Ends]:
        if strict and self.unreachable & {name for name, _ in partitions}:
            raise CannotRun("no leader")
        partitions = [partition for partition in partitions if partition[0] not in self.unreachable]
        if partitions:
            self.listed_topics.append([name for name, _ in partitions])
        self.topics |= self.created_meanwhile
        return {partition: self.other_ends.get(partition, self.topics[partition[0]]) for partition in partitions}

    def timestamps_at(self, partitions: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        return {
            partition: self.first_timestamps[partition]
            for partition in partitions
            if partition in self.first_timestamps
        }

    def diverged(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]:
        """Compute from `epochs`, the end of each leader epoch of a topic."""
        found = {partition: self.epochs[partition[0]][epoch] for partition, (_, epoch) in positions.items()}
        return {partition: end for partition, end in found.items() if end < positions[partition][0]}

    def blocking_transactions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, BlockingTransaction]:
        return {
            partition: BlockingTransaction(7, 1, self.topics[partition[0]].last_stable, "slot", 6)
            for partition in partitions
        }


def ends(last: int, *, start: int = 0, open: int = 0, epoch: int = 0) -> Ends:
    return Ends(start, last + open, last, epoch)


def settings(rules: str = "", **options: Any) -> Settings:
    given = Options(lake="l", report="r", **options)
    return Settings(shared=SharedSettings(), options=given, rules=Rules.parse(rules))


def freeze(
    cluster: FakeAdmin,
    last_plan: Plan | None = None,
    named: set[str] | None = None,
    now_ms: int = NOW_MS,
    in_lake: set[str] | None = None,
    **options: Any,
) -> Plan:
    """Make a plan. `named`: the topics that the unread part of the ledger names; `in_lake`: those that its merged part
    names, None if the plan must not ask."""

    def merged() -> set[str]:
        assert in_lake is not None
        return in_lake

    topics = planning.NamedTopics(lambda logs, names: (named or set()) & set(names), merged)
    return planning.freeze(cluster, settings(**options), last_plan, now_ms, topics)


def fake_cluster() -> FakeAdmin:
    topics = {"orders": ends(10), "others": ends(7), "fencepost.control": ends(3)}
    return FakeAdmin(topics | {LEDGER_TOPIC: ends(4), REQUESTS_TOPIC: ends(2)})
