"""Tests that service.contract.wire writes and reads the exact bytes of `tests/vectors/v1`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.contract.wire.control import (
    GENERATION_KEY,
    Generation,
    barrier_key,
    encode_barrier,
    encode_retention,
    retention_key,
    slot_of_barrier,
    ttl_of_retention,
)
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import batch_fingerprint, event_id, fingerprint, member_id
from service.contract.wire.journal import encode_answer, encode_answers
from service.contract.wire.ledger import Begin, LedgerRecord, decode_ledger
from service.contract.wire.ledger_entries import CommittedOffset, Entry, LedgerOffsets
from service.contract.wire.names import control_topic, is_kafka_topic, ledger_topic, requests_topic, transactional_id
from service.contract.wire.versions import NewerVersion, WireError

VECTORS = Path(__file__).parents[2] / "vectors" / "v1"


def vectors(name: str, *path: str) -> Any:
    """Read a part of a file of vectors."""
    body = json.loads((VECTORS / f"{name}.json").read_text())
    for step in path:
        body = body[step]
    return body


def content(encoded: Any) -> bytes | None:
    """Decode the bytes of a vector: hexadecimal, a repetition, or null."""
    if isinstance(encoded, dict):
        repeated: bytes = bytes.fromhex(encoded["repeat"]) * encoded["times"]
        return repeated
    return None if encoded is None else bytes.fromhex(encoded)


@pytest.mark.parametrize(
    "vector", vectors("ids", "event"), ids=lambda vector: f"{vector['scope']}:{vector['key'][:20]}"
)
def test_the_id_of_a_key(vector: dict[str, str]) -> None:
    assert event_id(vector["key"], vector["scope"]).hex() == vector["id"]


@pytest.mark.parametrize(
    "vector", vectors("ids", "member"), ids=lambda vector: f"{vector['scope']}:{vector['index']!r}"
)
def test_the_id_of_a_member_of_a_request(vector: dict[str, Any]) -> None:
    assert member_id(vector["key"], vector["index"], vector["scope"]).hex() == vector["id"]


def test_a_name_of_digits_is_not_an_index() -> None:
    assert member_id("k", "0") != member_id("k", 0)


@pytest.mark.parametrize("vector", vectors("fingerprints", "event"), ids=lambda vector: str(vector["what"]))
def test_a_fingerprint_is_that_of_its_vector_in_any_order_of_headers(vector: dict[str, Any]) -> None:
    headers = [(name, bytes.fromhex(value)) for name, value in vector["headers"]]
    asked = (vector["topic"], vector["partition"], content(vector["key"]))
    assert fingerprint(*asked, headers, content(vector["value"])).hex() == vector["fingerprint"]
    assert fingerprint(*asked, headers[::-1], content(vector["value"])).hex() == vector["fingerprint"]


def test_different_events_have_different_fingerprints() -> None:
    fingerprints = [vector["fingerprint"] for vector in vectors("fingerprints", "event")]
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize("vector", vectors("fingerprints", "batch"))
def test_the_fingerprint_of_an_atomic_batch(vector: dict[str, Any]) -> None:
    assert batch_fingerprint(map(bytes.fromhex, vector["members"])).hex() == vector["fingerprint"]


@pytest.mark.parametrize("vector", vectors("records", "stamp"))
def test_the_fencepost_header_is_written_and_read_as_its_vector(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    binary = {name: bytes.fromhex(fields[name]) for name in ("id", "fingerprint")}
    stamp = Stamp(**(fields | binary))
    assert stamp.encode() == vector["text"].encode()
    assert Stamp.decode(vector["text"].encode()) == stamp


@pytest.mark.parametrize("text", vectors("records", "stamp_refused"))
def test_an_invalid_record_header_raises_a_wire_error(text: str) -> None:
    with pytest.raises(WireError, match="no fencepost header of version 1"):
        Stamp.decode(text.encode())


def ledger_record(fields: dict[str, Any]) -> LedgerRecord:
    entries = [
        Entry(
            **(
                entry
                | {name: bytes.fromhex(entry[name]) for name in ("id", "fp")}
                | ({"batch": bytes.fromhex(entry["batch"])} if "batch" in entry else {})
            )
        )
        for entry in fields["entries"]
    ]
    return LedgerRecord(**(fields | {"entries": entries}))


@pytest.mark.parametrize("vector", vectors("records", "ledger"))
def test_a_ledger_record_is_written_and_read_as_its_vector(vector: dict[str, Any]) -> None:
    record = ledger_record(vector["fields"])
    assert record.encode() == vector["text"].encode()
    assert decode_ledger(vector["text"].encode()) == record


@pytest.mark.parametrize("vector", vectors("records", "ledger_of_version_2"))
def test_a_ledger_record_of_version_2_is_read(vector: dict[str, Any]) -> None:
    assert decode_ledger(vector["text"].encode()) == ledger_record(vector["fields"])


@pytest.mark.parametrize("vector", vectors("records", "begin"))
def test_a_begin_record_is_written_and_read_as_its_vector(vector: dict[str, Any]) -> None:
    record = Begin(**vector["fields"])
    assert record.encode() == vector["text"].encode()
    assert decode_ledger(vector["text"].encode()) == record


@pytest.mark.parametrize("text", vectors("records", "ledger_refused"))
def test_an_invalid_ledger_record_raises_a_wire_error(text: str) -> None:
    with pytest.raises(WireError):
        decode_ledger(text.encode())


@pytest.mark.parametrize("vector", vectors("records", "answers"))
def test_a_record_of_the_journal(vector: dict[str, Any]) -> None:
    answers = [
        encode_answer(**(answer | {name: bytes.fromhex(answer[name]) for name in ("id", "fp")}))
        for answer in vector["answers"]
    ]
    record = encode_answers(vector["instance"], answers)
    assert record == vector["text"].encode()
    assert json.loads(record)["answers"] == vector["answers"]


@pytest.mark.parametrize("vector", vectors("records", "generation"))
def test_a_generation_record_is_written_and_read_as_its_vector(vector: dict[str, Any]) -> None:
    record = Generation(**vector["fields"])
    assert record.encode() == vector["text"].encode()
    assert Generation.decode(vector["text"].encode()) == record


@pytest.mark.parametrize("vector", vectors("records", "barrier"))
def test_a_barrier_is_written_as_its_vector(vector: dict[str, Any]) -> None:
    assert encode_barrier(**vector["fields"]) == vector["text"].encode()


@pytest.mark.parametrize(
    ("kind", "decode", "known"),
    [
        ("stamp", Stamp.decode, "version 1"),
        ("ledger", decode_ledger, "version 2"),
        ("generation", Generation.decode, "version 1"),
    ],
)
def test_data_of_a_later_version_are_refused_by_name_whatever_they_hold(
    kind: str, decode: Callable[[bytes], object], known: str
) -> None:
    texts = vectors("records", f"{kind}_newer")
    assert texts
    for text in texts:
        with pytest.raises(NewerVersion, match=f"a newer release has written: this one reads {known} at most"):
            decode(text.encode())


@pytest.mark.parametrize("text", vectors("records", "ledger_refused"))
def test_data_of_no_version_are_not_taken_for_those_of_a_later_one(text: str) -> None:
    with pytest.raises(WireError) as raised:
        decode_ledger(text.encode())
    assert not isinstance(raised.value, NewerVersion)


@pytest.mark.parametrize("vector", vectors("records", "retention"))
def test_a_retention_is_written_as_its_vector(vector: dict[str, Any]) -> None:
    assert encode_retention(**vector["fields"]) == vector["text"].encode()


def test_topics_ids_and_headers_are_named_as_in_the_vectors() -> None:
    names = vectors("records", "names")
    namespace, slot = names["namespace"], names["slot"]
    assert ledger_topic(namespace) == names["ledger"]
    assert requests_topic(namespace) == names["requests"]
    assert control_topic(namespace) == names["control"]
    assert transactional_id(namespace, slot) == names["transactional_id"]
    assert barrier_key(slot).decode() == names["barrier_key"]
    assert slot_of_barrier(barrier_key(slot)) == slot
    assert retention_key(names["retention_s"]).decode() == names["retention_key"]
    assert ttl_of_retention(retention_key(names["retention_s"])) == names["retention_s"]
    assert ttl_of_retention(barrier_key(slot)) is ttl_of_retention(None) is None
    assert GENERATION_KEY.decode() == names["generation_key"]
    assert (names["key_header"], names["stamp_header"]) == (KEY_HEADER, STAMP_HEADER)


def test_a_ledger_record_with_an_entry_that_is_nothing_is_no_ledger_record() -> None:
    with pytest.raises(WireError, match="no ledger record"):
        decode_ledger(b'{"v":1,"slot":0,"pid":1,"epoch":0,"instance":"i","entries":[null]}')
    for wrong in (b'{"orders":7}', b"[]", b"null"):
        with pytest.raises(WireError, match="no ledger record"):
            decode_ledger(b'{"v":1,"slot":0,"pid":1,"epoch":0,"instance":"i","topic_ids":%s,"entries":[]}' % wrong)


def test_a_ledger_record_names_the_offsets_of_a_group() -> None:
    positions = [CommittedOffset("orders", 0, 5), CommittedOffset("orders", 1, 2**62)]
    offsets = LedgerOffsets(b"b" * 16, b"f" * 8, 3, 'g"é', "m", 7, positions, 13, 55, 60)
    head = '{"v":1,"slot":0,"pid":1,"epoch":0,"instance":"i","entries":[],"offsets":'
    text = (
        f'{head}{{"batch":"{"62" * 16}","fp":"{"66" * 8}","at":3,"ttl":60,'
        '"group":"g\\"é","member":"m","generation":7,"partition":13,"offset":55,"positions":['
        '{"topic":"orders","partition":0,"offset":5},{"topic":"orders","partition":1,"offset":4611686018427387904}]}}'
    )
    record = LedgerRecord(0, 1, 0, "i", [], offsets=offsets)
    assert record.encode().decode() == text
    assert decode_ledger(text.encode()) == record
    hidden = LedgerRecord(0, 1, 0, "i", [], offsets=LedgerOffsets(b"b" * 16, b"f" * 8, 3, "g", "m", 7, positions))
    assert decode_ledger(hidden.encode()) == hidden
    for wrong in ("7", "null", '{"batch":"62"}'):
        with pytest.raises(WireError, match="no ledger record"):
            decode_ledger(
                b'{"v":1,"slot":0,"pid":1,"epoch":0,"instance":"i","entries":[],"offsets":%s}' % wrong.encode()
            )


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        *((name, text) for name in ("at", "partition", "offset", "ts") for text in ('"7"', "null", "1.5", "true")),
        *(("topic", text) for text in ("null", "7")),
        ("i", '"x"'),
        *((name, text) for name in ("slot", "pid", "epoch", "instance") for text in ("null", "[]")),
        ("later", "[" * 100_000 + "]" * 100_000),
    ],
)
def test_a_ledger_record_with_a_field_of_another_form_is_no_ledger_record(part: str, wrong: str) -> None:
    """Readers rely on the types of the fields."""
    entry = {"id": "01" * 16, "fp": "02" * 8, "at": 3, "topic": "t", "partition": 0, "offset": 1, "ts": 4}
    body: dict[str, Any] = {"v": 1, "slot": 0, "pid": 1, "epoch": 0, "instance": "i", "entries": [entry]}
    assert isinstance(decode_ledger(json.dumps(body).encode()), LedgerRecord)
    (body if part in body or part == "later" else entry)[part] = "HERE"
    with pytest.raises(WireError, match="no ledger record"):
        decode_ledger(json.dumps(body).replace('"HERE"', wrong).encode())


def test_a_topic_of_kafka_s_own_is_known_by_its_prefix() -> None:
    assert [name for name in ("__consumer_offsets", "orders", "_schemas", "a__b") if is_kafka_topic(name)] == [
        "__consumer_offsets"
    ]
