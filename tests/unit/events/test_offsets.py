"""Tests parsing the offsets of a group, and their fingerprint."""

import json

import msgspec
import pytest

from service.contract.wire.ids import offsets_fingerprint
from service.core.problems import Problem
from service.events.offsets import (
    METADATA_BYTES_MAX,
    OFFSETS_BYTES_MAX,
    POSITIONS_MAX,
    fingerprint_of,
    parse_offsets,
)
from service.kafka.group_offsets import GroupOffsets, Position

POSITION: dict[str, object] = {"topic": "orders", "partition": 0, "offset": 5, "metadata": "seen"}
BODY: dict[str, object] = {"group": "g", "member": "m", "generation": 7, "instance": None, "positions": [POSITION]}


def raw(body: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(body).encode())


def test_offsets_are_parsed() -> None:
    expected = GroupOffsets("g", "m", 7, (Position("orders", 0, 5, "seen"),))
    assert parse_offsets(raw(BODY)) == expected
    bare = {**POSITION, "metadata": None}
    assert parse_offsets(raw({**BODY, "positions": [bare]})).positions == (Position("orders", 0, 5),)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"group": ""}, "offsets.group"),
        ({"group": "x" * 256}, "offsets.group"),
        ({"member": ""}, "offsets.member"),
        ({"generation": -1}, "offsets.generation"),
        ({"generation": 2**31}, "offsets.generation"),
        ({"instance": ""}, "offsets.instance"),
        ({"positions": []}, "offsets.positions"),
        ({"positions": [POSITION] * (POSITIONS_MAX + 1)}, "offsets.positions"),
        ({"positions": [POSITION, POSITION]}, "offsets.positions[1]"),
        ({"positions": [{**POSITION, "topic": "a b"}]}, "offsets.positions[0].topic"),
        ({"positions": [{**POSITION, "offset": -1}]}, "offset"),
        ({"positions": [{**POSITION, "offset": 2**63}]}, "offset"),
        ({"positions": [{**POSITION, "metadata": "é" * METADATA_BYTES_MAX}]}, "offsets.positions[0].metadata"),
        ({"members": []}, "members"),
    ],
)
def test_a_malformed_field_is_named(change: dict[str, object], where: str) -> None:
    with pytest.raises(Problem) as refused:
        parse_offsets(raw({**BODY, **change}))
    assert refused.value.kind.status == 400
    assert where in refused.value.detail


def test_their_json_has_a_bound() -> None:
    with pytest.raises(Problem) as refused:
        parse_offsets(msgspec.Raw(b" " * (OFFSETS_BYTES_MAX + 1)))
    assert refused.value.kind.status == 413


def test_the_record_batch_that_kafka_makes_of_them_has_a_bound() -> None:
    """Each record has the group's name, so that few bytes of JSON become many."""
    positions = [{**POSITION, "partition": n, "metadata": ""} for n in range(POSITIONS_MAX)]
    body = {**BODY, "group": "𝄞" * 255, "positions": positions}
    with pytest.raises(Problem) as refused:
        parse_offsets(msgspec.Raw(json.dumps(body, ensure_ascii=False).encode()))
    assert refused.value.kind.status == 413
    assert parse_offsets(raw({**body, "group": "g"})).group == "g"


def test_the_fingerprint_has_group_and_positions_and_not_the_member() -> None:
    one = parse_offsets(raw(BODY))
    assert fingerprint_of(one) == offsets_fingerprint("g", [("orders", 0, 5, "seen")])
    same = [{**BODY, "member": "other", "generation": 8, "instance": "i"}]
    assert {fingerprint_of(parse_offsets(raw(body))) for body in same} == {fingerprint_of(one)}
    changes: list[dict[str, object]] = [{"topic": "other"}, {"partition": 1}, {"offset": 6}, {"metadata": ""}]
    others = [{**BODY, "group": "h"}, *({**BODY, "positions": [{**POSITION, **change}]} for change in changes)]
    assert len({fingerprint_of(one), *(fingerprint_of(parse_offsets(raw(body))) for body in others)}) == 6
    two = [("a", 0, 1, ""), ("a", 1, 2, "")]
    assert offsets_fingerprint("g", two) == offsets_fingerprint("g", two[::-1])
