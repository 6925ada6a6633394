"""Keys of an issuer and the tokens that they sign, for tests."""

import base64
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey

from service.identity.jwks import KeySource, KeysUnreadable

ISSUER: Final = "https://id.example/realms/shop"
NOW: Final = 1_700_000_000
CLAIMS: Final[Mapping[str, Any]] = {"iss": ISSUER, "aud": "fencepost", "sub": "alice", "exp": NOW + 60}
_CURVES: Final = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}


class Signer(NamedTuple):
    """A private key with its id, if it has one, and its algorithm."""

    key: RSAKey | ECKey | OKPKey
    kid: str | None
    algorithm: str

    @classmethod
    def new(cls, kid: str = "k1", algorithm: str = "ES256") -> "Signer":
        """Make a key; one of RSA takes a tenth of a second."""
        if algorithm in _CURVES:
            return cls(ECKey.generate_key(_CURVES[algorithm]), kid, algorithm)
        if algorithm == "Ed25519":
            return cls(OKPKey.generate_key("Ed25519"), kid, algorithm)
        return cls(RSAKey.generate_key(2048), kid, algorithm)

    @property
    def jwk(self) -> dict[str, Any]:
        """The public key, as issuers publish it."""
        return {**self.key.as_dict(private=False), **self._id, "alg": self.algorithm, "use": "sig"}

    @property
    def _id(self) -> dict[str, str]:
        return {} if self.kid is None else {"kid": self.kid}

    def sign(self, claims: Mapping[str, Any] = CLAIMS, header: Mapping[str, Any] | None = None) -> str:
        """Make a token; `header` has parameters beside alg and kid, or in place of kid."""
        whole = {"alg": self.algorithm, **self._id, **(header or {})}
        return jwt.encode(whole, dict(claims), self.key, algorithms=[self.algorithm])


def part(document: object) -> str:
    """Encode a part of a token; text as it is."""
    text = document if isinstance(document, str) else json.dumps(document)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def key_set(*signers: Signer) -> bytes:
    """Make a JWK Set of public keys."""
    return json.dumps({"keys": [signer.jwk for signer in signers]}).encode()


class Published(KeySource):
    """Keys that a test publishes. `content`: the JWK Set, or why it cannot be read; `reads`: how often it was."""

    period_s = 1_000_000.0

    def __init__(self, content: bytes | str) -> None:
        self.content = content
        self.reads = 0

    async def read(self) -> bytes:
        self.reads += 1
        if isinstance(self.content, str):
            raise KeysUnreadable(self.content)
        return self.content
