"""Tests that record batches and the hash of keys in C have the bytes of aiokafka's."""

import pytest
from aiokafka.partitioner import murmur2
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.util import calc_crc32c
from hypothesis import given
from hypothesis import strategies as st

from service import native
from service.contract.wire.ids import Header
from service.kafka.records import COMPRESS, COMPRESSION_CODECS, BatchBuilder, LibraryBuilder, builder_of

pytestmark = pytest.mark.skipif(not native.COMPILED, reason="installed without a compiler")

Content = tuple[int, bytes | None, bytes | None, list[Header]]

CONTENTS = st.lists(
    st.tuples(
        st.integers(0, 2**53),
        st.none() | st.binary(max_size=20),
        st.none() | st.binary(max_size=300),
        st.lists(st.tuples(st.text(max_size=10), st.binary(max_size=150)), max_size=4),
    ),
    min_size=1,
    max_size=100,
)


def filled(builder: BatchBuilder, contents: list[Content]) -> tuple[int, bytes]:
    """Append records; returns how many fit, and the batch."""
    taken = 0
    for content in contents:
        if not builder.append(*content):
            break
        taken += 1
    return taken, builder.build()


@given(CONTENTS, st.booleans(), st.integers(-1, 2**62), st.integers(-1, 2**15 - 1), st.integers(0, 2**31 - 1))
def test_a_batch_has_the_same_bytes_as_aiokafka_s(
    contents: list[Content], transactional: bool, producer_id: int, epoch: int, sequence: int
) -> None:
    head = (0, transactional, producer_id, epoch, sequence)
    for most in (100, 2_000, 1_000_000):
        taken, made = filled(builder_of(*head, most), contents)
        # aiokafka may count one byte too many for a record, so it does not decide what fits.
        assert made == filled(LibraryBuilder(*head, 1_000_000), contents[:taken])[1]
        assert taken == 1 or len(made) <= most
        if taken < len(contents):
            assert len(filled(LibraryBuilder(*head, 1_000_000), contents[: taken + 1])[1]) > most


@pytest.mark.parametrize("codec", [codec for codec in COMPRESSION_CODECS if codec != "none"])
def test_a_compressed_batch_is_read_by_aiokafka(codec: str) -> None:
    contents: list[Content] = [(n, b"k", b"value " * 20, [("h", b"%d" % n)]) for n in range(200)]
    short: list[Content] = [(1, None, b"\x8f", [])]
    for some in (contents, short):  # one gets smaller by compression, the other does not
        taken, made = filled(builder_of(COMPRESSION_CODECS[codec], True, 7, 3, 11, 1_000_000), some)
        batch = DefaultRecordBatch(made)
        assert batch.validate_crc()
        assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (7, 3, 11)
        assert batch.compression_type == (COMPRESSION_CODECS[codec] if some is contents else 0)
        assert taken == len(some)
        assert [(r.timestamp, r.key, r.value, list(r.headers)) for r in batch] == some


def test_a_batch_grows_as_far_as_its_bound_and_takes_one_record_of_any_size() -> None:
    head = (0, False, 1, 0, 0, 1_000_000)
    contents: list[Content] = [(5, None, b"x" * 1_000, [])] * 1_000
    taken, made = filled(builder_of(*head), contents)
    assert (taken, made) == filled(LibraryBuilder(*head), contents)
    assert 1_000_000 - 1_100 < len(made) <= 1_000_000
    large = builder_of(0, False, 1, 0, 0, 100)
    assert large.append(5, None, b"x" * 5_000_000, [])
    assert not large.append(5, None, b"", [])
    assert DefaultRecordBatch(large.build()).validate_crc()


def test_a_record_that_cannot_be_encoded_leaves_the_batch_unchanged() -> None:
    builder = native.records.BatchBuilder(0, False, 1, 0, 0, 1_000, None, calc_crc32c)
    assert builder.append(5, None, b"one", [])
    for odd in (("\ud800", b"lone"), ("name", None), ("name", "text"), (b"bytes", b""), ("name",), 7):
        with pytest.raises((UnicodeEncodeError, TypeError, ValueError)):
            builder.append(5, None, b"two", [odd])  # type: ignore[list-item]
    assert builder.append(5, None, b"three", [])
    assert [record.value for record in DefaultRecordBatch(builder.build())] == [b"one", b"three"]
    for again in (builder.build, lambda: builder.append(5, None, b"four", [])):
        with pytest.raises((ValueError, TypeError)):
            again()
    assert set(COMPRESS) == set(COMPRESSION_CODECS.values()) - {0}


@given(st.binary(max_size=64))
def test_keys_have_the_hash_that_java_clients_give_them(key: bytes) -> None:
    assert native.records.murmur2(key) & 0xFFFFFFFF == murmur2(key) & 0xFFFFFFFF
