"""Callers by their bearer tokens (RFC 6750): the topics that they may write to, and their rates."""

import hashlib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from service.contract import CallerRule
from service.core.problems import FORBIDDEN_TOPIC, UNAUTHORIZED, Problem
from service.core.settings import TOPICS_MAX
from service.http.rates import TokenBucket
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

    def __init__(self, scope: str, may_write_to: Callable[[str], bool], bucket: TokenBucket | None = None) -> None:
        """`bucket` counts the caller's events, perhaps with those of others; None for a caller without a rate."""
        self.scope = scope
        self.sender = Sender(scope)
        self.may_write_to = may_write_to  # whether the rules let the caller write to a topic
        self._bucket = bucket

    @classmethod
    def of_rule(cls, rule: CallerRule) -> "Caller":
        """Make the caller of a rule, with a bucket of its own."""
        globs = rule.topics
        may = lru_cache(maxsize=TOPICS_MAX)(lambda topic: any(fnmatchcase(topic, glob) for glob in globs))
        return cls(rule.name, may, None if rule.rate is None else TokenBucket(rule.rate))

    def check(self, topic: str) -> None:
        """Raise Problem (403) if the rules do not let the caller write to the topic."""
        if not self.may_write_to(topic):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {self.scope} may not write to {topic}: the rules say where it may")

    def check_validity(self) -> None:
        """Raise Problem (401) if what tells who the caller is has expired. A stream asks again and again."""

    @property
    def burst(self) -> int | None:
        """The most events that the caller may send at once within its rate; None for a caller without a rate."""
        return None if self._bucket is None else self._bucket.burst

    def spend(self, events: int, now: float) -> None:
        """Take events from the token bucket at `now`, in seconds. Raise Problem (429) if the bucket is empty."""
        if self._bucket is not None:
            self._bucket.spend(self.scope, events, now)

    def wait_s(self, now: float) -> float:
        """Return the time, in seconds, after which `spend` will take events; 0 if it does at `now`."""
        return 0.0 if self._bucket is None else self._bucket.wait_s(now)


ANYBODY: Final = Caller("", lambda _: True)


class Callers:
    """The callers that the rules name; ANYBODY if the rules name none.

    `are_missing` if the rules name sources and no caller: rules that let a webhook in do not let everybody write.
    """

    def __init__(
        self, rules: Iterable[CallerRule], *, tokens: "TokenCallers | None" = None, with_sources: bool = False
    ) -> None:
        """`tokens` has the callers whom JSON Web Tokens name; None if the rules name no issuer."""
        self._by_digest: dict[bytes, Caller] = {}
        for rule in rules:
            self._by_digest.update(dict.fromkeys(map(bytes.fromhex, rule.token_sha256), Caller.of_rule(rule)))
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
