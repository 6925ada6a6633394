"""Tests which JSON Web Tokens name a caller, whom, and what a refusal says."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jws import JWSRegistry

from service.contract import IssuerRule, Rules
from service.contract.issuer_rules import ALGORITHMS
from service.core.metrics import Telemetry
from service.core.problems import FORBIDDEN_CALLER, INVALID_TOKEN, Problem
from service.identity.refusals import JwksPending
from service.identity.tokens import GLOBS_MAX, Issuers, VerifiedToken, file_faults
from tests.unit.identity.signing import CLAIMS, ISSUER, NOW, Published, Signer, key_set, part

SIGNER = Signer.new()
OTHER = Signer.new("k2")
RSA = Signer.new("rsa", "RS256")
RULE = IssuerRule("corp", ISSUER, ("fencepost",), algorithms=("ES256", "RS256"), leeway_s=10)


def issuers_of(*rules: IssuerRule, signers: tuple[Signer, ...] = (SIGNER, RSA)) -> Issuers:
    return Issuers(
        rules, Telemetry(), now=lambda: float(NOW), sources={rule.name: Published(key_set(*signers)) for rule in rules}
    )


async def identity_of(issuers: Issuers, token: str) -> VerifiedToken:
    """Verify a token as the service does, which waits for keys that are being read."""
    try:
        return issuers.verify(token)
    except JwksPending as wanted:
        await wanted.fetched()
    return issuers.verify(token)


async def refusal_of(token: str, rule: IssuerRule = RULE) -> Problem:
    with pytest.raises(Problem) as caught:
        await identity_of(issuers_of(rule), token)
    assert not any(len(piece) > 1 and piece in caught.value.detail for piece in token.split("."))
    return caught.value


def claims(**changes: Any) -> dict[str, Any]:
    """Make claims of which some are changed; None leaves one out."""
    return {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}


async def test_a_token_names_its_caller_within_the_issuer() -> None:
    identity = await identity_of(issuers_of(RULE), SIGNER.sign())
    assert identity[:4] == ("issuer:corp:alice", (("*",),), NOW + 70, RULE)
    assert identity.key.kid == "k1"
    assert (await identity_of(issuers_of(RULE), RSA.sign())).scope == "issuer:corp:alice"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_each_algorithm_that_a_rule_may_list_is_verified(algorithm: str) -> None:
    signer = Signer.new("k", algorithm)
    rule = IssuerRule("corp", ISSUER, ("fencepost",), algorithms=(algorithm,))
    assert (await identity_of(issuers_of(rule, signers=(signer,)), signer.sign())).scope == "issuer:corp:alice"
    head, payload, signature = signer.sign().split(".")
    raw = bytearray(base64.urlsafe_b64decode(signature + "=="))
    raw[len(raw) // 2] ^= 1
    with pytest.raises(Problem, match="its signature is not that of the issuer's key"):
        await identity_of(
            issuers_of(rule, signers=(signer,)),
            f"{head}.{payload}.{base64.urlsafe_b64encode(raw).decode().rstrip('=')}",
        )


def test_every_algorithm_is_one_of_the_library_with_a_public_key() -> None:
    assert {JWSRegistry.algorithms[name].key_type for name in ALGORITHMS} == {"RSA", "EC", "OKP"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"exp": NOW - 10}, "exp: the token has expired", id="expired by the leeway"),
        pytest.param({"exp": None}, "exp: the token has no such claim", id="without an end"),
        pytest.param({"exp": "soon"}, "exp: the claim is malformed", id="the end is no time"),
        pytest.param({"exp": True}, "exp: the claim is malformed", id="the end is true"),
        pytest.param({"nbf": NOW + 11}, "nbf: the token is not valid yet", id="not yet"),
        pytest.param({"iat": NOW + 11}, "iat: the token is of the future", id="of the future"),
        pytest.param({"aud": "other"}, "aud: the token is for another audience", id="another audience"),
        pytest.param({"aud": ["a", "b"]}, "aud: the token is for another audience", id="other audiences"),
        pytest.param({"aud": "fencepost2"}, "aud: the token is for another audience", id="a longer audience"),
        pytest.param({"aud": None}, "aud: the token has no such claim", id="for nobody"),
        pytest.param(
            {"aud": {"fencepost": 1}}, "aud: the token is for another audience", id="the audience is an object"
        ),
        pytest.param({"iss": f"{ISSUER}/"}, "iss: the rules name no such issuer", id="another issuer"),
        pytest.param({"iss": [ISSUER]}, "iss: the rules name no such issuer", id="a list of issuers"),
        pytest.param({"iss": None}, "iss: the rules name no such issuer", id="of nobody"),
        pytest.param({"sub": None}, "sub: it is no name", id="without a name"),
        pytest.param({"sub": ""}, "sub: it is no name", id="an empty name"),
        pytest.param({"sub": 7}, "sub: ", id="a number for a name"),
        pytest.param({"sub": ["alice"]}, "sub: ", id="a list of names"),
        pytest.param({"sub": "a\0b"}, "sub: it is no name", id="a name with the byte that ends a scope"),
        pytest.param({"sub": "a\nb"}, "sub: it is no name", id="a name of two lines"),
        pytest.param({"sub": "a\u202eb"}, "sub: it is no name", id="a name that turns its text"),
        pytest.param({"sub": "a" * 256}, "sub: it is no name", id="a name that is too long"),
    ],
)
async def test_a_token_whose_claims_do_not_fit_is_refused_with_the_claim(changes: dict[str, Any], why: str) -> None:
    problem = await refusal_of(SIGNER.sign(claims(**changes)))
    assert problem.kind is INVALID_TOKEN
    assert problem.detail.startswith(f"Authorization: {why}")


@pytest.mark.parametrize(
    "changes", [{"exp": NOW - 9}, {"nbf": NOW + 10}, {"iat": NOW + 10}, {"aud": ["x", "fencepost"]}, {"sub": "é:ü"}]
)
async def test_a_token_within_its_bounds_is_taken(changes: dict[str, Any]) -> None:
    await identity_of(issuers_of(RULE), SIGNER.sign(claims(**changes)))


def forged(header: Mapping[str, Any], secret: bytes | None = None) -> str:
    """Make a token without the issuer's private key: its signature is empty, or an HMAC."""
    signed = f"{part(header)}.{part(dict(CLAIMS))}"
    mac = b"" if secret is None else hmac.digest(secret, signed.encode(), hashlib.sha256)
    return f"{signed}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


