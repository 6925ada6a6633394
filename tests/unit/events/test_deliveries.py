"""Tests what becomes of a webhook's delivery: its key, topic, record key and headers, and the secrets' files."""

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.contract import KeyLocation, Rules, SettingsError, SignatureRule, SourceRule
from service.contract.source_rules import INDEX_MOST, pointer_steps
from service.contract.wire.ids import event_id
from service.core.problems import Problem
from service.core.settings import EVENT_BYTES_MAX
from service.events.dead_letters import DeadLetter, body_fingerprint
from service.events.deliveries import Delivery, Pointer, Source, read_sources
from service.events.event import Event

BASIC = {"topic": '"t"', "idempotency_key": '{ pointer = "/id" }', "signature": '"none"'}


def source(**settings: str) -> Source:
    """Make a source; each setting is TOML."""
    lines = [f"{name} = {text}" for name, text in {**BASIC, **settings}.items() if text]
    (made,) = read_sources(Rules.parse("\n".join(['[[sources]]\nname = "shop"', *lines])))
    return made


def read(source: Source, body: Any, *headers: tuple[str, str]) -> Event:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = source.read([(name.lower().encode(), text.encode("latin-1")) for name, text in headers], raw, 0.0)
    assert isinstance(found, Delivery)
    return found.event


def refused(source: Source, body: Any, *headers: tuple[str, str]) -> tuple[str, str]:
    with pytest.raises(Problem) as caught:
        read(source, body, *headers)
    return caught.value.kind.code, caught.value.detail


def test_the_record_has_the_body_byte_for_byte() -> None:
    body = b' {"id": "evt_1",\r\n "n": 1.50}\n'
    event = read(source(), body, ("Content-Type", "application/json; charset=utf-8"), ("User-Agent", "x"))
    assert (event.key, event.topic, event.record_key, event.value) == ("evt_1", "t", None, body)
    assert event.headers == [("content-type", b"application/json; charset=utf-8")]
    assert event.id == event_id("evt_1", "source:shop")
    assert event.id not in (event_id("evt_1"), event_id("evt_1", "shop"))


def test_headers_that_the_rule_keeps_become_headers_of_the_record() -> None:
    keeping = source(keep_headers='["X-GitHub-Event", "X-Missing", "X-Twice"]')
    event = read(keeping, {"id": "k"}, ("X-Twice", "a"), ("x-github-event", "\xe9"), ("X-Twice", "b"), ("X-No", "c"))
    assert event.headers == [("x-github-event", b"\xe9"), ("x-twice", b"a, b")]
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert read(source(), {"id": "k"}, ("Traceparent", trace)).traceparent == trace.encode()


@pytest.mark.parametrize(
    ("value", "key"), [("évt"[1:], "vt"), (7, "7"), (12345678901234567890123, None), (True, "true")]
)
def test_the_key_is_a_string_or_the_text_of_a_number(value: Any, key: str | None) -> None:
    assert read(source(), {"id": value}).key == (key or str(value))


@pytest.mark.parametrize("body", [{}, {"id": None}, {"id": ""}, [], 7, {"id2": 1}])
def test_a_delivery_without_its_key_is_refused_with_the_pointer(body: Any) -> None:
    assert refused(source(), body) == ("missing-key", "body: /id has the idempotency key, and nothing is there")


@pytest.mark.parametrize("key", ["é", "a\nb", "x" * 256])
def test_a_key_in_the_body_is_printable_ascii(key: str) -> None:
    code, detail = refused(source(), {"id": key})
    assert (code, detail) == ("invalid-key", "body: /id: use 1 to 255 printable ASCII characters")


@pytest.mark.parametrize("value", [{}, [1]])
def test_an_object_is_no_key(value: Any) -> None:
    assert refused(source(), {"id": value}) == ("unusable-body", "body: /id is no string, number or boolean")


def test_a_key_in_a_header() -> None:
    by_header = source(idempotency_key='{ header = "X-Delivery" }')
    assert read(by_header, b"\x00\xff", ("X-Delivery", ' "a" ')).key == '"a"'
    wanted = "x-delivery: this header has the idempotency key, and the delivery lacks it"
    assert refused(by_header, b"") == ("missing-key", wanted)
    assert refused(by_header, b"", ("X-Delivery", " ")) == ("missing-key", wanted)
    assert refused(by_header, b"", ("X-Delivery", "a"), ("X-Delivery", "a")) == (
        "invalid-key",
        "x-delivery: send it once",
    )
    assert refused(by_header, b"", ("X-Delivery", "\xe9"))[0] == "invalid-key"


def test_the_idempotency_key_header_is_the_same_key_quoted_and_bare() -> None:
    by_header = source(idempotency_key='{ header = "Idempotency-Key" }')
    assert (
        read(by_header, b"", ("Idempotency-Key", '"a"')).key
        == read(by_header, b"", ("Idempotency-Key", "a")).key
        == "a"
    )


def test_a_key_may_be_the_sha256_of_the_body() -> None:
    assert read(source(idempotency_key='{ sha256 = "body" }'), b"\xff").key == hashlib.sha256(b"\xff").hexdigest()


