"""Tests the signatures of webhooks by the senders' published examples, and by their own libraries."""

import base64
import hashlib
import hmac
from datetime import UTC, datetime
from typing import Any

import pytest
import standardwebhooks
import stripe
from hypothesis import given
from hypothesis import strategies as st

from service.contract import SignatureRule
from service.contract.source_rules import SCHEME_HEADERS
from service.core.problems import BAD_SIGNATURE, Problem
from service.events.signatures import SIGNATURES_MAX, Verifier

NOW_S = 1_700_000_000


def verifier(scheme: str, *secrets: str, **more: Any) -> Verifier:
    return Verifier(SignatureRule(scheme, ("file",) * len(secrets), **more), secrets)


def refusal(verifier: Verifier, headers: dict[str, str], body: bytes, now_s: float = NOW_S) -> str:
    """Check a delivery; returns the detail of its refusal, empty if it is accepted."""
    lines = [(name.lower().encode(), text.encode("latin-1")) for name, text in headers.items()]
    try:
        verifier.check(lines, body, now_s)
    except Problem as problem:
        return problem.detail if problem.kind is BAD_SIGNATURE else "another problem"
    return ""


# --------------------------------------------------------------------------------------------- published examples

GITHUB_SECRET = "It's a Secret to Everybody"
GITHUB = {"X-Hub-Signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}
GITHUB_BODY = b"Hello, World!"


def test_the_example_of_github() -> None:
    """https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries"""
    assert refusal(verifier("github", GITHUB_SECRET), GITHUB, GITHUB_BODY) == ""
    assert refusal(verifier("github", GITHUB_SECRET), GITHUB, GITHUB_BODY + b"\n") == (
        "X-Hub-Signature-256: no signature fits the body and the secret (scheme github)"
    )


STANDARD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
STANDARD = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
STANDARD_BODY = b'{"test": 2432232314}'
STANDARD_S = 1_614_265_330


@pytest.mark.parametrize("secret", [STANDARD_SECRET, STANDARD_SECRET.removeprefix("whsec_")])
def test_the_example_of_standard_webhooks(secret: str) -> None:
    """https://github.com/standard-webhooks/standard-webhooks, the example that all its libraries test with."""
    standard = verifier("standard-webhooks", secret)
    for now_s in (STANDARD_S, STANDARD_S + 300.9, STANDARD_S - 300):
        assert refusal(standard, STANDARD, STANDARD_BODY, now_s) == ""
    assert refusal(standard, STANDARD, STANDARD_BODY, STANDARD_S + 301) == (
        "webhook-signature: the signature fits (scheme standard-webhooks; its timestamp is 301 s old, beyond 300 s)"
    )
    assert refusal(standard, STANDARD, STANDARD_BODY, STANDARD_S - 301).endswith("301 s ahead, beyond 300 s)")
    assert refusal(standard, STANDARD, b"{}", STANDARD_S + 2) == (
        "webhook-signature: no signature fits the body and the secret "
        "(scheme standard-webhooks; its timestamp is 2 s old, within 300 s)"
    )


SVIX = {name.replace("webhook", "svix"): text for name, text in STANDARD.items()}


def test_svix_signs_as_standard_webhooks_under_names_of_its_own() -> None:
    """https://docs.svix.com/receiving/verifying-payloads/how-manual"""
    standard = verifier("standard-webhooks", STANDARD_SECRET)
    assert refusal(standard, SVIX, STANDARD_BODY, STANDARD_S) == ""
    assert refusal(standard, STANDARD | SVIX, STANDARD_BODY, STANDARD_S) == ""
    assert refusal(standard, SVIX, b"{}", STANDARD_S).startswith("svix-signature: no signature fits")
    assert refusal(standard, {}, b"{}", STANDARD_S).startswith("webhook-id: the delivery has no such header")


@pytest.mark.parametrize("added", STANDARD)
def test_a_delivery_of_svix_has_no_header_of_the_other_set(added: str) -> None:
    """Else anybody who has seen it could repeat it under another `webhook-id`, which its signature does not cover."""
    standard = verifier("standard-webhooks", STANDARD_SECRET)
    assert refusal(standard, SVIX | {added: "1"}, STANDARD_BODY, STANDARD_S).startswith("webhook-")


SLACK_SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
SLACK = {
    "X-Slack-Request-Timestamp": "1531420618",
    "X-Slack-Signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
}
SLACK_BODY = (
    b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar"
    b"&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com"
    b"%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121"
    b".803a0bc887a14d10d2c447fce8b6703c"
)


def test_the_example_of_slack() -> None:
    """https://docs.slack.dev/authentication/verifying-requests-from-slack"""
    slack = verifier("slack", SLACK_SECRET)
    assert refusal(slack, SLACK, SLACK_BODY, 1_531_420_618) == ""
    later = {**SLACK, "X-Slack-Request-Timestamp": "1531420619"}
    assert refusal(slack, later, SLACK_BODY, 1_531_420_618).startswith("X-Slack-Signature: no signature fits")
    assert refusal(slack, SLACK, SLACK_BODY, 1_531_421_618).endswith("timestamp is 1000 s old, beyond 300 s)")


def test_shopify_signs_the_body_in_base64() -> None:
    """As its documentation says; the value is by `openssl dgst -sha256 -hmac SECRET -binary | base64`."""
    shopify = verifier("shopify", "shpss_0123456789abcdef")
    headers = {"X-Shopify-Hmac-SHA256": "WgzR7rq62vUNCmcicvvYrYZJZaD2hIzKWpcvIVtnpEg="}
    assert refusal(shopify, headers, b'{"id":820982911946154508}') == ""
    assert "scheme shopify" in refusal(shopify, headers, b"{}")


# ------------------------------------------------------------------------------------------- the senders' libraries


@pytest.mark.parametrize("body", ['{"id": "evt_1", "object": "event"}', "é", ""])
def test_what_the_library_of_stripe_signs(body: str) -> None:
    header = stripe.WebhookSignature.generate_signature_header(body, "whsec_test", NOW_S)
    of_stripe = verifier("stripe", "whsec_test")
    assert refusal(of_stripe, {"Stripe-Signature": header}, body.encode()) == ""
    assert refusal(of_stripe, {"Stripe-Signature": header}, body.encode(), NOW_S + 301) != ""
    assert refusal(of_stripe, {"Stripe-Signature": header}, body.encode() + b" ") != ""
    assert refusal(verifier("stripe", "test"), {"Stripe-Signature": header}, body.encode()) != ""


@pytest.mark.parametrize("body", ['{"type": "user.created"}', "é", ""])
def test_what_the_library_of_standard_webhooks_signs(body: str) -> None:
    at = datetime.fromtimestamp(NOW_S, UTC)
    signature = standardwebhooks.Webhook(STANDARD_SECRET).sign("msg_1", at, body)
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(NOW_S), "webhook-signature": signature}
    assert refusal(verifier("standard-webhooks", STANDARD_SECRET), headers, body.encode()) == ""
    other = {**headers, "webhook-id": "msg_2"}  # the id, which is the key of a delivery, is signed
    assert refusal(verifier("standard-webhooks", STANDARD_SECRET), other, body.encode()) != ""