@pytest.mark.parametrize(
    ("token", "why"),
    [
        pytest.param(forged({"alg": "none"}), "alg: the issuer corp signs by", id="none"),
        pytest.param(forged({"alg": "none", "kid": "k1"}), "alg: the issuer corp signs by", id="none with a key"),
        pytest.param(forged({"alg": "NONE"}), "alg: the issuer corp signs by", id="none in capitals"),
        pytest.param(
            forged({"alg": "HS256", "kid": "rsa"}, RSA.key.as_pem()), "alg: the issuer corp signs by", id="public PEM"
        ),
        pytest.param(
            forged({"alg": "HS256", "kid": "k1"}, json.dumps(SIGNER.jwk).encode()),
            "alg: the issuer corp signs by",
            id="public JWK",
        ),
        pytest.param(
            forged({"alg": "RS256", "kid": "k1"}), "kid: the issuer corp has no key", id="another type of key"
        ),
        pytest.param(forged({"alg": "ES256", "kid": "k1"}), "its signature is not", id="no signature"),
        pytest.param(forged({"alg": "ES256", "kid": 1}), "kid: it is no string", id="a number for an id"),
        pytest.param(forged({"alg": "ES256", "kid": "k" * 257}), "kid: it has more than 256", id="a long id"),
        pytest.param(
            forged({"alg": ["ES256"], "kid": "k1"}), "alg: the issuer corp signs by", id="a list of algorithms"
        ),
        pytest.param(forged({"kid": "k1"}), "it is neither", id="no algorithm"),
        pytest.param(Signer(OTHER.key, "k1", "ES256").sign(), "its signature is not", id="another key's signature"),
        pytest.param(
            Signer(OTHER.key, "k2", "ES256").sign(header={"jwk": OTHER.jwk}), "kid: the issuer", id="its own key"
        ),
        pytest.param(
            Signer(OTHER.key, "k2", "ES256").sign(header={"jku": "https://evil.example/keys"}),
            "kid: the issuer",
            id="its own URL of keys",
        ),
        pytest.param(
            f"{part({'alg': 'ES256', 'kid': 'k1', 'crit': ['x'], 'x': 1})}.{SIGNER.sign().split('.', 1)[1]}",
            "its header is not taken",
            id="a critical parameter that is unknown",
        ),
        pytest.param(
            f"{part({'alg': 'ES256', 'kid': 'k1', 'b64': False, 'crit': ['b64']})}.{SIGNER.sign().split('.', 1)[1]}",
            "it is n",
            id="a payload that is not encoded",
        ),
        pytest.param("s3cret", "it is neither", id="no JWT"),
        pytest.param("a.b.c", "it is neither", id="three words"),
        pytest.param("....", "it is neither", id="dots"),
        pytest.param("é.é.é", "it is neither", id="no ASCII"),
        pytest.param(f"{SIGNER.sign()}.x", "it is neither", id="four parts"),
        pytest.param(f"{part('[1]')}.{part('{}')}.", "it is n", id="a header that is a list"),
        pytest.param(f"{part('[' * 2000)}.{part('{}')}.", "it is n", id="a deep header"),
        pytest.param(f"{part({'alg': 'ES256'})}.{part('[' * 9000)}.", "it is n", id="a deep payload"),
        pytest.param(f"{part({'alg': 'ES256'})}.{part('[]')}.", "it is n", id="a payload that is a list"),
        pytest.param(f"{part({'alg': 'ES256'})}.{part('9' * 9000)}.", "it is n", id="a long number"),
        pytest.param(f"{part({'alg': 'ES256', 'x': 'x' * 5000})}.{part('{}')}.", "it is n", id="a long header"),
    ],
)
async def test_a_token_that_the_issuer_did_not_sign_is_refused(token: str, why: str) -> None:
    problem = await refusal_of(token)
    assert problem.kind is INVALID_TOKEN
    assert problem.detail.startswith(f"Authorization: {why}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PARAMETERS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("alg", "kid", "crit", "b64", "typ", "x5c", "jku", "jwk"), JSON)
)


