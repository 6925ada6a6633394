"""Tests the `[[sources]]` tables of the rules: what is read, and a line for each mistake."""

import re
from importlib.resources import files

import pytest

from service.contract import KeyLocation, Rules, SettingsError, SignatureRule
from service.contract.source_rules import POINTER_STEPS_MAX, SCHEME_HEADERS, TIMESTAMPED, pointer_steps

STRIPE = """\
[[sources]]
name = "stripe"
topic = "other-payments"
topic_pointer = "/type"
topics = { "charge.succeeded" = "charges", "customer.created" = "customers" }
record_key = "/data/object/customer"
idempotency_key = { pointer = "/id" }
keep_headers = ["User-Agent"]
signature = { scheme = "stripe", secret_files = ["new.secret", "/run/old.secret"], tolerance_s = 60 }
rate = 100
"""
SIGNED = 'signature = { scheme = "github", secret_files = ["a"] }\n'
START = '[[sources]]\nname = "a"\n'
KEY = 'idempotency_key = { sha256 = "body" }\n'


def test_a_source_is_read() -> None:
    (source,) = Rules.parse(STRIPE, "/etc/fencepost/rules.toml").sources
    assert (source.name, source.scope, source.rate) == ("stripe", "source:stripe", 100)
    assert (source.key_location, source.key_name) == (KeyLocation.POINTER, "/id")
    assert (source.topic, source.topic_pointer) == ("other-payments", "/type")
    assert dict(source.topics) == {"charge.succeeded": "charges", "customer.created": "customers"}
    assert (source.record_key, source.keep_headers) == ("/data/object/customer", ("user-agent",))
    files = ("/etc/fencepost/new.secret", "/run/old.secret")
    assert source.signature == SignatureRule("stripe", files, 60)