# ---------------------------------------------------------------------------------------------------- all schemes


def signed(scheme: str, secret: str, body: bytes) -> dict[str, str]:
    """Sign a body as a sender of this scheme does at NOW_S."""

    def of(before: bytes, key: bytes = secret.encode()) -> bytes:
        return hmac.digest(key, before + body, "sha256")

    match scheme:
        case "standard-webhooks":
            key = base64.b64decode(secret.removeprefix("whsec_"))
            signature = base64.b64encode(of(b"msg_1.%d." % NOW_S, key)).decode()
            return {
                "webhook-id": "msg_1",
                "webhook-timestamp": str(NOW_S),
                "webhook-signature": f"v1a,x v1,{'A' * 43}= v1,{signature}",
            }
        case "stripe":
            return {"Stripe-Signature": f"t={NOW_S},v0=6ffbb59b,v1={'00' * 32},v1={of(b'%d.' % NOW_S).hex()}"}
        case "github":
            return {"X-Hub-Signature-256": f"sha256={of(b'').hex()}"}
        case "shopify":
            return {"X-Shopify-Hmac-SHA256": base64.b64encode(of(b"")).decode()}
        case "slack":
            return {
                "X-Slack-Request-Timestamp": str(NOW_S),
                "X-Slack-Signature": f"v0={of(b'v0:%d:' % NOW_S).hex()}",
            }
    return {"X-Sign": of(b"").hex()}


def more_of(scheme: str) -> dict[str, str]:
    return {"header": "x-sign"} if scheme == "hmac" else {}


SCHEMES = pytest.mark.parametrize("scheme", SCHEME_HEADERS)
OLD, NEW = "whsec_b2xkIG9sZCBvbGQgb2xk", "whsec_bmV3IG5ldyBuZXcgbmV3"