@given(header=JSON | PARAMETERS.map(lambda more: {"alg": "ES256", "kid": "k1"} | more), payload=JSON, text=st.text())
async def test_no_header_and_no_payload_is_more_than_a_refusal(header: Any, payload: Any, text: str) -> None:
    issuers = issuers_of(RULE)
    for token in (
        f"{part(header)}.{part({**CLAIMS})}.AAAA",
        f"{part({'alg': 'ES256', 'kid': 'k1'})}.{part(payload)}.AAAA",
        text,
    ):
        with pytest.raises(Problem) as caught:
            await identity_of(issuers, token)
        assert caught.value.kind is INVALID_TOKEN


async def test_a_token_without_the_id_of_its_key_is_verified_if_there_is_one_key_only() -> None:
    one = Signer(SIGNER.key, "", "ES256")
    token = one.sign(header={"kid": "x"})
    head, rest = part({"alg": "ES256"}), token.split(".")[1]
    signed = f"{head}.{rest}"
    algorithm = JWSRegistry.algorithms["ES256"]
    signature = base64.urlsafe_b64encode(algorithm.sign(signed.encode(), SIGNER.key)).decode().rstrip("=")
    anonymous = f"{signed}.{signature}"
    assert (await identity_of(issuers_of(RULE), anonymous)).scope == "issuer:corp:alice"
    with pytest.raises(Problem, match="kid: the token names no key"):
        await identity_of(issuers_of(RULE, signers=(SIGNER, OTHER)), anonymous)


