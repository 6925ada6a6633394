"""Callers whom JSON Web Tokens name. Verified tokens are kept, so that a caller's next request costs a look-up.

`identity.tokens` and its libraries are imported only for rules that name an issuer.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from service.contract import IssuerRule, Rules
from service.core.bounded import Bounded
from service.core.metrics import Telemetry
from service.http.caller import Caller
from service.http.rates import Bucket, Rates
from service.identity.refusals import invalid_token

if TYPE_CHECKING:
    from service.identity.tokens import Globs, Issuers, VerifiedToken

# Verified tokens in memory, by digest, and their bytes.
TOKENS_MAX: Final = 10_000
TOKENS_BYTES_MAX: Final = 16 * 1024 * 1024
# Bytes of one beside its texts: the objects of a caller.
TOKEN_BYTES: Final = 1_000
# Callers whose rate is counted; beyond it, the bucket of the caller that was idle for longest leaves.
BUCKETS_MAX: Final = 10_000
# Topics whose check is cached, of all these callers together: an entry may have 16 KiB of globs.
TOPICS_CACHED: Final = 1_000
# For requests that had begun when the rules changed, and whose token names a key that is still to be read.
ISSUERS_KEPT_S: Final = 30.0


class TokenCaller(Caller):
    """A caller with its token."""

    def __init__(self, identity: "VerifiedToken", buckets: Sequence[Bucket], now: Callable[[], float]) -> None:
        topics = identity.topics
        groups = identity.rule.groups
        super().__init__(identity.scope, lambda topic: _is_in_all(topics, topic), buckets, groups=groups)
        self.expires_s = identity.expires_s
        self._key, self._keys = identity.key, identity.keys
        self._verified_with = identity.keys.version
        self._now = now

    def check_validity(self) -> None:
        """Raise Problem: 401 if the token has expired or its key was withdrawn, 503 if that is not known."""
        if self._now() >= self.expires_s:
            raise invalid_token("exp: the token has expired: send a new one")
        if self._verified_with != self._keys.version:
            self._keys.check(self._key)
            self._verified_with = self._keys.version


class TokenCallers:
    """The callers whom the tokens of some issuers name. All tokens of one caller share its keys and its rate.

    Reads the keys of these issuers from `start` to `close`.
    """

    def __init__(self, issuers: "Issuers", rates: Rates | None = None, now: Callable[[], float] = time.time) -> None:
        self._issuers = issuers
        self._rates = rates or Rates()
        self._now = now
        self._known: Bounded[tuple[TokenCaller, int]] = Bounded(TOKENS_MAX, TOKENS_BYTES_MAX)
        self._buckets: Bounded[Sequence[Bucket]] = Bounded(BUCKETS_MAX, BUCKETS_MAX)

    @classmethod
    def of_rules(
        cls, rules: Rules, telemetry: Telemetry, rates: Rates, before: "TokenCallers | None" = None
    ) -> "TokenCallers | None":
        """Make the callers of the issuers that the rules name; None if they name none.

        `before` are those of earlier rules: keys that are still read from the same place are kept.
        """
        if not rules.issuers:
            return None
        from service.identity.tokens import Issuers

        return cls(Issuers(rules.issuers, telemetry, before=None if before is None else before._issuers), rates)

    def start(self) -> None:
        """Start to read the keys of the issuers."""
        self._issuers.start()

    async def close(self, after: "TokenCallers | None" = None) -> None:
        """Stop reading the keys, but for those that `after` has kept."""
        await self._issuers.close(None if after is None else after._issuers)

    def __len__(self) -> int:
        """The number of verified tokens that are kept."""
        return len(self._known)

    def of(self, token: str, digest: bytes) -> Caller:
        """Return the caller whom a token names; `digest` is that of the token. Raises what Issuers.verify raises."""
        version = self._issuers.version
        known = self._known.get(digest)
        if known is not None:
            caller, verified_with = known
            if verified_with == version and self._now() < caller.expires_s:
                return caller
            self._known.drop(digest)
        identity = self._issuers.verify(token)
        caller = TokenCaller(identity, self._buckets_of(identity.scope, identity.rule), self._now)
        size = TOKEN_BYTES + sum(len(glob) for globs in identity.topics[1:] for glob in globs)
        self._known.put(digest, (caller, version), size)
        return caller

    def _buckets_of(self, scope: str, rule: IssuerRule) -> Sequence[Bucket]:
        """Return the buckets of a caller, which all its tokens share."""
        known = self._buckets.get(scope)
        if known is None:
            known = self._rates.buckets(scope, rule.rate, rule.rate_bytes)
            self._buckets.put(scope, known, 1)
        return known


class CurrentTokenCallers:
    """The callers with tokens by the rules that hold, in `callers`; None while the rules name no issuer."""

    def __init__(self, rules: Rules, telemetry: Telemetry, rates: Rates) -> None:
        self._telemetry = telemetry
        self._rates = rates
        self.callers = TokenCallers.of_rules(rules, telemetry, rates)
        self._closing: set[asyncio.Task[None]] = set()  # callers of earlier rules, whose issuers' keys may be needed

    def start(self) -> None:
        """Start to read the keys of the issuers."""
        if self.callers is not None:
            self.callers.start()

    def make(self, rules: Rules) -> TokenCallers | None:
        """Make the callers of changed rules; new keys are not read before `use`."""
        return TokenCallers.of_rules(rules, self._telemetry, self._rates, self.callers)

    def use(self, callers: TokenCallers | None) -> None:
        """Read the keys of these callers' issuers; those before are kept for ISSUERS_KEPT_S."""
        if callers is self.callers:
            return
        before, self.callers = self.callers, callers
        self.start()
        if before is not None:
            closing = asyncio.create_task(_close_later(before, callers))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Stop reading all keys."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self.callers is not None:
            await self.callers.close()


async def _close_later(callers: TokenCallers, after: TokenCallers | None) -> None:
    """Close callers, but for the keys that `after` has kept, after ISSUERS_KEPT_S, or at once if this is cancelled."""
    try:
        await asyncio.sleep(ISSUERS_KEPT_S)
    finally:
        await callers.close(after)


@lru_cache(maxsize=TOPICS_CACHED)
def _is_in_all(topics: "tuple[Globs, ...]", topic: str) -> bool:
    """Whether a topic matches one glob of each list."""
    return all(any(fnmatchcase(topic, glob) for glob in globs) for globs in topics)
