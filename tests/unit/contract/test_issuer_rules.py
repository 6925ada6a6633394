"""Tests the `[[issuers]]` tables of the rules, and the scopes of the callers whom their tokens name."""

from pathlib import Path
from typing import Any

import pytest

from service.contract import IssuerRule, Rules, SettingsError

BASE = {
    "name": '"corp"',
    "issuer": '"https://id.example/realms/shop"',
    "audience": '"fencepost"',
    "jwks_url": '"https://id.example/certs"',
}


def table(**changes: str | None) -> str:
    """Write an `[[issuers]]` table; None leaves a setting out."""
    lines = [f"{name} = {value}\n" for name, value in {**BASE, **changes}.items() if value is not None]
    return "[[issuers]]\n" + "".join(lines)


def test_an_issuer_is_read_with_its_defaults() -> None:
    (rule,) = Rules.parse(table()).issuers
    assert rule == IssuerRule(
        "corp",
        "https://id.example/realms/shop",
        ("fencepost",),
        "https://id.example/certs",
        algorithms=("RS256",),
        name_claim=("sub",),
        topics=("*",),
        leeway_s=30,
    )
    assert rule.subjects is None


def test_an_issuer_is_read_with_all_its_settings(tmp_path: Path) -> None:
    text = table(
        audience='["a", "b"]',
        jwks_url=None,
        jwks_file='"keys.json"',
        algorithms='["ES256", "PS512", "Ed25519"]',
        azp='["sender"]',
        name_claim='"azp"',
        topics_claim='"/resource_access/fence~1post/roles"',
        topics='["orders.*"]',
        subjects='{ "a" = ["x"], "b*" = ["y", "z"] }',
        leeway_s="0",
        rate="2.5",
        groups='["billing-*"]',
    )
    (rule,) = Rules.parse(text, str(tmp_path / "rules.toml")).issuers
    assert (rule.audience, rule.azp, rule.jwks_file) == (("a", "b"), ("sender",), str(tmp_path / "keys.json"))
    assert rule.algorithms == ("ES256", "PS512", "Ed25519")
    assert (rule.name_claim, rule.topics_claim) == (("azp",), ("resource_access", "fence/post", "roles"))
    assert (rule.topics, rule.leeway_s, rule.rate) == (("orders.*",), 0, 2.5)
    assert rule.groups == ("billing-*",)
    assert rule.subjects == {"a": ("x",), "b*": ("y", "z")}


@pytest.mark.parametrize("issuer", ["https://id.example/realms/shop", "https://id.example/", "http://127.0.0.1:8080"])
def test_an_issuer_may_name_the_place_of_its_keys_itself(issuer: str, tmp_path: Path) -> None:
    text = table(issuer=f'"{issuer}"', jwks_url=None, jwks_cafile='"ca.crt"', jwks_token_file='"token"')
    (rule,) = Rules.parse(text, str(tmp_path / "rules.toml")).issuers
    assert (rule.jwks_url, rule.jwks_file) == ("", "")
    assert rule.configuration_url == f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    assert rule.jwks_cafile == str(tmp_path / "ca.crt")


def test_the_keys_of_an_api_server_need_its_authority_and_a_token(tmp_path: Path) -> None:
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    text = table(jwks_cafile=f'"{folder}/ca.crt"', jwks_token_file=f'"{folder}/token"')
    (rule,) = Rules.parse(text, str(tmp_path / "rules.toml")).issuers
    assert (rule.jwks_cafile, rule.jwks_token_file) == (f"{folder}/ca.crt", f"{folder}/token")


