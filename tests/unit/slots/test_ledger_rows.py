"""Tests that a replay reads ledger records as service.contract.wire.ledger does, which job and tests use."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from service.claims.states import Delivered, DeliveredBatch, Row
from service.contract.settings import KEY_TTL_MOST_S
from service.contract.wire.ids import batch_fingerprint
from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.ledger_entries import Entry
from service.contract.wire.versions import NewerVersion
from service.kafka.reader import Item
from service.slots.ledger_rows import LedgerEntry, encode_entries, lowest_offsets, rows_of
from tests.unit.contract.test_wire import vectors

ENTRY = Entry(b"\x01" * 16, b"\x02" * 8, 3, "orders", 4, 5, 6)


def read(*texts: str | bytes | None) -> tuple[list[Row], int]:
    """Decode records with these values; returns the rows, and the number of foreign records."""
    with capture_logs() as logs:
        rows = rows_of(
            [Item(0, n, None, text.encode() if isinstance(text, str) else text) for n, text in enumerate(texts)]
        )
    return rows, len(logs)


def changed(**fields: Any) -> str:
    """Make a record of one entry with other fields; None removes a field."""
    body = json.loads(LedgerRecord(0, 7, 0, "me", [ENTRY]).encode())
    body["entries"][0] |= fields
    body["entries"][0] = {name: value for name, value in body["entries"][0].items() if value is not None}
    return json.dumps(body)


@pytest.mark.parametrize("vector", [*vectors("records", "ledger"), *vectors("records", "ledger_of_version_2")])
def test_a_ledger_record_makes_the_rows_of_its_contract_vector(vector: dict[str, Any]) -> None:
    record = decode_ledger(vector["text"].encode())
    assert isinstance(record, LedgerRecord)
    rows, foreign = read(vector["text"])
    singles = [(e.id, Delivered(e.at, e.fp, e.topic, e.partition, e.offset, e.ts, e.ttl)) for e in record.entries]
    assert rows[: len(singles)] == singles
    assert {id for id, _ in rows[len(singles) :]} == {e.batch for e in record.entries if e.batch is not None}
    assert not foreign


def test_an_atomic_batch_adds_a_row_of_its_own_to_those_of_its_members() -> None:
    members = [ENTRY._replace(id=bytes([n]) * 16, fp=bytes([n]) * 8, batch=b"\x09" * 16, i=n) for n in range(3)]
    rows, _ = read(LedgerRecord(0, 7, 0, "me", [*members, ENTRY]).encode())
    assert [id for id, _ in rows] == [*(member.id for member in members), ENTRY.id, b"\x09" * 16]
    assert rows[-1][1] == DeliveredBatch(3, batch_fingerprint(member.fp for member in members), 3)


def test_the_members_of_an_atomic_batch_may_stand_in_any_order() -> None:
    """`i` gives the order of the members, by which the fingerprint of the whole is computed."""
    members = [ENTRY._replace(id=bytes([n]) * 16, fp=bytes([n]) * 8, batch=b"\x09" * 16, i=n) for n in range(3)]
    whole = DeliveredBatch(3, batch_fingerprint(member.fp for member in members), 3)
    for order in ((2, 0, 1), (1, 2, 0)):
        rows, _ = read(LedgerRecord(0, 7, 0, "me", [members[n] for n in order]).encode())
        assert rows[-1] == (b"\x09" * 16, whole)


@pytest.mark.parametrize("vector", vectors("records", "begin"))
def test_a_begin_record_delivers_nothing(vector: dict[str, Any]) -> None:
    assert read(vector["text"]) == ([], 0)


@pytest.mark.parametrize("text", vectors("records", "ledger_refused"))
def test_an_invalid_ledger_record_is_counted_as_foreign_and_skipped(text: str) -> None:
    rows, foreign = read(changed(), text, changed())
    assert (len(rows), foreign) == (2, 1)


@pytest.mark.parametrize("text", vectors("records", "ledger_newer"))
def test_a_ledger_record_of_a_later_version_ends_the_replay(text: str) -> None:
    """Without its rows, its events would be written a second time."""
    with pytest.raises(NewerVersion, match=r"slot 0 has, at offset 1, a record of version \d+, which a newer release"):
        read(changed(), text, changed())
    with pytest.raises(NewerVersion, match="slot 3 has, at offset 7, a record"):
        lowest_offsets(text.encode(), 3, 7)


@pytest.mark.parametrize("text", vectors("records", "ledger_refused"))
def test_a_foreign_record_names_no_partition(text: str) -> None:
    assert lowest_offsets(text.encode(), 0, 0) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "01"},
        {"id": "zz" * 16},
        {"fp": "01"},
        {"at": -1},
        {"at": 2**53},
        {"at": None},
        {"offset": 2**63},
        {"partition": 2**31},
        {"ts": "6"},
        {"topic": 1},
        {"topic": "t" * 250},
        {"batch": "01"},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_an_entry_that_no_key_could_hold_is_foreign(wrong: dict[str, Any]) -> None:
    """It must not end a recovery, which would find it again each time."""
    assert read(changed(**wrong)) == ([], 1)


def test_a_record_without_a_value_is_foreign() -> None:
    assert read(None, b"", b"\xff") == ([], 3)


def test_a_record_that_is_nested_without_end_is_foreign() -> None:
    """It must not end a recovery either."""
    deep = '{"v":1,"later":' + "[" * 100_000 + "]" * 100_000 + "}"
    rows, foreign = read(changed(), deep, changed())
    assert (len(rows), foreign) == (2, 1)


NUMBERS = st.integers(0, 2**63 - 1)
ENTRIES = st.builds(
    Entry,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    NUMBERS,
    st.from_regex(r"[a-zA-Z0-9._-]{1,249}", fullmatch=True),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    batch=st.none(),
    i=st.none(),
    ttl=st.integers(0, KEY_TTL_MOST_S),
    refused=st.text(st.characters(exclude_categories=["Cs"]), max_size=400),
)


@given(ENTRIES, st.binary(min_size=16, max_size=16), st.integers(0, 10_000))
def test_an_entry_is_encoded_as_the_contract_encodes_it(entry: Entry, batch: bytes, i: int) -> None:
    fields = entry.id.hex(), entry.fp.hex(), entry.at, entry.topic, entry.partition, entry.offset, entry.ts
    assert encode_entries([LedgerEntry(*fields, ttl=entry.ttl, refused=entry.refused)]) == entry.encode()
    member = entry._replace(batch=batch, i=i)
    assert (
        encode_entries([LedgerEntry(*fields, batch.hex(), i, entry.ttl, entry.refused)] * 2)
        == f"{member.encode()},{member.encode()}"
    )


def test_an_entry_keeps_the_retention_of_its_key_and_so_does_the_batch_of_its_members() -> None:
    kept = ENTRY._replace(ttl=259_200)
    member = kept._replace(id=b"\x01" * 16, batch=b"\x09" * 16, i=0)
    text = LedgerRecord(0, 7, 0, "me", [kept, member, ENTRY]).encode()
    assert decode_ledger(text) == LedgerRecord(0, 7, 0, "me", [kept, member, ENTRY])
    rows, _ = read(text)
    assert [state.ttl_s for _, state in rows] == [259_200, 259_200, 0, 259_200]
    assert text.count(b"ttl") == 2, "other entries are as they were in earlier releases"


def test_an_entry_keeps_why_its_event_was_refused() -> None:
    letter = ENTRY._replace(refused='schema-mismatch value.total: "é" is not of type "number"')
    text = LedgerRecord(0, 7, 0, "me", [letter, ENTRY]).encode()
    assert decode_ledger(text) == LedgerRecord(0, 7, 0, "me", [letter, ENTRY])
    rows, _ = read(text)
    assert [state.refused for _, state in rows if isinstance(state, Delivered)] == [letter.refused, ""]
    assert text.count(b"refused") == 1, "other entries are as they were in earlier releases"
