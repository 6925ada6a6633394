"""Who calls, by its bearer token (RFC 6750); what it may write, and how fast."""

import hashlib
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from service.contract import CallerRule
from service.core.problems import FORBIDDEN_TOPIC, RATE_LIMITED, UNAUTHORIZED, Problem
from service.core.settings import TOPICS_MAX

_SCHEME: Final = "bearer "


class Caller:
    """One caller; `scope` is its name, within which its keys are its own. The empty scope is everybody's."""

    def __init__(self, rule: CallerRule | None = None) -> None:
        self.scope = "" if rule is None else rule.name
        self._rate = None if rule is None else rule.rate
        self._most = max(self._rate or 0.0, 1.0)  # events at once
        self._left = self._most  # events that may come now; below 0 after a batch that was larger
        self._at = 0.0  # when it was so, by the loop's time
        globs = ("*",) if rule is None else rule.topics
        self._may = lru_cache(maxsize=TOPICS_MAX)(lambda topic: any(fnmatchcase(topic, glob) for glob in globs))

    def check(self, topic: str) -> None:
        """Raises Problem (403) for a topic that is none of its business."""
        if not self._may(topic):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {self.scope} may not write to {topic}: the rules say where it may")

    def spend(self, events: int, now: float) -> None:
        """Count events against the rate. Raises Problem (429), and counts nothing, where it is used up.

        A batch may be larger than what is left: what comes after it waits for longer.
        """
        if self._rate is None:
            return
        now = max(now, self._at)  # one that was pipelined may have waited while others passed
        left = min(self._most, self._left + (now - self._at) * self._rate)
        if left < 1:
            wait_s = math.ceil((1 - left) / self._rate)
            raise Problem(RATE_LIMITED, f"{self.scope} may send {self._rate:g} events a second", retry_after_s=wait_s)
        self._left, self._at = left - events, now


ANYBODY: Final = Caller()


class Callers:
    """The callers of the rules; anybody, where the rules name none."""

    def __init__(self, rules: Iterable[CallerRule]) -> None:
        self._by_digest: dict[bytes, Caller] = {}
        for rule in rules:
            self._by_digest.update(dict.fromkeys(map(bytes.fromhex, rule.token_sha256), Caller(rule)))

    def of(self, authorization: str | None) -> Caller:
        """Who sends this header. Raises Problem (401)."""
        if not self._by_digest:
            return ANYBODY
        if authorization is None:
            raise Problem(UNAUTHORIZED, "Authorization: send Bearer and your token")
        token = authorization.strip()
        # Looked up by digest: how long that takes tells nothing of a token.
        digest = hashlib.sha256(token[len(_SCHEME) :].strip().encode("latin-1")).digest()
        caller = self._by_digest.get(digest) if token[: len(_SCHEME)].lower() == _SCHEME else None
        if caller is None:
            raise Problem(UNAUTHORIZED, "Authorization: this is no token of a caller that the rules name")
        return caller
