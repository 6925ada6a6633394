"""Callers by their bearer tokens (RFC 6750): the topics that they may write to, and their rates."""

import hashlib
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, NamedTuple

from service.contract import CallerRule
from service.core.problems import FORBIDDEN_TOPIC, RATE_LIMITED, UNAUTHORIZED, Problem
from service.core.settings import TOPICS_MAX
from service.pipeline.checks import UNTOLD, KeyAge

_SCHEME: Final = "bearer "


class Sender(NamedTuple):
    """Who sends an event: the scope of its key, what is told of the key's age, and the quarantine topic of a source."""

    scope: str = ""
    age: KeyAge = UNTOLD
    quarantine: str = ""


class Caller:
    """One caller. `scope` is its name and the namespace of its keys; the empty scope is shared by all callers."""

    def __init__(self, rule: CallerRule | None = None) -> None:
        self.scope = "" if rule is None else rule.name
        self.sender = Sender(self.scope)
        self._rate = None if rule is None else rule.rate
        self._most = max(self._rate or 0.0, 1.0)  # the largest burst, in events
        self._left = self._most  # tokens of the bucket: events; negative after a batch that was larger
        self._at = 0.0  # when `_left` was computed, in seconds of the loop's time
        globs = ("*",) if rule is None else rule.topics
        self._may = lru_cache(maxsize=TOPICS_MAX)(lambda topic: any(fnmatchcase(topic, glob) for glob in globs))

    def may_write_to(self, topic: str) -> bool:
        """Whether the rules let the caller write to the topic."""
        return self._may(topic)

    def check(self, topic: str) -> None:
        """Raise Problem (403) if the rules do not let the caller write to the topic."""
        if not self._may(topic):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {self.scope} may not write to {topic}: the rules say where it may")

    @property
    def burst(self) -> int | None:
        """The most events that the caller may send at once within its rate; None for a caller without a rate."""
        return None if self._rate is None else int(self._most)

    def spend(self, events: int, now: float) -> None:
        """Take events from the token bucket at `now`, in seconds. Raise Problem (429) if the bucket is empty.

        A batch may take more than the bucket has: the caller's later requests wait for longer.
        """
        if self._rate is None:
            return
        now = max(now, self._at)  # a pipelined request is counted later than it arrived
        left = self._tokens(now, self._rate)
        if left < 1:
            wait_s = math.ceil((1 - left) / self._rate)
            raise Problem(RATE_LIMITED, f"{self.scope} may send {self._rate:g} events a second", retry_after_s=wait_s)
        self._left, self._at = left - events, now

    def wait_s(self, now: float) -> float:
        """Return the time, in seconds, after which `spend` will take events; 0 if it does at `now`."""
        if self._rate is None:
            return 0.0
        return max(0.0, (1 - self._tokens(max(now, self._at), self._rate)) / self._rate)

    def _tokens(self, now: float, rate: float) -> float:
        """Return the events in the bucket at `now`, which is not before the last call of `spend`."""
        return min(self._most, self._left + (now - self._at) * rate)


ANYBODY: Final = Caller()


class Callers:
    """The callers that the rules name; ANYBODY if the rules name none.

    `are_missing` if the rules name sources and no caller: rules that let a webhook in do not let everybody write.
    """

    def __init__(self, rules: Iterable[CallerRule], *, with_sources: bool = False) -> None:
        self._by_digest: dict[bytes, Caller] = {}
        for rule in rules:
            self._by_digest.update(dict.fromkeys(map(bytes.fromhex, rule.token_sha256), Caller(rule)))
        self.are_missing = with_sources and not self._by_digest

    def of(self, authorization: str | None) -> Caller:
        """Return the caller that sends this Authorization header. Raises Problem (401)."""
        if not self._by_digest:
            return ANYBODY
        if authorization is None:
            raise Problem(UNAUTHORIZED, "Authorization: send Bearer and your token")
        token = authorization.strip()
        # The look-up is by digest, so that its duration reveals nothing about a token.
        digest = hashlib.sha256(token[len(_SCHEME) :].strip().encode("latin-1")).digest()
        caller = self._by_digest.get(digest) if token[: len(_SCHEME)].lower() == _SCHEME else None
        if caller is None:
            raise Problem(UNAUTHORIZED, "Authorization: this is no token of a caller that the rules name")
        return caller
