"""Checks in Kafka that a topic takes the records of a plan, and that its sources have not changed."""

from collections.abc import Mapping, Sequence

from service.contract.wire.names import internal_topics
from spark.errors import CannotRun
from spark.reading.kafka_admin import Ends, KafkaAdmin, Topic, TopicPartition
from spark.repair import copier, layouts
from spark.repair.invocation import Invocation
from spark.repair.layouts import Layout, ReadUntil


def check_target(admin: KafkaAdmin, namespace: str, topics: Mapping[str, Topic], target: str) -> None:
    """Check that a topic takes records as they are; CannotRun with the remedy otherwise."""
    if target in internal_topics(namespace):
        raise CannotRun(f"--into {target}: this topic is Fencepost's own: name another one")
    if target not in topics:
        raise CannotRun(f"--into {target}: the topic does not exist: create it, with the partitions of its source")
    if target in admin.compacted([target]):
        raise CannotRun(f"--into {target}: the topic is compacted, and would lose records: set cleanup.policy=delete")
    if admin.setting_of([target], "message.timestamp.type")[target] != "CreateTime":
        raise CannotRun(f"--into {target}: set its message.timestamp.type to CreateTime: records keep their times")


def decided_ends(invocation: Invocation, layout: Layout) -> dict[int, int]:
    """Return the ends of the target's partitions once nothing is open there, after the copier has fenced others."""
    with invocation.kafka() as admin:
        found = copier.await_decided(admin, [(invocation.into, number) for number in layout.parts])
    return {number: end for (_, number), end in found.items()}


def truncated(admin: KafkaAdmin, read: Sequence[ReadUntil], ends: Mapping[TopicPartition, Ends]) -> str:
    """Return which log was truncated below what was read; empty for none."""
    return layouts.truncated(read, ends, admin.diverged(layouts.suspects(read, ends)))


def check_intact(invocation: Invocation, layout: Layout, plan: int) -> Mapping[TopicPartition, Ends]:
    """Check that no topic of a plan was deleted or recreated, and no source truncated, since it was made; CannotRun
    otherwise. Returns the ends of the sources."""
    with invocation.kafka() as admin:
        topics = admin.describe(sorted(layout.topic_ids))
        for name, topic_id in layout.topic_ids.items():
            if name not in topics or topics[name].topic_id != topic_id:
                raise CannotRun(f"topic {name} was deleted or recreated since plan {plan}: name another --into")
        if not layout.read:
            return {}
        ends = admin.ends([one.topic_partition for one in layout.read])
        if why := truncated(admin, layout.read, ends):
            raise CannotRun(f"{why} since plan {plan}: run the audit again, and name another --into")
    return ends


def check_unchanged(invocation: Invocation, layout: Layout, plan: int) -> None:
    """Check as `check_intact`, and that retention has deleted no record that is copied; CannotRun otherwise."""
    ends = check_intact(invocation, layout, plan)
    if why := layouts.deleted(layout.parts, ends):
        raise CannotRun(f"{why} since plan {plan}: name another --into")
