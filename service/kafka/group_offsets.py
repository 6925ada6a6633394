"""The offsets of a consumer group that a transaction commits, where Kafka keeps them, and why it refuses them."""

from collections.abc import Mapping
from typing import Final

import msgspec
from aiokafka import errors

from service.core.problems import (
    FORBIDDEN_GROUP,
    FORBIDDEN_TOPIC,
    NOT_WRITTEN,
    OFFSETS_REFUSED,
    STALE_MEMBER,
)
from service.kafka.outcomes import RecordError

OFFSETS_TOPIC: Final = "__consumer_offsets"
# Codes that aiokafka does not know (KIP-345, KIP-848); the last two are of groups of the newer protocol.
FENCED_INSTANCE_ID: Final = 82
FENCED_MEMBER_EPOCH: Final = 110
STALE_MEMBER_EPOCH: Final = 113

_GONE: Final = RecordError(STALE_MEMBER, "the group has no such member in this generation: rejoin it")
AWAY: Final = RecordError(NOT_WRITTEN, "the group's coordinator cannot be reached: send it again")
NOT_KEPT: Final = RecordError(NOT_WRITTEN, "the group's coordinator does not keep the offsets: send it again")
TOO_FEW_REPLICAS: Final = RecordError(
    NOT_WRITTEN, "the partition of the group has too few replicas in sync: send it again"
)
_TOO_LARGE: Final = RecordError(
    OFFSETS_REFUSED, f"the positions are larger than a record batch of {OFFSETS_TOPIC}: send fewer"
)
# Newer coordinators answer with it whatever has no code of its own, as a batch that is too large.
COORDINATOR_FAILED: Final = RecordError(
    NOT_WRITTEN, "the group's coordinator failed: send it again, with fewer positions"
)
# By error code, why offsets are refused. The broker has kept none of the partition's offsets.
REFUSALS: Final[Mapping[int, RecordError]] = {
    errors.IllegalGenerationError.errno: _GONE,
    errors.UnknownMemberIdError.errno: _GONE,
    errors.GroupIdNotFound.errno: _GONE,
    FENCED_INSTANCE_ID: RecordError(STALE_MEMBER, "another member has its group.instance.id"),
    FENCED_MEMBER_EPOCH: _GONE,
    STALE_MEMBER_EPOCH: _GONE,
    errors.RebalanceInProgressError.errno: RecordError(NOT_WRITTEN, "the group rebalances: send it again"),
    errors.GroupAuthorizationFailedError.errno: RecordError(
        FORBIDDEN_GROUP, "the service has no permission to Read the group"
    ),
    errors.TopicAuthorizationFailedError.errno: RecordError(
        FORBIDDEN_TOPIC, "the service has no permission to Read a topic of the positions"
    ),
    # Admission has found the topics: the coordinator has older metadata, or a topic was deleted since, and then
    # admission refuses the next attempt.
    errors.UnknownTopicOrPartitionError.errno: RecordError(
        NOT_WRITTEN, "the group's coordinator does not know a topic of the positions: send it again"
    ),
    errors.OffsetMetadataTooLargeError.errno: RecordError(
        OFFSETS_REFUSED, "metadata is longer than the brokers' offset.metadata.max.bytes"
    ),
    errors.InvalidCommitOffsetSizeError.errno: _TOO_LARGE,
    errors.MessageSizeTooLargeError.errno: _TOO_LARGE,
    errors.RecordListTooLargeError.errno: _TOO_LARGE,
    errors.InvalidGroupIdError.errno: RecordError(OFFSETS_REFUSED, "Kafka does not allow the group's name"),
}


# The most bytes in a ledger record of what has no bound of its own: ids, numbers and names of fields; a position's.
LEDGER_BYTES: Final = 300
POSITION_BYTES: Final = 75
# The most bytes of a character in JSON text: a control character's.
_JSON_BYTES_MAX: Final = 6


class Position(msgspec.Struct, frozen=True, gc=False):
    """The next offset that a group reads in a partition, and the metadata that is stored with the offset."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""


class GroupOffsets(msgspec.Struct, frozen=True, gc=False):
    """Positions of a group, and the member that commits them, in its generation; `instance`: its group.instance.id."""

    group: str
    member: str
    generation: int
    positions: tuple[Position, ...]
    instance: str | None = None

    @property
    def ledger_bytes(self) -> int:
        """An upper bound of the bytes of ledger_entries.LedgerOffsets."""
        texts = _JSON_BYTES_MAX * (len(self.group) + len(self.member))
        return LEDGER_BYTES + texts + sum(len(each.topic) + POSITION_BYTES for each in self.positions)

    @property
    def size(self) -> int:
        """The share of the queue's bytes: about what they take in memory beside their objects."""
        return self.ledger_bytes + sum(len(each.metadata) for each in self.positions)

    @property
    def isolation_name(self) -> str:
        """The name under which the queue isolates the group; no topic can have it."""
        return f"group {self.group}"

    @property
    def topics(self) -> list[tuple[str, list[Position]]]:
        """The positions by topic, in their order."""
        by_topic: dict[str, list[Position]] = {}
        for position in self.positions:
            by_topic.setdefault(position.topic, []).append(position)
        return list(by_topic.items())


def partition_of_group(group: str, partitions: int) -> int:
    """Find the partition of OFFSETS_TOPIC, of so many, that has a group's offsets.

    Kafka hashes the group's name as Java hashes strings: by its units of UTF-16.
    """
    units = group.encode("utf-16-be")
    found = 0
    for at in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[at : at + 2], "big")) % 2**32
    signed = found - 2**32 if found >= 2**31 else found
    return abs(signed) % 2**31 % partitions  # the absolute value of the least number is 0, as in Kafka's Utils.abs


def group_in(partition: int, partitions: int, prefix: str) -> str:
    """Find a group name with a prefix whose offsets would be in a partition of OFFSETS_TOPIC, of so many."""
    number = 0
    while partition_of_group(f"{prefix}{number}", partitions) != partition:
        number += 1
    return f"{prefix}{number}"