ROUTED = {"topic_pointer": '"/type"', "topics": '{ "a.b" = "first", "7" = "second", true = "third" }', "topic": ""}


@pytest.mark.parametrize(("kind", "topic"), [("a.b", "first"), (7, "second"), ("7", "second"), (True, "third")])
def test_the_topic_is_chosen_by_a_value_of_the_body(kind: Any, topic: str) -> None:
    assert read(source(**ROUTED), {"id": "k", "type": kind}).topic == topic


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"id": "k"}, "nothing is there"),
        ({"id": "k", "type": None}, "nothing is there"),
        ({"id": "k", "type": "a"}, "the rules name no topic for 'a'"),
    ],
)
def test_a_body_for_which_the_rules_name_no_topic(body: Any, why: str) -> None:
    assert refused(source(**ROUTED), body) == ("unusable-body", f"body: /type chooses the topic, and {why}")
    assert read(source(**{**ROUTED, "topic": '"others"'}), body).topic == "others"


def test_the_record_key_is_optional() -> None:
    keyed = source(record_key='"/data/0/customer"')
    assert read(keyed, {"id": "k", "data": [{"customer": "é"}]}).record_key == "é".encode()
    assert read(keyed, {"id": "k", "data": [{"customer": 1.5}]}).record_key == b"1.5"
    for absent in ({"id": "k"}, {"id": "k", "data": []}, {"id": "k", "data": [{"customer": None}]}):
        assert read(keyed, absent).record_key is None
    assert refused(keyed, {"id": "k", "data": [{"customer": {}}]})[0] == "unusable-body"


@pytest.mark.parametrize("body", [b"", b"{", b"id=evt_1", b'{"id":"a","id":"b"}', b'{"id":"a"} x', b"\xef\xbb\xbf{}"])
def test_a_body_that_must_be_json_is_checked_strictly(body: bytes) -> None:
    """Two readers of one broken text could find two keys in it."""
    assert refused(source(), body)[0] == "invalid-json"
    assert read(source(idempotency_key='{ sha256 = "body" }'), body).value == body


# ------------------------------------------------------------------------------------------------------- pointers

