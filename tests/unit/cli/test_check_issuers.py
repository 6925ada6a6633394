"""Tests the doctor's checks of the issuers of tokens."""

import json
from pathlib import Path

from service.cli.check_issuers import examine
from service.cli.finding import Finding, Level
from service.contract import IssuerRule, Rules
from tests.unit.identity.signing import ISSUER, Signer, key_set


async def test_the_keys_of_each_issuer_are_read(tmp_path: Path) -> None:
    signer = Signer.new()
    (tmp_path / "good").write_bytes(key_set(signer))
    (tmp_path / "odd").write_text(json.dumps({"keys": [signer.jwk, {"kty": "oct", "k": "AA"}]}))
    names = ("good", "odd", "absent")
    found = await examine(
        Rules(issuers=tuple(IssuerRule(name, ISSUER, ("f",), jwks_file=str(tmp_path / name)) for name in names))
    )
    assert [(one.check, one.level, one.subjects) for one in found] == [
        ("issuers.keys", Level.OK, ("good",)),
        ("issuers.keys", Level.WARNING, ("odd",)),
        ("issuers.keys", Level.ERROR, ("absent",)),
    ]
    assert found[0].found == "1 keys"
    assert "jwks_file" in found[2].change


async def test_without_issuers_nothing_is_checked() -> None:
    none: list[Finding] = []
    assert await examine(Rules()) == none