def test_the_sources_of_the_readme_are_right() -> None:
    text = (files("service") / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(\[\[sources\]\]\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    rules = Rules.parse(example)
    assert [(source.name, source.signature and source.signature.scheme) for source in rules.sources] == [
        ("stripe", "stripe"),
        ("github", "github"),
    ]
    assert all(f"`{scheme}`" in text for scheme in SCHEME_HEADERS)
    assert rules.sources[0].key_ttl_s > 3 * 86_400  # Stripe's last attempt comes after three days


def test_a_source_that_is_not_signed_says_so() -> None:
    text = START + 'topic = "t"\nidempotency_key = { header = "X-Delivery" }\nsignature = "none"\n'
    (source,) = Rules.parse(text).sources
    assert (source.signature, source.key_location, source.key_name) == (None, KeyLocation.HEADER, "x-delivery")
    assert (source.record_key, source.keep_headers, source.rate, dict(source.topics)) == ("", (), None, {})


def test_plain_hmac_has_settings_of_its_own() -> None:
    more = 'header = "X-Sign", algorithm = "sha512", encoding = "base64", prefix = "v="'
    text = START + KEY + f'topic = "t"\nsignature = {{ scheme = "hmac", secret_files = ["a"], {more} }}\n'
    signature = Rules.parse(text).sources[0].signature
    assert signature == SignatureRule("hmac", ("a",), 300, "x-sign", "sha512", "base64", "v=")


def test_the_scopes_of_sources_are_no_names_of_callers() -> None:
    digest = "ab" * 32
    rules = Rules.parse(f'{STRIPE}[[callers]]\nname = "stripe"\ntoken_sha256 = "{digest}"\n')
    assert rules.scopes == ("", "stripe", "source:stripe")
    with pytest.raises(SettingsError, match=r"^rules:2: name: "):
        Rules.parse(f'[[callers]]\nname = "source:stripe"\ntoken_sha256 = "{digest}"\n')


def test_subtables_may_follow_their_source() -> None:
    text = START + 'topic_pointer = "/type"\n[sources.topics]\na = "b"\n[sources.idempotency_key]\npointer = "/id"\n'
    (source,) = Rules.parse(text + '[sources.signature]\nscheme = "slack"\nsecret_files = ["s"]\n').sources
    assert (dict(source.topics), source.key_name) == ({"a": "b"}, "/id")
    with pytest.raises(SettingsError, match=r"^rules:9: signature: scheme: "):
        Rules.parse(text + '\n[sources.signature]\nscheme = "slak"\nsecret_files = ["s"]\n')


def wrong(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(text)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ("", "1: topic: write the name of a topic, or topic_pointer and topics"),
        ('topic = "a b"', "3: topic: write the name of a topic"),
        ('topic = ".."', "3: topic: write the name of a topic"),
        ("topic = 7", "3: topic: write the name of a topic"),
        ('topic_pointer = "/t"', "1: topics: write a topic for each value"),
        ('topic_pointer = "/t"\ntopics = {}', "4: topics: write a topic for each value"),
        ('topic_pointer = "/t"\ntopics = { a = "b c" }', "4: topics: write a topic for each value"),
        ('topic_pointer = "/t"\ntopics = { a = 1 }', "4: topics: write a topic for each value"),
        ('topics = { a = "b" }', "3: topics: write also where the value is that chooses one"),
        ('topic_pointer = "t"\ntopics = { a = "b" }', "3: topic_pointer: write a JSON pointer"),
        ('topic = "t"\nrecord_key = ""', "4: record_key: write a JSON pointer"),
        ('topic = "t"\nrecord_key = "id"', "4: record_key: write a JSON pointer"),
        ('topic = "t"\nrecord_key = ["/id"]', "4: record_key: write a JSON pointer"),
        ('topic = "t"\nrecord_key = "/a~2"', "4: record_key: write a JSON pointer"),
        ('topic = "t"\nrecord_key = "/a~"', "4: record_key: write a JSON pointer"),
        ("topic = 't'\nrecord_key = '/a\"b'", "4: record_key: quotes, backslashes"),
        (f'topic = "t"\nrecord_key = "{"/a" * (POINTER_STEPS_MAX + 1)}"', "4: record_key: write at most 16 steps"),
        ('topic = "t"\nkeep_headers = "X-A"', "4: keep_headers: write up to 50 names"),
        ('topic = "t"\nkeep_headers = ["X A"]', "4: keep_headers: write up to 50 names"),
        ('topic = "t"\nkeep_headers = ["X-A:"]', "4: keep_headers: write up to 50 names"),
        ('topic = "t"\nkeep_headers = ["X-A", "x-a"]', "4: keep_headers: write each name once"),
        ('topic = "t"\nkeep_headers = ["Fencepost"]', "4: keep_headers: Fencepost: this name is reserved"),
        ('topic = "t"\nkeep_headers = ["Content-Type"]', "4: keep_headers: Content-Type: it is kept anyway"),
        ('topic = "t"\nkeep_headers = ["X-Hub-Signature-256"]', "4: keep_headers: X-Hub-Signature-256: a retry has"),
        ('topic = "t"\nkeep_headers = ["Date"]', "4: keep_headers: Date: a retry has another one"),
        ('topic = "t"\nrate = 0', "4: rate: write events a second"),
        ('topic = "t"\nrate = true', "4: rate: write events a second"),
        ('topic = "t"\nkey_ttl_s = 0', "4: key_ttl_s: write seconds, from 1 to "),
        ('topic = "t"\nquarantine = ".."', "4: quarantine: write the name of a topic"),
        ('topic = "t"\ntopc = "u"', "4: topc: no such setting; write name, topic, topic_pointer, topics, record_key, "),
    ],
)
def test_a_mistake_is_reported_with_its_line(lines: str, fault: str) -> None:
    assert wrong(f"{START}{lines}\n{KEY}{SIGNED}").startswith(f"rules:{fault}")


@pytest.mark.parametrize("name", ['"a b"', '""', '"."', '".."', '"a/b"', '"source:a"', "7", f'"{"a" * 65}"'])
def test_a_name_stands_in_a_path_as_it_is(name: str) -> None:
    assert wrong(f'[[sources]]\nname = {name}\ntopic = "t"\n{KEY}{SIGNED}').startswith("rules:2: name: write 1 to 64")


def test_no_two_sources_have_one_name() -> None:
    one = f'{START}topic = "t"\n{KEY}{SIGNED}'
    assert wrong(one + one).startswith("rules:7: name: another source has it")


@pytest.mark.parametrize(
    "key",
    [
        '"id"',
        "{}",
        '{ header = "a", pointer = "/b" }',
        '{ header = "" }',
        '{ header = "a b" }',
        "{ header = 1 }",
        '{ sha256 = "header" }',
        '{ cookie = "a" }',
        '{ pointer = "id" }',
        '{ pointer = "" }',
        "{ pointer = 1 }",
        '{ header = "X-Hub-Signature-256" }',
        '{ header = "X-Slack-Retry-Num" }',
    ],
)
def test_a_key_has_one_place_that_each_attempt_shares(key: str) -> None:
    assert wrong(f'{START}topic = "t"\nidempotency_key = {key}\n{SIGNED}').startswith("rules:4: idempotency_key: ")


def test_a_source_without_a_key_is_wrong() -> None:
    assert wrong(f'{START}topic = "t"\n{SIGNED}').startswith("rules:1: idempotency_key: write where each delivery has")


@pytest.mark.parametrize(
    ("signature", "fault"),
    [
        ('"off"', 'write { scheme = "stripe"'),
        ("false", 'write { scheme = "stripe"'),
        ("{}", "scheme: write one of standard-webhooks, stripe, github, shopify, slack, hmac"),
        ('{ scheme = ["stripe"] }', "scheme: write one of"),
        ('{ scheme = "github" }', "secret_files: write one file"),
        ('{ scheme = "github", secret_files = "a" }', "secret_files: write one file"),
        ('{ scheme = "github", secret_files = [] }', "secret_files: write one file"),
        ('{ scheme = "github", secret_files = ["a", "b", "c"] }', "secret_files: write one file"),
        ('{ scheme = "github", secret_files = [""] }', "secret_files: write one file"),
        ('{ scheme = "github", secret_files = ["a"], secret = "s" }', "secret: github has no such setting"),
        ('{ scheme = "github", secret_files = ["a"], tolerance_s = 5 }', "tolerance_s: github has no such setting"),
        ('{ scheme = "stripe", secret_files = ["a"], header = "X" }', "header: stripe has no such setting"),
        ('{ scheme = "stripe", secret_files = ["a"], tolerance_s = 0 }', "tolerance_s: write seconds, from 1"),
        ('{ scheme = "stripe", secret_files = ["a"], tolerance_s = 1.5 }', "tolerance_s: write seconds, from 1"),
        ('{ scheme = "stripe", secret_files = ["a"], tolerance_s = true }', "tolerance_s: write seconds, from 1"),
        ('{ scheme = "hmac", secret_files = ["a"] }', "header: write the name of the header"),
        ('{ scheme = "hmac", secret_files = ["a"], header = "X", algorithm = "md5" }', "algorithm: write one of"),
        ('{ scheme = "hmac", secret_files = ["a"], header = "X", encoding = "utf8" }', "encoding: write one of"),
        ('{ scheme = "hmac", secret_files = ["a"], header = "X", prefix = " " }', "prefix: write what stands"),
        ('{ scheme = "hmac", secret_files = ["a"], header = "X", prefix = 1 }', "prefix: write what stands"),
    ],
)
def test_a_wrong_signature_is_reported(signature: str, fault: str) -> None:
    line = wrong(f'{START}topic = "t"\n{KEY}signature = {signature}\n')
    assert line.startswith(f"rules:5: signature: {fault}")


def test_an_unsigned_source_is_not_taken_by_mistake() -> None:
    assert wrong(f'{START}topic = "t"\n{KEY}').startswith("rules:1: signature: write { scheme")


def test_every_scheme_with_a_timestamp_is_a_scheme() -> None:
    assert not TIMESTAMPED - SCHEME_HEADERS.keys()


@pytest.mark.parametrize(
    ("pointer", "steps"),
    [("/a", ("a",)), ("/", ("",)), ("/a~1b/m~0n/~01", ("a/b", "m~n", "~1")), ("/a//0", ("a", "", "0"))],
)
def test_a_pointer_is_split_by_rfc_6901(pointer: str, steps: tuple[str, ...]) -> None:
    assert pointer_steps(pointer) == steps
