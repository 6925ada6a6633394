"""The callers that the rules name, by bearer tokens (RFC 6750) or certificates (mutual TLS)."""

import hashlib
from collections.abc import Iterable
from typing import Final

from service.contract import CallerRule
from service.core.problems import UNAUTHORIZED, Problem
from service.events.base64_text import decode_base64
from service.http.caller import ANYBODY, Caller
from service.http.certificates import NO_CERTIFICATE, Names
from service.http.rates import Rates
from service.http.token_callers import TokenCallers
from service.identity.refusals import JwksPending

_SCHEME: Final = "bearer "
_BASIC: Final = "basic "
# Characters of a token. A longer one is refused before anything is computed from it. JSON Web Tokens of Keycloak and
# Kubernetes have 1,000 to 2,000.
TOKEN_CHARS_MAX: Final = 16 * 1024


class Callers:
    """The callers that the rules name; ANYBODY if the rules name none.

    `are_missing` if the rules name sources and no caller: rules that let a webhook in do not let everybody write.
    """

    def __init__(
        self,
        rules: Iterable[CallerRule],
        *,
        tokens: TokenCallers | None = None,
        rates: Rates | None = None,
        with_sources: bool = False,
        before: "Callers | None" = None,
    ) -> None:
        """`tokens` has the callers whom JSON Web Tokens name; None if the rules name no issuer.

        `before` are the callers of earlier rules.
        """
        rates = rates or Rates()
        known = {} if before is None else before._by_name
        self._by_name: dict[str, Caller] = {}
        self._by_digest: dict[bytes, Caller] = {}
        self._by_certificate: dict[str, Caller] = {}
        for rule in rules:
            caller = self._by_name[rule.name] = known.get(rule.name, ANYBODY).for_changed_rule(rule, rates)
            self._by_digest.update(dict.fromkeys(map(bytes.fromhex, rule.token_sha256), caller))
            self._by_certificate.update(dict.fromkeys(rule.certificates, caller))
        self.tokens = tokens
        self._anybody = not self._by_name and tokens is None
        self.are_missing = with_sources and self._anybody

    def of(self, authorization: str | None, certificate: Names = NO_CERTIFICATE) -> Caller:
        """Return the caller that sends this Authorization header, or has a certificate of these names, or both.

        With both they must name the same caller; a certificate of no caller, as each pod of a mesh has one, says
        nothing beside a token. Raises JwksPending for a JSON Web Token whose key is being read, and Problem (401, 403,
        503).
        """
        if self._anybody:
            return ANYBODY
        certified = self._certified(certificate) if certificate else None
        if authorization is None:
            if certified is None:
                raise Problem(UNAUTHORIZED, "Authorization: send Bearer and your token")
            return certified
        caller = self._of_token(authorization)
        if certified is not None and certified is not caller:
            raise Problem(
                UNAUTHORIZED, "Authorization: the token and the client's certificate are of different callers"
            )
        return caller

    def _certified(self, certificate: Names) -> Caller | None:
        """Return the caller that a certificate names, if it names one.

        Raises Problem (401) if it names several, or if it names one and has expired.
        """
        found = {self._by_certificate[name] for name in certificate if name in self._by_certificate}
        if len(found) > 1:
            raise Problem(UNAUTHORIZED, "certificate: its names are of several callers")
        if not found:
            return None
        certificate.check_validity()
        return found.pop()

    def _of_token(self, authorization: str) -> Caller:
        given = authorization.strip()
        if len(given) > TOKEN_CHARS_MAX:
            raise Problem(UNAUTHORIZED, f"Authorization: a token has at most {TOKEN_CHARS_MAX} characters")
        is_bearer = given[: len(_SCHEME)].lower() == _SCHEME
        token = given[len(_SCHEME) :].strip() if is_bearer else _password_of(given)
        if token is None:
            raise Problem(UNAUTHORIZED, "Authorization: send Bearer and your token, or Basic with it as the password")
        # The look-up is by digest, so that its duration reveals nothing about a token.
        digest = hashlib.sha256(token.encode("latin-1")).digest()
        caller = self._by_digest.get(digest)
        if caller is None:
            if self.tokens is not None:
                return self.tokens.of(token, digest)
            raise Problem(UNAUTHORIZED, "Authorization: this is no token of a caller that the rules name")
        return caller

    async def find(self, authorization: str | None, certificate: Names = NO_CERTIFICATE) -> Caller:
        """Return the caller as `of` does; wait for the keys of an issuer if need be. Raises Problem (401, 403, 503)."""
        try:
            return self.of(authorization, certificate)
        except JwksPending as wanted:
            await wanted.fetched()
        return self.of(authorization, certificate)


def _password_of(authorization: str) -> str | None:
    """Return the password of Basic credentials (RFC 7617), which a client of Confluent's API sends; None for others.

    The password is the caller's token; the user name, which only repeats who that is, is not looked at.
    """
    if authorization[: len(_BASIC)].lower() != _BASIC:
        return None
    _, colon, password = (decode_base64(authorization[len(_BASIC) :].strip()) or b"").partition(b":")
    return password.decode("latin-1") if colon else None