@SCHEMES
@pytest.mark.parametrize("secrets", [(OLD,), (NEW, OLD), (OLD, NEW)])
def test_while_a_secret_is_replaced_both_are_accepted(scheme: str, secrets: tuple[str, ...]) -> None:
    assert refusal(verifier(scheme, *secrets, **more_of(scheme)), signed(scheme, OLD, b"\x00\xff"), b"\x00\xff") == ""
    assert refusal(verifier(scheme, NEW, NEW, **more_of(scheme)), signed(scheme, OLD, b"\x00\xff"), b"\x00\xff") != ""


@SCHEMES
def test_a_refusal_names_header_and_scheme_and_neither_secret_nor_signature(scheme: str) -> None:
    headers = signed(scheme, OLD, b"body")
    detail = refusal(verifier(scheme, NEW, OLD, **more_of(scheme)), headers, b"other body")
    assert f"(scheme {scheme}" in detail
    assert any(detail.lower().startswith(name.lower()) for name in headers)
    expected = signed(scheme, OLD, b"other body").values()
    for secret in (OLD, NEW, *expected, *headers.values()):
        assert secret not in detail


@SCHEMES
@pytest.mark.parametrize("change", ["missing", "empty", "cut", "longer", "blank", "not ascii", "twice"])
def test_each_header_of_a_signature_is_checked(scheme: str, change: str) -> None:
    made = verifier(scheme, OLD, **more_of(scheme))
    headers = signed(scheme, OLD, b"body")
    for name, text in headers.items():
        changed = {
            "missing": {},
            "empty": {name: ""},
            "cut": {name: text[:-1]},
            "longer": {name: f"{text}0"},
            "blank": {name: f"{text[:-4]} {text[-4:]}"},
            "not ascii": {name: f"{text}\xe9"},
            "twice": {name: text, name.upper(): text},
        }[change]
        others = {other: text for other, text in headers.items() if other != name}
        assert refusal(made, {**others, **changed}, b"body") != ""


@pytest.mark.parametrize(
    ("scheme", "header", "text", "why"),
    [
        ("github", "X-Hub-Signature-256", GITHUB["X-Hub-Signature-256"].upper(), "it is not sha256= and hexa"),
        ("github", "X-Hub-Signature-256", "sha256=", "it is not sha256= and hexadecimal digits"),
        ("github", "X-Hub-Signature-256", "sha256=75 71", "it is not sha256= and hexadecimal digits"),
        ("github", "X-Hub-Signature-256", "sha256=757", "it is not sha256= and hexadecimal digits"),
        ("github", "X-Hub-Signature-256", "sha1=7571", "it is not sha256= and hexadecimal digits"),
        ("shopify", "X-Shopify-Hmac-SHA256", "====", "it is not base64"),
        ("shopify", "X-Shopify-Hmac-SHA256", "a-_b", "it is not base64"),
        ("slack", "X-Slack-Signature", "v1=00", "it is not v0= and hexadecimal digits"),
        ("slack", "X-Slack-Request-Timestamp", "1e9", "the timestamp is not in seconds since 1970"),
        ("slack", "X-Slack-Request-Timestamp", "-1", "the timestamp is not in seconds since 1970"),
        ("slack", "X-Slack-Request-Timestamp", "9" * 13, "the timestamp is not in seconds since 1970"),
        ("stripe", "Stripe-Signature", "v1=00", "it does not have t= once"),
        ("stripe", "Stripe-Signature", "t=1,t=2,v1=00", "it does not have t= once"),
        ("stripe", "Stripe-Signature", "t=,v1=00", "the timestamp is not in seconds since 1970"),
        ("stripe", "Stripe-Signature", "t=1.5,v1=00", "the timestamp is not in seconds since 1970"),
        ("stripe", "Stripe-Signature", "t=1,v0=00", "it does not have v1= and hexadecimal digits"),
        ("stripe", "Stripe-Signature", "t=1,v1", "it does not have v1= and hexadecimal digits"),
        ("stripe", "Stripe-Signature", "=,=,,t=1,v1=xy", "it does not have v1= and hexadecimal digits"),
        ("stripe", "Stripe-Signature", "t=1" + ",v1=00" * 17, "it has 17 signatures; at most 16 are looked at"),
        ("standard-webhooks", "webhook-signature", "v1", "it does not have v1, and base64"),
        ("standard-webhooks", "webhook-signature", "v1,", "it does not have v1, and base64"),
        ("standard-webhooks", "webhook-signature", "v1a,AAAA", "it does not have v1, and base64"),
        ("standard-webhooks", "webhook-signature", "v1,AAA", "it does not have v1, and base64"),
        ("standard-webhooks", "webhook-signature", "v1,AAAA " * 17, "it has 17 signatures; at most 16 are looked at"),
        ("standard-webhooks", "webhook-timestamp", "2023-11-14", "the timestamp is not in seconds since 1970"),
        ("standard-webhooks", "webhook-id", "a.1700000000", "it is empty, or ends with a full stop and digits"),
        ("hmac", "x-sign", "sha256=00", "it is not hexadecimal digits"),
    ],
)
def test_a_malformed_header_is_named(scheme: str, header: str, text: str, why: str) -> None:
    headers = {**signed(scheme, OLD, b"body"), header: text}
    headers.pop("X-Sign" if scheme == "hmac" else "", None)
    detail = refusal(verifier(scheme, OLD, **more_of(scheme)), headers, b"body")
    assert detail.startswith(f"{header}: {why}")
    assert detail.endswith(f"(scheme {scheme})")
    assert SIGNATURES_MAX == 16