@pytest.mark.parametrize(
    ("changes", "line", "name"),
    [
        ({"name": None}, 1, "name"),
        ({"name": '"a:b"'}, 2, "name"),
        ({"issuer": None}, 1, "issuer"),
        ({"issuer": '""'}, 3, "issuer"),
        ({"issuer": '"a\\nb"'}, 3, "issuer"),
        ({"audience": None}, 1, "audience"),
        ({"audience": "[]"}, 4, "audience"),
        ({"audience": '["a", 7]'}, 4, "audience"),
        ({"jwks_url": None, "issuer": '"http://id.example/realms/shop"'}, 1, "jwks_url"),
        ({"jwks_url": None, "issuer": '"https://id.example?realm=shop"'}, 1, "jwks_url"),
        ({"jwks_url": None, "issuer": '"shop"'}, 1, "jwks_url"),
        ({"jwks_file": '"keys.json"'}, 5, "jwks_url"),
        ({"jwks_url": '"http://id.example/certs"'}, 5, "jwks_url"),
        ({"jwks_url": '"https://user:secret@id.example/certs"'}, 5, "jwks_url"),
        ({"jwks_url": '"https:///certs"'}, 5, "jwks_url"),
        ({"jwks_url": '"file:///certs"'}, 5, "jwks_url"),
        ({"jwks_url": '"https://[x/certs"'}, 5, "jwks_url"),
        ({"jwks_url": '"https://id.example:0/"'}, 5, "jwks_url"),
        ({"jwks_url": "7"}, 5, "jwks_url"),
        ({"jwks_url": None, "jwks_file": '""'}, 5, "jwks_file"),
        ({"jwks_url": None, "jwks_file": '"k"', "jwks_cafile": '"ca"'}, 6, "jwks_cafile"),
        ({"jwks_cafile": "7"}, 6, "jwks_cafile"),
        ({"algorithms": "[]"}, 6, "algorithms"),
        ({"algorithms": '"RS256"'}, 6, "algorithms"),
        ({"algorithms": '["RS256", "none"]'}, 6, "algorithms"),
        ({"algorithms": '["HS256"]'}, 6, "algorithms"),
        ({"algorithms": '[["RS256"]]'}, 6, "algorithms"),
        ({"azp": "[]"}, 6, "azp"),
        ({"name_claim": '""'}, 6, "name_claim"),
        ({"name_claim": '"/a~2"'}, 6, "name_claim"),
        ({"topics_claim": '["a"]'}, 6, "topics_claim"),
        ({"topics": '"orders"'}, 6, "topics"),
        ({"groups": '"billing"'}, 6, "groups"),
        ({"subjects": "{}"}, 6, "subjects"),
        ({"subjects": '{ "a" = "x" }'}, 6, "subjects"),
        ({"subjects": '{ "a" = [] }'}, 6, "subjects"),
        ({"leeway_s": "301"}, 6, "leeway_s"),
        ({"leeway_s": "true"}, 6, "leeway_s"),
        ({"rate": "0"}, 6, "rate"),
        ({"algorithm": '"RS256"'}, 6, "algorithm"),
    ],
)
def test_a_wrong_setting_of_an_issuer_is_reported_with_its_line(
    changes: dict[str, str | None], line: int, name: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(table(**changes), "rules.toml")
    lines = str(caught.value).splitlines()
    assert [each.partition(f"{name}: ")[0] for each in lines] == [f"rules.toml:{line}: "]
    assert "secret" not in lines[0]


@pytest.mark.parametrize(
    "url", ["https://id.example/certs?x=1", "http://127.0.0.1:8080/c", "http://localhost/c", "http://[::1]/c"]
)
def test_keys_come_over_tls_or_from_this_machine(url: str) -> None:
    assert Rules.parse(table(jwks_url=f'"{url}"')).issuers[0].jwks_url == url


def test_two_tables_have_neither_the_same_name_nor_the_same_issuer() -> None:
    with pytest.raises(SettingsError) as caught:
        Rules.parse(2 * table(), "rules.toml")
    names = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert names == ["name", "issuer"]
    assert len(Rules.parse(table() + table(name='"till"', issuer='"https://till.example"')).issuers) == 2


def test_no_two_callers_have_one_scope() -> None:
    """Names of static callers and of issuers have no colon; sources have a prefix of their own."""
    first, second = IssuerRule("a", "i", ("f",)), IssuerRule("b", "j", ("f",))
    names = ["a", "b:a", "a:b", ":", "source:a", "issuer:a:a", "system:serviceaccount:shop:till"]
    scopes = [rule.scope_of(name) for rule in (first, second) for name in names]
    assert len({*scopes}) == len(scopes)
    assert all(scope.split(":", 2)[0] == "issuer" for scope in scopes)
    for name in ("issuer:a:b", "source:a", "a:b"):
        with pytest.raises(SettingsError, match="name: write 1 to 64"):
            Rules.parse(f'[[callers]]\nname = "{name}"\ntoken_sha256 = "{"ab" * 32}"\n')


def test_the_audit_knows_the_scopes_of_the_callers_that_a_rule_names() -> None:
    known: Any = table(subjects='{ "alice" = ["*"], "bob*" = ["*"], "till-[0-9]" = ["*"] }')
    assert Rules.parse(known).scopes == ("", "issuer:corp:alice")
    assert Rules.parse(table()).scopes == ("",)
