"""service.native writes the same bytes of an event as service.contract.wire and service.http.responses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import native
from service.claims.states import Delivered
from service.contract.wire import encode_answer, encode_entry, encode_stamp
from service.http import responses
from service.pipeline.request import Committed

pytestmark = pytest.mark.skipif(not native.COMPILED, reason="installed without a compiler")

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**53)
# A foreign record of the ledger may name anything.
TOPICS = st.from_regex(r"[a-zA-Z0-9._-]{1,249}", fullmatch=True) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=249
)
PLACES = st.lists(
    st.tuples(
        st.binary(min_size=16, max_size=16),
        st.builds(Delivered, NUMBERS, st.binary(min_size=8, max_size=8), TOPICS, NUMBERS, NUMBERS, NUMBERS),
    ),
    min_size=1,
    max_size=5,
)


@given(st.binary(max_size=40), st.binary(max_size=40), NUMBERS, st.text(max_size=80))
def test_a_fencepost_header_is_the_same_from_c_and_python(id: bytes, fp: bytes, at: int, writer: str) -> None:
    assert native.texts.stamp(id, fp, at, writer) == encode_stamp(id, fp, at, writer)


@given(PLACES, st.none() | st.binary(min_size=16, max_size=16))
def test_entries_of_the_ledger_are_the_same_from_c_and_python(
    places: list[tuple[bytes, Delivered]], batch: bytes | None
) -> None:
    assert native.texts.entries(places, batch) == [
        encode_entry(id, it.fp, it.at, it.topic, it.partition, it.offset, it.ts, batch, i)
        for i, (id, it) in enumerate(places)
    ]


@given(PLACES, NUMBERS, st.booleans(), st.floats(0, 1e7))
def test_answers_in_the_journal_are_the_same_from_c_and_python(
    places: list[tuple[bytes, Delivered]], at: int, replayed: bool, latency_ms: float
) -> None:
    assert native.texts.answers(places, at, replayed, f"{latency_ms:.3f}") == [
        encode_answer(id, it.fp, at, 201, None, replayed, latency_ms, it.topic, it.partition, it.offset)
        for id, it in places
    ]


@given(PLACES, st.booleans())
def test_results_are_the_same_from_c_and_python(places: list[tuple[bytes, Delivered]], replayed: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "COMPILED", False)
        one = responses.render_place(places[0])
        each = [responses.render_result(Committed(1, (place,), replayed)) for place in places]
    assert native.texts.place(*places[0]) == one == responses.render_place(places[0])
    assert native.texts.results(places, replayed) == each
    assert each == [responses.render_result(Committed(1, (place,), replayed)) for place in places]


def test_a_number_that_no_offset_can_be_is_an_error() -> None:
    there = Delivered(0, b"f" * 8, "orders", 0, 2**63, 0)
    for write in (native.texts.results, lambda places, _: native.texts.place(*places[0])):
        with pytest.raises(OverflowError):
            write([(b"i" * 16, there)], False)


def test_the_longest_names_have_room() -> None:
    there = Delivered(-(2**63), b"f" * 8, "\U0001f600" * 249, -(2**63), -(2**63), -(2**63))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "COMPILED", False)
        told = responses.render_place((b"i" * 16, there))
    assert native.texts.place(b"i" * 16, there) == told
    assert native.texts.results([(b"i" * 16, there)] * 3, True)[2].encode().count("\U0001f600".encode()) == 249


@pytest.mark.parametrize("odd", [None, "text", 7])
def test_what_is_no_bytes_is_refused(odd: Any) -> None:
    there = Delivered(0, odd, "orders", 0, 0, 0)
    for write in (
        lambda: native.texts.stamp(odd, b"", 0, ""),
        lambda: native.texts.place(odd, there),
        lambda: native.texts.results([(odd, there)], False),
        lambda: native.texts.entries([(b"", there)], None),
        lambda: native.texts.answers([(b"", there)], 0, False, "0"),
    ):
        with pytest.raises(TypeError):
            write()