async def test_of_several_issuers_each_verifies_with_its_own_keys() -> None:
    second = IssuerRule("till", "https://till.example", ("fencepost",), algorithms=("ES256",))
    sources = {"corp": Published(key_set(SIGNER)), "till": Published(key_set(OTHER))}
    issuers = Issuers((RULE, second), Telemetry(), now=lambda: float(NOW), sources=sources)
    theirs = claims(iss="https://till.example")
    scopes = [(await identity_of(issuers, token)).scope for token in (SIGNER.sign(), OTHER.sign(theirs))]
    assert scopes == ["issuer:corp:alice", "issuer:till:alice"]
    for forgery in (SIGNER.sign(theirs), OTHER.sign(), Signer(OTHER.key, "k1", "ES256").sign()):
        with pytest.raises(Problem) as caught:
            await identity_of(issuers, forgery)
        assert caught.value.kind.status in (401, 503)  # the second: its key may be newer than the last read


async def test_a_rule_says_which_clients_tokens_are_taken() -> None:
    rule = IssuerRule("corp", ISSUER, ("fencepost",), algorithms=("ES256",), azp=("sender", "other"))
    taken: list[dict[str, Any]] = [{"azp": "sender"}, {"client_id": "other"}, {"azp": "other", "client_id": "x"}]
    for changes in taken:
        await identity_of(issuers_of(rule), SIGNER.sign(claims(**changes)))
    refused: list[dict[str, Any]] = [{}, {"azp": "x"}, {"azp": ["sender"]}, {"azp": "x", "client_id": "sender"}]
    for changes in refused:
        problem = await refusal_of(SIGNER.sign(claims(**changes)), rule)
        assert problem.detail.startswith("Authorization: azp: ")


async def test_claims_may_be_nested_and_tell_the_topics() -> None:
    rule = IssuerRule(
        "corp",
        ISSUER,
        ("fencepost",),
        algorithms=("ES256",),
        name_claim=("who", "id"),
        topics_claim=("access", "topics"),
    )
    issuers = issuers_of(rule)
    who = {"who": {"id": "till-7"}}
    for topics, wanted in (
        (["orders.*", "audit"], ("orders.*", "audit")),
        ("orders.* audit", ("orders.*", "audit")),
        ([], ()),
        (None, ()),
    ):
        identity = await identity_of(issuers, SIGNER.sign(claims(**who, access={"topics": topics})))
        assert (identity.scope, identity.topics) == ("issuer:corp:till-7", (("*",), wanted))
    for wrong in (7, {"a": 1}, ["a", 7], ["a" * 250], ["a"] * (GLOBS_MAX + 1)):
        problem = await refusal_of(SIGNER.sign(claims(**who, access={"topics": wrong})), rule)
        assert problem.detail.startswith("Authorization: access/topics: it is no list")
    names: list[Any] = ["alice", {"id": {}}, {"id": None}]
    for name in names:
        assert (await refusal_of(SIGNER.sign(claims(who=name)), rule)).detail.startswith("Authorization: who/id: ")


async def test_a_projected_token_of_kubernetes_names_its_service_account() -> None:
    rule = Rules.parse(
        """
        [[issuers]]
        name = "cluster"
        issuer = "https://kubernetes.default.svc.cluster.local"
        audience = ["fencepost"]
        algorithms = ["RS256", "ES256"]
        jwks_url = "https://kubernetes.default.svc/openid/v1/jwks"
        [issuers.subjects]
        "system:serviceaccount:shop:till" = ["orders"]
        "system:serviceaccount:shop:*" = ["shop.*"]
        """
    ).issuers[0]
    projected = {
        "aud": ["fencepost"],
        "exp": NOW + 3607,
        "iat": NOW,
        "iss": "https://kubernetes.default.svc.cluster.local",
        "jti": "6a3f0c1e-8a0d-4c59-9d4e-0a4d3b0a3a10",
        "kubernetes.io": {
            "namespace": "shop",
            "node": {"name": "node-1", "uid": "646e7c5e-32d6-4d42-9dbd-e504e6cbe6b1"},
            "pod": {"name": "till-5d4f8c7b9d-x2x8k", "uid": "5e0bd49b-f040-43b0-99b7-22765a53f7f3"},
            "serviceaccount": {"name": "till", "uid": "14ee3fa4-a7e2-420f-9f9a-dbc4507c3798"},
        },
        "nbf": NOW,
        "sub": "system:serviceaccount:shop:till",
    }
    issuers = issuers_of(rule)
    till = await identity_of(issuers, RSA.sign(projected))
    assert (till.scope, till.topics) == (
        "issuer:cluster:system:serviceaccount:shop:till",
        (("*",), ("orders",)),
    )
    web = await identity_of(issuers, RSA.sign({**projected, "sub": "system:serviceaccount:shop:web"}))
    assert web.topics == (("*",), ("shop.*",))
    with pytest.raises(Problem, match="the rules do not name this caller") as caught:
        await identity_of(issuers, RSA.sign({**projected, "sub": "system:serviceaccount:shopping:web"}))
    assert caught.value.kind is FORBIDDEN_CALLER


