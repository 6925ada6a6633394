"""Verifies JSON Web Tokens (RFC 7519, RFC 8725) by the rules of their issuers: who the caller is, where it may write.

A signature is verified on the event loop. http/token_callers.py keeps the result until the token expires.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError
from joserfc.jws import CompactSignature, JWSRegistry, extract_compact, validate_compact
from joserfc.jwt import JWTClaimsRegistry

from service.contract import IssuerRule, Rules, tls_context
from service.core.metrics import Telemetry
from service.core.problems import FORBIDDEN_CALLER, Problem
from service.identity.issuer_keys import IssuerKeys
from service.identity.jwks import FileSource, JwkSet, KeySource, KeysUnreadable, PublicKey, key_source_of
from service.identity.refusals import invalid_token

HEADER_BYTES_MAX: Final = 4 * 1024
NAME_CHARS_MAX: Final = 255
# Globs of topics in a token, and the characters of each: no topic's name has more.
GLOBS_MAX: Final = 100
GLOB_CHARS_MAX: Final = 249

Globs = tuple[str, ...]
_KeyLocation = tuple[str, str, str, str, str, str]
"""The fields of a rule that say whose keys an IssuerKeys reads, and where: if they stay, so does the IssuerKeys."""


class VerifiedToken(NamedTuple):
    """A caller whom a verified token names.

    `scope` is the scope of its keys. It may write to the topics that match one of each of `topics`. The token is valid
    until `expires_s`, seconds since the Unix epoch, leeway included; `rule` is that of its issuer. Its signature is of
    `key`, one of `keys`.
    """

    scope: str
    topics: tuple[Globs, ...]
    expires_s: float
    rule: IssuerRule
    key: PublicKey
    keys: IssuerKeys


class Issuers:
    """The issuers of the rules, and their keys."""

    def __init__(
        self,
        rules: Iterable[IssuerRule],
        telemetry: Telemetry,
        now: Callable[[], float] = time.time,
        sources: Mapping[str, KeySource] | None = None,
        before: "Issuers | None" = None,
    ) -> None:
        """`sources`, by the rule's name, are in place of those of the rules, whose files `file_faults` has checked.

        `before` are the issuers of earlier rules: keys that are still read from the same location are kept.
        """
        self._by_iss: dict[str, _Issuer] = {}
        self._keys: dict[_KeyLocation, IssuerKeys] = {}
        for rule in rules:
            location = _location_of(rule)
            keys = None if before is None else before._keys.get(location)
            if keys is None:
                keys = IssuerKeys(rule, sources[rule.name] if sources else key_source_of(rule), telemetry)
            self._keys[location] = keys
            self._by_iss[rule.issuer] = _Issuer(rule, keys, now)

    @property
    def version(self) -> int:
        """A number that grows with each change of keys: what was verified before must be verified again."""
        return sum([issuer.keys.version for issuer in self._by_iss.values()])

    def start(self) -> None:
        """Start to read the keys."""
        for keys in self._keys.values():
            keys.start()

    async def close(self, after: "Issuers | None" = None) -> None:
        """Stop reading the keys, but for those that `after` has kept."""
        kept = {} if after is None else after._keys
        for location, keys in self._keys.items():
            if kept.get(location) is not keys:
                await keys.close()

    def verify(self, token: str) -> VerifiedToken:
        """Verify a token, and return the caller whom it names.

        Raises JwksPending if its key may be among those that are being read, and Problem: 401 for a token that is not
        taken, 403 for a caller that the rules do not let write, 503 if the keys of the issuer cannot be read.
        """
        unverified, claims = _parsed(token)
        iss = claims.get("iss")
        issuer = self._by_iss.get(iss) if isinstance(iss, str) else None
        if issuer is None:
            raise invalid_token("iss: the rules name no such issuer")
        return issuer.identity(unverified, claims)


def _location_of(rule: IssuerRule) -> _KeyLocation:
    return rule.name, rule.issuer, rule.jwks_url, rule.jwks_file, rule.jwks_cafile, rule.jwks_token_file


class _Issuer:
    """One issuer: its rule, its keys, and what its tokens must be."""

    def __init__(self, rule: IssuerRule, keys: IssuerKeys, now: Callable[[], float]) -> None:
        self.keys = keys
        self._rule = rule
        # Unknown parameters of a header are ignored (RFC 7515, section 4), unless `crit` names them.
        self._signatures = JWSRegistry(algorithms=rule.algorithms, strict_check_header=False)
        self._signatures.max_header_length = HEADER_BYTES_MAX
        self._claims = JWTClaimsRegistry(
            lambda: int(now()),
            rule.leeway_s,
            iss={"essential": True, "value": rule.issuer},
            aud={"essential": True, "values": [*rule.audience]},
            exp={"essential": True},
        )

    def identity(self, unverified: CompactSignature, claims: dict[str, Any]) -> VerifiedToken:
        """Verify a token that names this issuer. Raises what Issuers.verify raises."""
        key = self._key_of(unverified)
        self._check_claims(claims)
        rule = self._rule
        name = _claim(claims, rule.name_claim)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX or not name.isprintable():
            claim = "/".join(rule.name_claim)
            raise invalid_token(f"{claim}: it is no name of the caller, 1 to {NAME_CHARS_MAX} printable characters")
        expires_s = claims["exp"] + rule.leeway_s
        return VerifiedToken(rule.scope_of(name), self._topics(claims, name), expires_s, rule, key, self.keys)

    def _key_of(self, unverified: CompactSignature) -> PublicKey:
        """Verify the signature, and return its key."""
        header = unverified.headers()
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._rule.algorithms:
            raise invalid_token(f"alg: the issuer {self._rule.name} signs by {', '.join(self._rule.algorithms)}")
        if kid is not None and not isinstance(kid, str):
            raise invalid_token("kid: it is no string")
        key = self.keys.find(kid, algorithm)
        try:
            is_valid = validate_compact(unverified, key, registry=self._signatures)
        except (JoseError, ValueError, TypeError):
            raise invalid_token("its header is not taken: a parameter has the wrong type, or is critical") from None
        if not is_valid:
            self.keys.read_again()
            raise invalid_token("its signature is not that of the issuer's key")
        return key

    def _check_claims(self, claims: dict[str, Any]) -> None:
        """Check the claims of a token whose signature is right."""
        rule = self._rule
        try:
            self._claims.validate(claims)
        except ExpiredTokenError:
            raise invalid_token("exp: the token has expired: send a new one") from None
        except MissingClaimError as error:
            raise invalid_token(f"{error.claim}: the token has no such claim") from None
        except InvalidClaimError as error:
            raise invalid_token(_WRONG.get(error.claim, f"{error.claim}: the claim is malformed")) from None
        if rule.azp and claims.get("azp", claims.get("client_id")) not in rule.azp:
            raise invalid_token(f"azp: the issuer {rule.name} is trusted for other clients only")

    def _topics(self, claims: dict[str, Any], name: str) -> tuple[Globs, ...]:
        """Return what the rule, the token, and the caller's name say about topics; all must let a topic pass."""
        rule = self._rule
        topics = [rule.topics]
        if rule.topics_claim:
            topics.append(_globs_of(_claim(claims, rule.topics_claim), "/".join(rule.topics_claim)))
        if rule.subjects is not None:
            of_name = next((globs for glob, globs in rule.subjects.items() if fnmatchcase(name, glob)), None)
            if of_name is None:
                raise Problem(FORBIDDEN_CALLER, f"the rules do not name this caller of the issuer {rule.name}")
            topics.append(of_name)
        return tuple(topics)


