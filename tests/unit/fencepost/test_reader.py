"""Tests the position of a reader, its encoding, and the id of a record."""

import hashlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.contract.wire import versions
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import FINGERPRINT_BYTES, ID_BYTES, event_id
from service.fencepost import Bounds, NewerVersion, Reader, ReaderPosition, id_of, reader
from tests.unit.contract.test_wire import vectors

AGE = Bounds(ids=3, age_s=10)


def _id(n: int) -> bytes:
    return n.to_bytes(ID_BYTES, "big")


def test_an_id_is_fresh_once_within_the_bounds() -> None:
    position = ReaderPosition()
    assert [position.fresh(_id(n), AGE, 0) for n in (1, 2, 1, 3)] == [True, True, False, True]
    assert position.fresh(_id(4), AGE, 0)  # the fourth removes the first
    assert position.fresh(_id(1), AGE, 0)
    assert position.fresh(None, AGE, 0)
    assert position.fresh(None, AGE, 0)
    assert not position.fresh(_id(4), AGE, 10_000)
    assert position.fresh(_id(4), AGE, 10_001)


def test_a_decoded_position_is_equal_and_keeps_the_ages_of_its_ids() -> None:
    chance = random.Random(3)
    position = ReaderPosition({n: chance.randrange(1 << 62) for n in range(5)})
    for n in range(100):
        position.fresh(_id(chance.randrange(1 << 120)), Bounds(), n)
    again = ReaderPosition.decode(position.encode(now_ms=1_000), now_ms=500_000)
    assert again.offsets == position.offsets
    assert list(again.seen) == list(position.seen)
    assert {one - other for one, other in zip(again.seen.values(), position.seen.values(), strict=True)} == {499_000}
    # If a clock goes back, no id gets younger.
    assert ReaderPosition.decode(position.encode(now_ms=1_000), now_ms=0) == position


@pytest.mark.parametrize("raw", [b"", b"\x02" + bytes(16), bytes(3), ReaderPosition({1: 1}).encode(0)[:-1]])
def test_bytes_that_are_no_position_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"no position of version 1 .*give load\(\) the bytes that commit\(\) got"):
        ReaderPosition.decode(raw, 0)


class _Record:
    def __init__(self, *headers: tuple[str, bytes | None]) -> None:
        self.headers = headers


def test_the_id_is_that_of_the_stamp_else_of_the_key() -> None:
    stamp = Stamp(b"s" * 16, bytes(8), 1, 0, 1, 0, "a:1").encode()
    assert id_of(_Record((KEY_HEADER, b"k"), (STAMP_HEADER, stamp), (STAMP_HEADER, b"x"))) == b"s" * 16
    assert id_of(_Record((KEY_HEADER, b"k"), (STAMP_HEADER, b"x"))) == event_id("k")
    assert id_of(_Record((KEY_HEADER, b"\xff"))) == hashlib.sha256(b"\0\xff").digest()[:16]
    assert id_of(_Record((KEY_HEADER, b""))) is None
    # A foreign header may have a null value.
    assert id_of(_Record((STAMP_HEADER, None), (KEY_HEADER, b"k"))) == event_id("k")
    assert id_of(_Record((KEY_HEADER, None))) is None
    assert id_of(_Record()) is None


STAMP = Stamp(b"s" * 16, bytes(8), 1, 0, 1, 0, "a:1").encode()


def test_the_reader_has_the_names_and_lengths_of_the_wire_contract() -> None:
    ours = (reader.KEY_HEADER, reader.STAMP_HEADER, reader.ID_BYTES, reader.FINGERPRINT_BYTES)
    assert ours == (KEY_HEADER, STAMP_HEADER, ID_BYTES, FINGERPRINT_BYTES)


@given(
    st.integers(0, len(STAMP)), st.integers(0, 4), st.binary(max_size=4) | st.sampled_from([b";", b"0", b" 1", b"-"])
)
def test_a_stamp_is_decoded_as_the_wire_contract_decodes_it(at: int, cut: int, put: bytes) -> None:
    changed = STAMP[:at] + put + STAMP[at + cut :]
    try:
        expected = Stamp.decode(changed).id
    except versions.NewerVersion:
        with pytest.raises(NewerVersion):
            id_of(_Record((STAMP_HEADER, changed)))
        return
    except versions.WireError:
        expected = None
    assert id_of(_Record((STAMP_HEADER, changed))) == expected


@pytest.mark.parametrize("text", vectors("records", "stamp_newer"))
def test_a_stamp_of_a_later_version_is_refused_also_beside_a_key(text: str) -> None:
    """The id of the key would be another one, where the event has a caller: a copy would pass for a new event."""
    with pytest.raises(NewerVersion, match="update the package fencepost"):
        id_of(_Record((STAMP_HEADER, text.encode()), (KEY_HEADER, b"k")))


@pytest.mark.parametrize("name", ["auto_offset_reset", "enable_auto_commit", "group_id", "isolation_level"])
def test_a_setting_on_which_the_guarantee_depends_is_refused(name: str) -> None:
    store: Any = None
    setting: dict[str, Any] = {name: "x"}
    with pytest.raises(TypeError, match=f"the reader sets {name} itself: leave it out"):
        Reader("orders", store, **setting)