def test_no_part_of_the_body_can_pass_for_a_timestamp() -> None:
    """Full stops separate what is signed, so an id "a" with the body "1.rest" has the bytes of "a.T" with "rest"."""
    body = b"%d.rest" % NOW_S
    headers = signed("standard-webhooks", OLD, body)
    moved = {**headers, "webhook-id": f"msg_1.{NOW_S}"}
    made = verifier("standard-webhooks", OLD)
    assert refusal(made, headers, body) == ""
    assert refusal(made, moved, b"rest").startswith("webhook-id: ")


@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "sha512"])
@pytest.mark.parametrize("encoding", ["hex", "base64"])
def test_plain_hmac(algorithm: str, encoding: str) -> None:
    digest = hmac.digest(b"s3cret", b"body", algorithm)
    text = digest.hex() if encoding == "hex" else base64.b64encode(digest).decode()
    made = verifier("hmac", "s3cret", header="x-sign", algorithm=algorithm, encoding=encoding, prefix="v=")
    assert refusal(made, {"X-Sign": f"v={text}"}, b"body") == ""
    assert refusal(made, {"X-Sign": text}, b"body").startswith("x-sign: it is not v= and ")
    other = hashlib.new(algorithm, b"body").digest()
    text = other.hex() if encoding == "hex" else base64.b64encode(other).decode()
    assert refusal(made, {"X-Sign": f"v={text}"}, b"body").startswith("x-sign: no signature fits")


def test_hexadecimal_digits_may_be_capital_letters() -> None:
    text = GITHUB["X-Hub-Signature-256"].removeprefix("sha256=").upper()
    assert refusal(verifier("github", GITHUB_SECRET), {"X-Hub-Signature-256": f"sha256={text}"}, GITHUB_BODY) == ""


@pytest.mark.parametrize("secret", ["whsec_", "whsec_not base64", "whsec_é", "whsec_A"])
def test_a_secret_of_standard_webhooks_is_base64(secret: str) -> None:
    with pytest.raises(ValueError, match="write whsec_ and base64") as caught:
        verifier("standard-webhooks", secret)
    assert secret.removeprefix("whsec_") not in str(caught.value).replace("whsec_ and base64", "") or len(secret) < 8


@given(st.sampled_from(list(SCHEME_HEADERS)), st.data())
def test_any_header_is_refused_or_fits(scheme: str, data: st.DataObject) -> None:
    """A parser that raises another error would answer 500, which senders repeat for days."""
    text = st.one_of(st.binary(max_size=40), st.from_regex(rb"[tv0-9a=, .:]{0,40}", fullmatch=True))
    headers = [(name.lower().encode(), data.draw(text)) for name in signed(scheme, OLD, b"")]
    with pytest.raises(Problem) as caught:
        verifier(scheme, OLD, **more_of(scheme)).check(headers, b"body", NOW_S)
    assert caught.value.kind is BAD_SIGNATURE


def test_a_signed_timestamp_is_returned() -> None:
    def checked(scheme: str, secret: str, headers: dict[str, str], body: bytes, now_s: float) -> int | None:
        lines = [(name.lower().encode(), text.encode()) for name, text in headers.items()]
        return verifier(scheme, secret).check(lines, body, now_s)

    assert checked("standard-webhooks", STANDARD_SECRET, STANDARD, STANDARD_BODY, STANDARD_S + 9) == STANDARD_S
    assert checked("slack", SLACK_SECRET, SLACK, SLACK_BODY, 1_531_420_620) == 1_531_420_618
    assert checked("github", GITHUB_SECRET, GITHUB, GITHUB_BODY, NOW_S) is None