# By claim, what is wrong about one that has a value, but not the right one.
_WRONG: Final = {
    "aud": "aud: the token is for another audience",
    "iss": "iss: the rules name no such issuer",
    "nbf": "nbf: the token is not valid yet",
    "iat": "iat: the token is of the future",
}
_LIMITS: Final = JWSRegistry(strict_check_header=False)
_LIMITS.max_header_length = HEADER_BYTES_MAX


def _parsed(token: str) -> tuple[CompactSignature, dict[str, Any]]:
    """Parse a token without verifying it: its signature and its claims. Raises Problem (401)."""
    try:
        parsed = extract_compact(token.encode("ascii"), registry=_LIMITS)
        header, claims = parsed.headers(), json.loads(parsed.payload)
    except (JoseError, ValueError, TypeError, LookupError, AttributeError, RecursionError):  # of any JSON as its header
        raise invalid_token("it is neither a token that the rules name nor a signed JSON Web Token") from None
    if not isinstance(header, dict) or not isinstance(claims, dict) or "b64" in header:
        raise invalid_token("it is no JSON Web Token: its header and its payload must be JSON objects")
    return parsed, claims


def _claim(claims: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Find a claim, perhaps in others; None if there is none."""
    found: Any = claims
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _globs_of(value: Any, claim: str) -> Globs:
    """Read the globs of topics from a claim, a list or words with spaces between; none without the claim.

    Raises Problem (401).
    """
    globs = [] if value is None else value.split() if isinstance(value, str) else value
    if not isinstance(globs, list) or len(globs) > GLOBS_MAX:
        raise invalid_token(f"{claim}: it is no list of at most {GLOBS_MAX} topics")
    if not all(isinstance(glob, str) and len(glob) <= GLOB_CHARS_MAX for glob in globs):
        raise invalid_token(f"{claim}: it is no list of topics, each of at most {GLOB_CHARS_MAX} characters")
    return tuple(globs)


def file_faults(rules: Rules) -> Iterator[str]:
    """Find the issuers whose files cannot be used: a line for each, which says what to write."""
    for rule in rules.issuers:
        try:
            if rule.jwks_file:
                JwkSet(FileSource(rule.jwks_file).read_now()).check_usable()
            elif rule.jwks_cafile:
                tls_context(rule.jwks_cafile, "", "")
        except KeysUnreadable as error:
            yield f"{_file(rule, 'jwks_file')} cannot be used ({error}): write the path of a file that has a JWK Set"
        except OSError as error:
            why = error.strerror or error
            yield f"{_file(rule, 'jwks_cafile')} cannot be used ({why}): write the path of a PEM file of certificates"


def _file(rule: IssuerRule, name: str) -> str:
    return f"the issuer {rule.name!r}: {name} = {getattr(rule, name)!r}"
