"""Callers by their bearer tokens (RFC 6750): the topics that they may write to, and their rates."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from service.contract import CallerRule
from service.core.problems import FORBIDDEN_TOPIC, UNAUTHORIZED, Problem
from service.core.settings import TOPICS_MAX
from service.http.rates import BYTES, EVENTS, Bucket, Rates, rate_lines
from service.identity.refusals import KeysWanted
from service.pipeline.key_checks import UNKNOWN_AGE, KeyAge

if TYPE_CHECKING:
    from service.http.token_callers import TokenCallers

_SCHEME: Final = "bearer "
# Characters of a token. A longer one is refused before anything is computed from it. JSON Web Tokens of Keycloak and
# Kubernetes have 1,000 to 2,000.
TOKEN_CHARS_MAX: Final = 16 * 1024


class Sender(NamedTuple):
    """The sender of an event: the scope of its key, the age of the key, and the quarantine topic of a source."""

    scope: str = ""
    age: KeyAge = UNKNOWN_AGE
    quarantine: str = ""


class Caller:
    """One caller. `scope` is its name and the namespace of its keys; the empty scope is shared by all callers."""

    def __init__(self, scope: str, may_write_to: Callable[[str], bool], buckets: Sequence[Bucket] = ()) -> None:
        """`buckets` count what the caller sends, perhaps under several tokens; none for a caller without a rate."""
        self.scope = scope
        self.sender = Sender(scope)
        self.may_write_to = may_write_to  # whether the rules let the caller write to a topic
        self._buckets = tuple(buckets)
        self.is_rated = bool(buckets)

    @classmethod
    def of_rule(cls, rule: CallerRule, rates: Rates | None = None) -> "Caller":
        """Make the caller of a rule, with buckets of its own among `rates`."""
        globs = rule.topics
        may = lru_cache(maxsize=TOPICS_MAX)(lambda topic: any(fnmatchcase(topic, glob) for glob in globs))
        return cls(rule.name, may, (rates or Rates()).buckets(rule.name, rule.rate, rule.rate_bytes))

    def check(self, topic: str) -> None:
        """Raise Problem (403) if the rules do not let the caller write to the topic."""
        if not self.may_write_to(topic):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {self.scope} may not write to {topic}: the rules say where it may")

    def check_validity(self) -> None:
        """Raise Problem (401) if what tells who the caller is has expired. A stream asks again and again."""

    @property
    def burst(self) -> int | None:
        """The most events that the caller may send at once within its rate; None for a caller without a rate."""
        return next((int(bucket.burst) for bucket in self._buckets if bucket.unit == EVENTS), None)

    def admit(self) -> None:
        """Raise Problem (429) if the caller is over a rate, and TokensWanted if this process does not know."""
        for bucket in self._buckets:
            bucket.admit()

    def check_rate(self) -> None:
        """Raise Problem (429) if the caller is known to be over a rate."""
        for bucket in self._buckets:
            bucket.check()

    def spend(self, events: int, size: int) -> None:
        """Count events, and the bytes of their bodies. Raise Problem (429) if the caller is over a rate."""
        if not self._buckets:
            return
        self.check_rate()
        for bucket in self._buckets:
            bucket.spend(size if bucket.unit == BYTES else events)

    async def wait_s(self) -> float:
        """Return the time, in seconds, after which the caller may send again; 0 if it may now."""
        return max([await bucket.wait_s() for bucket in self._buckets], default=0.0)

    def rate_lines(self) -> bytes:
        """Render the header lines about the caller's rates, each with its CRLF."""
        return rate_lines(self._buckets)


ANYBODY: Final = Caller("", lambda _: True)


class Callers:
    """The callers that the rules name; ANYBODY if the rules name none.

    `are_missing` if the rules name sources and no caller: rules that let a webhook in do not let everybody write.
    """

    def __init__(
        self,
        rules: Iterable[CallerRule],
        *,
        tokens: "TokenCallers | None" = None,
        rates: Rates | None = None,
        with_sources: bool = False,
    ) -> None:
        """`tokens` has the callers whom JSON Web Tokens name; None if the rules name no issuer."""
        rates = rates or Rates()
        self._by_digest: dict[bytes, Caller] = {}
        for rule in rules:
            self._by_digest.update(dict.fromkeys(map(bytes.fromhex, rule.token_sha256), Caller.of_rule(rule, rates)))
        self._tokens = tokens
        self._anybody = not self._by_digest and tokens is None
        self.are_missing = with_sources and self._anybody

    def of(self, authorization: str | None) -> Caller:
        """Return the caller that sends this Authorization header.

        Raises KeysWanted for a JSON Web Token whose key is being read, and Problem (401, 403, 503).
        """
        if self._anybody:
            return ANYBODY
        if authorization is None:
            raise Problem(UNAUTHORIZED, "Authorization: send Bearer and your token")
        token = authorization.strip()
        if len(token) > TOKEN_CHARS_MAX:
            raise Problem(UNAUTHORIZED, f"Authorization: a token has at most {TOKEN_CHARS_MAX} characters")
        is_bearer = token[: len(_SCHEME)].lower() == _SCHEME
        token = token[len(_SCHEME) :].strip()
        # The look-up is by digest, so that its duration reveals nothing about a token.
        digest = hashlib.sha256(token.encode("latin-1")).digest()
        caller = self._by_digest.get(digest) if is_bearer else None
        if caller is None:
            if is_bearer and self._tokens is not None:
                return self._tokens.of(token, digest)
            raise Problem(UNAUTHORIZED, "Authorization: this is no token of a caller that the rules name")
        return caller

    async def find(self, authorization: str | None) -> Caller:
        """Return the caller as `of` does; wait for the keys of an issuer if need be. Raises Problem (401, 403, 503)."""
        try:
            return self.of(authorization)
        except KeysWanted as wanted:
            await wanted.fetched()
        return self.of(authorization)
