"""One caller: the scope of its keys, the topics that it may write to, and its rates."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, NamedTuple

from service.contract import CallerRule
from service.core.problems import FORBIDDEN_GROUP, FORBIDDEN_TOPIC, Problem
from service.core.settings import TOPICS_MAX
from service.http.rates import BYTES, EVENTS, Bucket, Rates, rate_lines
from service.pipeline.key_checks import UNKNOWN_AGE, KeyAge


class Sender(NamedTuple):
    """The sender of an event: the scope of its key, the age of the key, and the quarantine topic of a source."""

    scope: str = ""
    age: KeyAge = UNKNOWN_AGE
    quarantine: str = ""


class Caller:
    """One caller. `scope` is its name and the namespace of its keys; the empty scope is shared by all callers."""

    def __init__(
        self,
        scope: str,
        may_write_to: Callable[[str], bool],
        buckets: Sequence[Bucket] = (),
        rule: CallerRule | None = None,
        groups: Sequence[str] = (),
    ) -> None:
        """`buckets` count what the caller sends, perhaps under several tokens; none for a caller without a rate.

        `rule` is that of a caller whom the rules name. `groups`: globs of the groups whose offsets the caller commits.
        """
        self.scope = scope
        self._groups = groups
        self.sender = Sender(scope)
        self.may_write_to = may_write_to  # whether the rules let the caller write to a topic
        self._buckets = tuple(buckets)
        self.is_rated = bool(buckets)
        self._rule = rule

    @classmethod
    def of_rule(cls, rule: CallerRule, rates: Rates | None = None) -> "Caller":
        """Make the caller of a rule, with buckets of its own among `rates`."""
        globs = rule.topics
        may = lru_cache(maxsize=TOPICS_MAX)(lambda topic: any(fnmatchcase(topic, glob) for glob in globs))
        return cls(rule.name, may, (rates or Rates()).buckets(rule.name, rule.rate, rule.rate_bytes), rule, rule.groups)

    def for_changed_rule(self, rule: CallerRule, rates: Rates | None = None) -> "Caller":
        """Return the caller of a changed rule: this one, with what is left of its rate, if only credentials changed."""
        is_same = self._rule is not None and _without_credentials(self._rule) == _without_credentials(rule)
        return self if is_same else Caller.of_rule(rule, rates)

    def check(self, topic: str) -> None:
        """Raise Problem (403) if the rules do not let the caller write to the topic."""
        if not self.may_write_to(topic):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {self.scope} may not write to {topic}: the rules say where it may")

    def check_group(self, group: str) -> None:
        """Raise Problem (403) if the rules do not let the caller commit the offsets of a group."""
        if not any(fnmatchcase(group, glob) for glob in self._groups):
            why = f"{self.scope} may not commit for {group}: the groups of its rule say for which it may"
            raise Problem(FORBIDDEN_GROUP, f"offsets.group: {why}")

    def check_validity(self) -> None:
        """Raise Problem (401, 503) if the caller's token is not valid any more. A stream checks each window."""

    @property
    def burst(self) -> int | None:
        """The most events that the caller may send at once within its rate; None without such a rate."""
        return self._burst_of(EVENTS)

    @property
    def burst_bytes(self) -> int | None:
        """The most bytes of bodies that the caller may send at once within its rate; None without such a rate."""
        return self._burst_of(BYTES)

    def _burst_of(self, unit: str) -> int | None:
        return next((int(bucket.burst) for bucket in self._buckets if bucket.unit == unit), None)

    def admit(self) -> None:
        """Raise Problem (429) if the caller is over a rate, and RatePending if this process does not know."""
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


def _without_credentials(rule: CallerRule) -> CallerRule:
    return replace(rule, token_sha256=(), certificates=())


ANYBODY: Final = Caller("", lambda _: True, groups=("*",))