NAMES = st.text(st.characters(exclude_characters='"\\', exclude_categories=["Cs", "Cc"]), max_size=3) | st.sampled_from(
    ["0", "1", "-", "01", "a/b", "~", "~1"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS, lambda of: st.lists(of, max_size=3) | st.dictionaries(NAMES, of, max_size=3), max_leaves=9
)


@st.composite
def pointers(draw: st.DrawFn) -> tuple[Any, str]:
    """Draw a document, and a pointer that mostly leads to something in it."""
    document = draw(VALUES)
    steps: list[str] = []
    here = document
    while len(steps) < 5 and (isinstance(here, dict | list) or not steps):
        known: list[str] = (
            list(here) if isinstance(here, dict) else list(map(str, range(len(here)))) if isinstance(here, list) else []
        )
        step: str = draw(st.sampled_from(known) if known and draw(st.integers(0, 4)) > 0 else NAMES)
        steps.append(step)
        here = member_of(here, step)
    return document, "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)


def member_of(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    is_index = step.isascii() and step.isdigit() and step == str(int(step)) and int(step) <= INDEX_MOST
    return value[int(step)] if isinstance(value, list) and is_index and int(step) < len(value) else None


@given(pointers(), st.booleans(), st.sampled_from([None, 1]))
def test_a_pointer_finds_what_a_reader_of_the_whole_document_finds(
    drawn: tuple[Any, str], ascii: bool, indent: int | None
) -> None:
    document, pointer = drawn
    found = document
    for step in pointer_steps(pointer):
        found = member_of(found, step)
    text = " " + json.dumps(document, ensure_ascii=ascii, indent=indent) + "\n"
    try:
        raw: Any = Pointer(pointer).find(text.encode("utf-8"))
    except Problem:
        assert isinstance(found, dict | list)
        return
    assert raw == (found if found is None or isinstance(found, str) else json.dumps(found))


def test_a_number_is_taken_as_it_is_written() -> None:
    assert Pointer("/n").find(b'{"n": 1.50e0 }') == "1.50e0"
    assert Pointer("/t\u00e9/x").find(b'{"t\\u00e9":{"\\u0078":"\\u00e9\\n"}}') == "é\n"


# -------------------------------------------------------------------------------------------------------- secrets


def rules_with(folder: Path, scheme: str = "github", *files: str) -> Rules:
    listed = ", ".join(f'"{file}"' for file in files)
    text = '[[sources]]\nname = "shop"\ntopic = "t"\nidempotency_key = { sha256 = "body" }\n'
    return Rules.parse(
        f'{text}signature = {{ scheme = "{scheme}", secret_files = [{listed}] }}\n', f"{folder}/rules.toml"
    )


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_secret_stands_beside_the_rules_without_its_line_break(tmp_path: Path, ending: str) -> None:
    (tmp_path / "secret").write_bytes(b" s " + ending.encode())
    (made,) = read_sources(rules_with(tmp_path, "github", "secret"))
    signature = "sha256=" + hmac.digest(b" s ", b"body", "sha256").hex()
    assert read(made, b"body", ("X-Hub-Signature-256", signature)).value == b"body"
    assert refused(made, b"body", ("X-Hub-Signature-256", "sha256=00"))[0] == "bad-signature"


@pytest.mark.parametrize(
    ("content", "scheme", "why"),
    [
        (None, "github", "cannot be read (No such file or directory): name a file that has the secret"),
        (b"\xff", "github", "cannot be read (it is not UTF-8): name a file that has the secret"),
        (b"", "github", "is empty: put the secret into it"),
        (b" \n", "github", "is empty: put the secret into it"),
        (b"whsec_t0p-s3cret!", "standard-webhooks", "write whsec_ and base64, as Standard Webhooks' secrets are"),
    ],
)
def test_a_secret_that_cannot_be_used_stops_the_start(
    tmp_path: Path, content: bytes | None, scheme: str, why: str
) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_sources(rules_with(tmp_path, scheme, "secret"))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"FENCEPOST_RULES: source shop: {tmp_path}/secret")
    assert line.endswith(why)
    assert "t0p-s3cret" not in line


def test_each_secret_that_cannot_be_used_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("s")
    one = rules_with(tmp_path, "github", "good", "bad").sources
    with pytest.raises(SettingsError) as caught:
        read_sources(Rules(sources=(*one, *rules_with(tmp_path, "slack", "worse").sources)))
    assert [line.split(": ")[2].split(" ")[0] for line in str(caught.value).splitlines()] == [
        f"{tmp_path}/bad",
        f"{tmp_path}/worse",
    ]


QUARANTINED = {"quarantine": '"letters"', "key_ttl_s": "300"}


@pytest.mark.parametrize(
    ("settings", "body", "key", "refused"),
    [
        ({}, b"\xff{", None, "invalid-json body: "),
        ({}, b'{"type": 1}', None, "missing-key body: /id has the idempotency key"),
        ({}, b'{"id": "\xc3\xa9"}', None, "invalid-key body: /id: use 1 to 255"),
        ({"record_key": '"/o"'}, b'{"id": "k", "o": {}}', "k", "unusable-body body: /o is no string"),
        (ROUTED, b'{"id": "k", "type": "x"}', "k", "unusable-body body: /type chooses the topic, and the rules name"),
        ({"idempotency_key": '{ header = "X-Id" }', "record_key": '"/o"'}, b"{", "h", "invalid-json body: "),
        ({"idempotency_key": '{ header = "X-No" }'}, b"{", None, "missing-key x-no: this header has"),
    ],
)
def test_a_body_that_cannot_be_used_is_a_dead_letter_under_its_key(
    settings: dict[str, str], body: bytes, key: str | None, refused: str
) -> None:
    """One without a key gets the SHA-256 of its body, so that a repetition finds its answer."""
    letter = read(source(**QUARANTINED, **settings), body, ("X-Id", "h"), ("Content-Type", "text/x"))
    assert isinstance(letter, DeadLetter)
    assert letter.key == (key or hashlib.sha256(body).hexdigest())
    assert letter.id == event_id(letter.key, "source:shop")
    assert (letter.topic, letter.value, letter.record_key, letter.ttl_s) == ("letters", body, None, 300)
    assert letter.refused.startswith(refused)
    code, _, detail = letter.refused.partition(" ")
    assert letter.headers == [
        ("content-type", b"text/x"),
        ("fencepost-code", code.encode()),
        ("fencepost-detail", detail.encode()),
        ("fencepost-caller", b"source:shop"),
    ]
    assert letter.fp == body_fingerprint(body)
    assert letter.size == len(body) + sum(len(name) + len(content) for name, content in letter.headers)


def test_a_body_that_no_record_holds_is_no_dead_letter() -> None:
    with pytest.raises(Problem, match="too-large"):
        read(source(**QUARANTINED), b"x" * (EVENT_BYTES_MAX - 10), ("Content-Type", "text/plain"))


def test_a_source_without_a_quarantine_refuses_what_it_cannot_use() -> None:
    assert refused(source(), b"{")[0] == "invalid-json"


@pytest.mark.parametrize("name", ["webhook-id", "svix-id"])
def test_the_key_is_the_id_that_is_signed(name: str) -> None:
    """Whichever of both names the rule has."""
    rule = SourceRule("shop", KeyLocation.HEADER, name, SignatureRule("standard-webhooks", ("s",)), "t")
    signed = Source(rule, None)  # as if its signature had been checked
    for prefix in ("webhook", "svix"):
        headers = [(f"{prefix}-{part}".encode(), part.encode()) for part in ("id", "timestamp", "signature")]
        found = signed.read([*headers, (b"svix-id", b"other")] if prefix == "webhook" else headers, b"{}", 0.0)
        assert isinstance(found, Delivery)
        assert found.event.key == "id"
