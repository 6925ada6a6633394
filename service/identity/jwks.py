"""The public keys of an issuer (JWK Set, RFC 7517): parsed, and read from a file or from a URL."""

import asyncio
import json
import ssl
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final, Literal

import httpx
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from service.contract import IssuerRule, tls_context
from service.contract.issuer_rules import is_safe_url

# Bytes of a JWK Set, and its keys: those of Keycloak and of Kubernetes have a few, Google's three.
JWKS_BYTES_MAX: Final = 256 * 1024
KEYS_MAX: Final = 100
# Bytes of an OpenID configuration: that of Keycloak has 7,000.
CONFIGURATION_BYTES_MAX: Final = 64 * 1024
KID_CHARS_MAX: Final = 256
# Bits of an RSA key: NIST SP 800-131A forbids fewer, and a verification with more takes milliseconds.
RSA_BITS: Final = (2048, 4096)
# The deadline of one fetch as a whole. A request whose token names an unknown key waits for no longer.
FETCH_TIMEOUT_S: Final = 3.0

PublicKey = RSAKey | ECKey | OKPKey


class KeysUnreadable(Exception):
    """The keys cannot be read, or none can be used; the text says why."""


class JwkSet:
    """The keys of a JWK Set that can verify signatures."""

    def __init__(self, content: bytes) -> None:
        """Parse a set, without the keys that cannot be used (RFC 7517, section 5). Raises KeysUnreadable for no set.

        A set of no keys is one: so an issuer withdraws them all.
        """
        try:
            document = json.loads(content)
            listed = document["keys"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise KeysUnreadable('it is no JWK Set, a JSON object with the list "keys" (RFC 7517)') from None
        if not isinstance(listed, list) or len(listed) > KEYS_MAX:
            raise KeysUnreadable(f'"keys" is no list of at most {KEYS_MAX} keys')
        self.left_out: list[str] = []
        self._keys: list[PublicKey] = []
        for index, jwk in enumerate(listed):
            try:
                if _is_for_signatures(jwk):
                    self._keys.append(_public_key(jwk))
            except (JoseError, ValueError, TypeError, KeyError) as error:
                self.left_out.append(f"keys[{index}]: {str(error)[:200]}")

    def __len__(self) -> int:
        return len(self._keys)

    def check_usable(self) -> None:
        """Raise KeysUnreadable if no key can be used, which is a mistake where an issuer is set up."""
        if not self._keys:
            why = "; ".join(self.left_out[:5]) or "none is for signatures"
            raise KeysUnreadable(f"it has no key that can be used ({why})")

    def find(self, kid: str | None, algorithm: str) -> PublicKey | None:
        """Find the key of an id that is for signatures by the algorithm; without an id, the only key that is.

        A key is for one type of algorithms: an RSA key is never the secret of an HMAC.
        """
        fitting = [key for key in self._keys if (kid is None or key.kid == kid) and _fits(key, algorithm)]
        return fitting[0] if len(fitting) == 1 or (fitting and kid is not None) else None

    def has(self, key: PublicKey) -> bool:
        """Whether a key, perhaps of an earlier set, is among these (by its thumbprint, RFC 7638)."""
        thumbprint = key.thumbprint()
        return any(each.thumbprint() == thumbprint for each in self._keys)


def _is_for_signatures(jwk: Any) -> bool:
    """Whether a key is not for encryption, as Keycloak publishes one too. Raises ValueError for no key."""
    if not isinstance(jwk, dict):
        raise ValueError("is no object")
    return jwk.get("use", "sig") == "sig" and "verify" in jwk.get("key_ops", ["verify"])


def _public_key(jwk: dict[str, Any]) -> PublicKey:
    """Import a key. Raises ValueError with why it cannot be used, and joserfc's errors."""
    if "d" in jwk or jwk.get("kty") == "oct":
        raise ValueError("is a secret, which must not be published: no token that it signs is taken")
    kid = jwk.get("kid")
    if kid is not None and (not isinstance(kid, str) or len(kid) > KID_CHARS_MAX):
        raise ValueError(f"has no `kid` of at most {KID_CHARS_MAX} characters")
    if jwk.get("kty") == "RSA" and not RSA_BITS[0] <= len(str(jwk.get("n"))) * 6 // 8 * 8 <= RSA_BITS[1]:
        raise ValueError(f"is no RSA key of {RSA_BITS[0]} to {RSA_BITS[1]} bits")
    key = JWKRegistry.import_key(jwk)
    assert isinstance(key, RSAKey | ECKey | OKPKey)  # the only other type is refused above
    return key


def _fits(key: PublicKey, algorithm: str) -> bool:
    """Whether a key is for signatures by an algorithm: its type, its curve, and its `alg` if it has one."""
    try:
        JWSRegistry.algorithms[algorithm].check_key(key)
    except JoseError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------- sources


class KeySource(ABC):
    """Where the keys of an issuer are. `period_s` is the time between two reads, in seconds."""

    period_s: float

    async def keys(self) -> tuple[bytes, JwkSet]:
        """Read the JWK Set; return it as it was read, and parsed. Raises KeysUnreadable, after FETCH_TIMEOUT_S too."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                content = await self.read()
                return content, await asyncio.to_thread(JwkSet, content)
        except TimeoutError:
            raise KeysUnreadable(f"no answer within {FETCH_TIMEOUT_S:g} s") from None

    @abstractmethod
    async def read(self) -> bytes:
        """Read the JWK Set. Raises KeysUnreadable."""


class FileSource(KeySource):
    """A file. Kubernetes and other tools replace it while the service runs."""

    period_s = 10.0

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def read(self) -> bytes:
        return await asyncio.to_thread(self.read_now)

    def read_now(self) -> bytes:
        """Read the file. Raises KeysUnreadable."""
        try:
            with self._path.open("rb") as file:
                content = file.read(JWKS_BYTES_MAX + 1)
        except OSError as error:
            raise KeysUnreadable(error.strerror or str(error)) from None
        if len(content) > JWKS_BYTES_MAX:
            raise KeysUnreadable(f"it has more than {JWKS_BYTES_MAX} bytes")
        return content


class UrlSource(KeySource):
    """A URL: that of the rule, or `jwks_uri` in the issuer's OpenID configuration, which is read each time before.

    Redirects are not followed.
    """

    period_s = 300.0

    def __init__(self, rule: IssuerRule, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` is in place of connections."""
        self._rule = rule
        self._transport = transport

    async def read(self) -> bytes:
        rule = self._rule
        try:
            async with httpx.AsyncClient(
                headers={"accept": "application/json", "accept-encoding": "identity", **await self._authorization()},
                verify=await self._authorities(),
                transport=self._transport,
                timeout=FETCH_TIMEOUT_S,
                trust_env=False,
            ) as client:
                if rule.jwks_url:
                    return await _get(client, rule.jwks_url, JWKS_BYTES_MAX)
                try:
                    configuration = await _get(client, rule.configuration_url, CONFIGURATION_BYTES_MAX)
                    jwks_uri = jwks_uri_of(configuration, rule.issuer)
                except KeysUnreadable as error:
                    raise KeysUnreadable(f"{rule.configuration_url}: {error}") from None
                return await _get(client, jwks_uri, JWKS_BYTES_MAX)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeDecodeError) as error:
            raise KeysUnreadable(f"{type(error).__name__}: {error}") from None

    async def _authorities(self) -> ssl.SSLContext | Literal[False]:
        """Read whom to trust, again for each fetch: a cluster rotates its authorities. In a thread: it takes ms."""
        if self._rule.jwks_url.startswith("http:"):
            return False
        return await asyncio.to_thread(tls_context, self._rule.jwks_cafile, "", "")

    async def _authorization(self) -> dict[str, str]:
        """Read the bearer token for the URL, again for each fetch: a projected token is replaced every hour."""
        if not self._rule.jwks_token_file:
            return {}
        token = await asyncio.to_thread(Path(self._rule.jwks_token_file).read_text, "ascii")
        return {"authorization": f"Bearer {token.strip()}"}


