"""What a plan copies, and whether its sources still have that. Pure functions: the requests are in other modules."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from spark import rule_table
from spark.reading.kafka_admin import NO_LEADER_EPOCH, Ends, TopicPartition
from spark.repair import copier
from spark.repair.entries import Entry


@dataclass(frozen=True, slots=True)
class ReadUntil:
    """The offset up to which a partition was read, and the leader epoch (KIP-320) of that read."""

    topic: str
    partition: int
    end: int
    leader_epoch: int

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan copies: the topics' ids (KIP-516) by name, the parts by partition of the target, and how far the
    sources were read for that."""

    topic_ids: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[int, copier.Part] = field(default_factory=dict)
    read: tuple[ReadUntil, ...] = ()


def suspects(read: Sequence[ReadUntil], ends: Mapping[TopicPartition, Ends]) -> dict[TopicPartition, tuple[int, int]]:
    """Return the positions (KafkaAdmin.diverged) of the logs that may be truncated: those with a new leader epoch."""
    return {
        one.topic_partition: (one.end, one.leader_epoch)
        for one in read
        if one.end > 0 and ends[one.topic_partition].leader_epoch != one.leader_epoch
        if NO_LEADER_EPOCH not in (one.leader_epoch, ends[one.topic_partition].leader_epoch)
    }


def truncated(
    read: Sequence[ReadUntil], ends: Mapping[TopicPartition, Ends], diverged: Mapping[TopicPartition, int]
) -> str:
    """Return which log was truncated below what was read, as by an unclean election of its leader; empty for none.

    Other records may be at the offsets from there on, in a topic with the same id. `diverged` is the answer to
    `suspects`.
    """
    for one in read:
        at = one.topic_partition
        intact = rule_table.intact_until(ends[at].last_stable, diverged.get(at), one.end)
        if intact < one.end:
            return f"{one.topic}[{one.partition}] was truncated from offset {intact} on"
    return ""


def deleted(parts: Mapping[int, copier.Part], ends: Mapping[TopicPartition, Ends]) -> str:
    """Return which log no longer has the first of the records that are copied; empty for none."""
    for number, part in sorted(parts.items()):
        for topic, spans in part.spans:
            first = ends[topic, number].log_start if (topic, number) in ends else 0
            if spans and spans[0][0] < first:
                return f"{topic}[{number}]: retention has deleted the records below offset {first}"
    return ""


def parts_of(copies: Sequence[Entry]) -> dict[int, copier.Part]:
    """Return the parts that copy these records: each to the partition of the same number, in the order of topics and
    offsets."""
    by_partition: dict[int, dict[str, set[int]]] = {}
    for entry in copies:
        assert entry.topic is not None
        assert entry.partition is not None
        assert entry.offset is not None
        by_partition.setdefault(entry.partition, {}).setdefault(entry.topic, set()).add(entry.offset)
    return {
        partition: copier.Part(
            0,
            tuple(
                (topic, tuple((offset, offset + 1) for offset in sorted(offsets)))
                for topic, offsets in sorted(of.items())
            ),
            exact=True,
        )
        for partition, of in by_partition.items()
    }


def encoded(layout: Layout) -> str:
    """Encode a layout for the lake."""
    return json.dumps(msgspec.to_builtins(layout))


def decoded(text: str) -> Layout:
    """Decode a layout (`encoded`)."""
    return msgspec.json.decode(text, type=Layout, strict=False)