def test_files_that_cannot_be_used_are_told_with_their_rule(tmp_path: Path) -> None:
    good, no_set, no_key = tmp_path / "good.json", tmp_path / "none.json", tmp_path / "secret.json"
    good.write_bytes(key_set(SIGNER))
    no_set.write_text("[]")
    no_key.write_text('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}')
    files = (good, no_set, no_key, tmp_path / "absent")
    by_file = [IssuerRule(path.stem, ISSUER, ("f",), jwks_file=str(path)) for path in files]
    by_url = IssuerRule("url", ISSUER, ("f",), jwks_url="https://id.example", jwks_cafile=str(no_set))
    rules = Rules(issuers=(*by_file, by_url))
    faults = [*file_faults(rules)]
    assert [line.partition(": ")[0] for line in faults] == [
        "the issuer 'none'",
        "the issuer 'secret'",
        "the issuer 'absent'",
        "the issuer 'url'",
    ]
    assert "JWK Set" in faults[0]
    assert "must not be published" in faults[1]
    assert "No such file" in faults[2]
    assert all("\n" not in line and "c2VjcmV0" not in line for line in faults)


async def test_keys_are_kept_when_the_rules_change_and_closed_when_nothing_reads_them() -> None:
    first, second = Published(key_set(SIGNER)), Published(key_set(OTHER))
    sources = {"corp": first, "other": second}
    other = IssuerRule("other", "https://other.example", ("fencepost",), algorithms=("ES256",))

    def after(*rules: IssuerRule, before: Issuers | None = None) -> Issuers:
        made = Issuers(rules, Telemetry(), now=lambda: float(NOW), sources=sources, before=before)
        made.start()
        return made

    one = after(RULE, other)
    assert (await identity_of(one, SIGNER.sign())).rule == RULE
    first.content = "no route"
    changed = replace(RULE, leeway_s=20)
    two = after(changed, before=one)
    await one.close(two)
    assert two.verify(SIGNER.sign()).rule == changed  # without a read
    assert first.reads == 1
    three = after(replace(changed, jwks_url="https://id.example/new"), before=two)
    await two.close(three)
    with pytest.raises(Problem, match="cannot be read: no route"):
        await identity_of(three, SIGNER.sign())
    await three.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "issuer-keys"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(SIGNER, OTHER._replace(kid="k1"), id="its id is used again"),
        pytest.param(SIGNER._replace(kid=None), OTHER._replace(kid=None), id="without an id"),
        pytest.param(RSA._replace(kid=None), OTHER._replace(kid=None), id="without an id, of another type"),
    ],
)
async def test_a_key_that_replaces_another_is_read_before_its_signature_is_refused(
    before: Signer, after: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.identity.issuer_keys.REFETCH_LEAST_S", 0.0)
    published = Published(key_set(before))
    issuers = Issuers((RULE,), Telemetry(), now=lambda: float(NOW), sources={"corp": published})
    await identity_of(issuers, before.sign())
    published.content = key_set(after)
    assert (await identity_of(issuers, after.sign())).scope == "issuer:corp:alice"
    assert published.reads == 2
    monkeypatch.setattr("service.identity.issuer_keys.REFETCH_LEAST_S", 5.0)
    with pytest.raises(Problem, match="are being read"):
        issuers.verify(before.sign())
    for _ in range(2):
        with pytest.raises(Problem, match=r"its signature is not|kid: the token names no key"):
            await identity_of(issuers, before.sign())
    assert published.reads == 3  # one for all such tokens