async def _get(client: httpx.AsyncClient, url: str, bytes_max: int) -> bytes:
    """Read what a URL answers. Raises KeysUnreadable for another status than 200, and for more than `bytes_max`."""
    received = bytearray()
    async with client.stream("GET", url) as response:
        if response.status_code != 200:
            raise KeysUnreadable(f"the URL answers {response.status_code}")
        async for piece in response.aiter_raw():
            received += piece
            if len(received) > bytes_max:
                raise KeysUnreadable(f"it has more than {bytes_max} bytes")
    return bytes(received)


def jwks_uri_of(configuration: bytes, issuer: str) -> str:
    """Return the URL of the keys in an OpenID configuration (OpenID Connect Discovery 1.0, sections 3 and 4.3).

    Raises KeysUnreadable for a configuration of another issuer, or if anybody on the way could change the keys.
    """
    try:
        document = json.loads(configuration)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise KeysUnreadable("it is no OpenID configuration, a JSON object")
    if document.get("issuer") != issuer:
        given = repr(document.get("issuer"))[:200]
        raise KeysUnreadable(f"its issuer is {given}: the rule must have the same, to the character")
    jwks_uri: Any = document.get("jwks_uri")
    if not is_safe_url(jwks_uri) or (issuer.startswith("https:") and not jwks_uri.startswith("https:")):
        raise KeysUnreadable('its "jwks_uri" is no URL that begins with https://')
    return str(jwks_uri)


def key_source_of(rule: IssuerRule) -> KeySource:
    """Make the source that a rule names."""
    return FileSource(rule.jwks_file) if rule.jwks_file else UrlSource(rule)
