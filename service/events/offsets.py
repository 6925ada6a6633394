"""Parses the offsets of a consumer group that an atomic batch commits with its events."""

from typing import Annotated, Final

import msgspec

from service.contract.wire.ids import offsets_fingerprint
from service.contract.wire.names import TOPIC, TOPIC_CHARS_MAX
from service.core.problems import INVALID_EVENT, TOO_LARGE, Problem
from service.events.event import PARTITION_MOST, decode, invalid
from service.kafka.group_offsets import GroupOffsets, Position

POSITIONS_MAX: Final = 1_000
# The JSON of all of them: decoding it takes a fraction of a time slice.
OFFSETS_BYTES_MAX: Final = 256 * 1024
# Kafka writes all positions as one record batch, of at most 1,048,588 bytes by default: a record with the group's name
# for each position.
RECORDS_BYTES_MAX: Final = 900_000
_RECORD_BYTES: Final = 80  # of a record beside names and metadata
# Kafka bounds neither names of groups nor ids of members, which have the name of their client in them.
NAME_CHARS_MAX: Final = 255
# The default of Kafka's offset.metadata.max.bytes.
METADATA_BYTES_MAX: Final = 4_096

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]


class PositionBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of one position."""

    topic: Annotated[str, msgspec.Meta(min_length=1, max_length=TOPIC_CHARS_MAX)]
    partition: Annotated[int, msgspec.Meta(ge=0, le=PARTITION_MOST)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    metadata: str | None = None


class OffsetsBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of `offsets`."""

    group: _Name
    member: _Name
    generation: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    positions: Annotated[list[PositionBody], msgspec.Meta(min_length=1, max_length=POSITIONS_MAX)]
    instance: _Name | None = None


_decode = msgspec.json.Decoder(OffsetsBody).decode


def parse_offsets(text: msgspec.Raw) -> GroupOffsets:
    """Parse `offsets` from JSON that is checked already. Raises Problem (400, 413)."""
    if len(text) > OFFSETS_BYTES_MAX:
        raise Problem(TOO_LARGE, f"offsets: they have {len(text)} bytes; at most {OFFSETS_BYTES_MAX} are taken")
    try:
        body = decode(_decode, text)
    except Problem as problem:
        raise Problem(problem.kind, f"offsets.{problem.detail}") from None
    records_bytes = sum(
        _RECORD_BYTES + len(body.group.encode()) + len(each.topic) + len((each.metadata or "").encode())
        for each in body.positions
    )
    if records_bytes > RECORDS_BYTES_MAX:
        raise Problem(TOO_LARGE, f"offsets: Kafka keeps them in {records_bytes} bytes; at most {RECORDS_BYTES_MAX} fit")
    seen: set[tuple[str, int]] = set()
    for index, each in enumerate(body.positions):
        where = f"offsets.positions[{index}]"
        if TOPIC.fullmatch(each.topic) is None:
            raise invalid(f"{where}.topic", "Kafka allows no such name of a topic")
        if len((each.metadata or "").encode()) > METADATA_BYTES_MAX:
            raise Problem(INVALID_EVENT, f"{where}.metadata: use at most {METADATA_BYTES_MAX} bytes")
        if (each.topic, each.partition) in seen:
            raise invalid(where, "the partition has a position already")
        seen.add((each.topic, each.partition))
    positions = tuple(
        [Position(each.topic, each.partition, each.offset, each.metadata or "") for each in body.positions]
    )
    return GroupOffsets(body.group, body.member, body.generation, positions, body.instance)


def fingerprint_of(offsets: GroupOffsets) -> bytes:
    """Make the fingerprint of a group's offsets."""
    positions = [(each.topic, each.partition, each.offset, each.metadata) for each in offsets.positions]
    return offsets_fingerprint(offsets.group, positions)
