"""The keys of one issuer in memory: read at intervals, and once more when a token names a key that is unknown."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

import structlog

from service.contract import IssuerRule
from service.core.bounded import Bounded
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.problems import NOT_WRITTEN, Problem
from service.core.supervision import supervise
from service.identity.jwks import KID_CHARS_MAX, JwkSet, KeySource, KeysUnreadable, PublicKey
from service.identity.refusals import JwksPending, invalid_token

log = structlog.get_logger(__name__)

# Between the beginnings of two fetches for unknown keys or wrong signatures: tokens that anybody can make must not
# become a storm.
REFETCH_LEAST_S: Final = 5.0
# After a failed fetch. Then a token with an unknown key, or the period, makes the next one.
FAILED_PAUSE_S: Final = 5.0
# Keys that cannot be read again are trusted for so long: a key that the issuer has withdrawn must not live for ever.
KEPT_S: Final = 24 * 3600.0
# Ids of keys that the issuer does not have, and their characters.
ABSENT_MAX: Final = 1_000
ABSENT_CHARS_MAX: Final = 64 * 1024

Wanted = tuple[str | None, str]
"""The id of a key, if a token names one, and its algorithm."""


class IssuerKeys:
    """The keys of one issuer. `version` grows with each change, which ends what was verified with earlier keys."""

    def __init__(
        self,
        rule: IssuerRule,
        source: KeySource,
        telemetry: Telemetry,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = 0
        self._name = rule.name
        self._source = source
        self._now = now
        self._telemetry = telemetry
        self._fetches = telemetry.issuer_fetches
        self._keeping: asyncio.Task[None] | None = None
        self._is_closed = False
        self._keys: JwkSet | None = None
        self._content = b""  # from which they were parsed
        self._read_at = -math.inf
        self._fetch: asyncio.Task[None] | None = None  # under way, or the last one
        self._failed = ""  # why the last fetch failed; empty after a success
        self._next_at = -math.inf  # when a fetch for an unknown key may begin
        self._absent: Bounded[bool] = Bounded(ABSENT_MAX, ABSENT_CHARS_MAX)
        self._trouble = Incident(log, "the keys of an issuer cannot be read", now)

    def find(self, kid: str | None, algorithm: str) -> PublicKey:
        """Find the key that a token names.

        Raises JwksPending if the key may be among those that are being fetched; else Problem: 401 for a key that the
        issuer surely does not have, 503 if that is not known.
        """
        key = None if self._keys is None else self._keys.find(kid, algorithm)
        if key is not None:
            return key
        if kid is not None and len(kid) > KID_CHARS_MAX:
            raise invalid_token(f"kid: it has more than {KID_CHARS_MAX} characters")
        self.read_again((kid, algorithm))
        if kid is None and self._keys is not None:
            raise invalid_token(
                f"kid: the token names no key, and the issuer {self._name} has several, or another type"
            )
        if not self._failed and self._absent.get((kid, algorithm)):
            raise invalid_token(f"kid: the issuer {self._name} has no key of this id and type")
        why = f"cannot be read: {self._failed}" if self._failed else "were read a moment ago, without the token's key"
        raise Problem(
            NOT_WRITTEN,
            f"Authorization: the keys of the issuer {self._name} {why}",
            max(1, math.ceil(self._next_at - self._now())),
        )

    def check(self, key: PublicKey) -> None:
        """Raise Problem for a key that was found earlier: 401 if it has been withdrawn, 503 if that is not known."""
        if self._keys is None:
            raise Problem(NOT_WRITTEN, f"Authorization: the keys of the issuer {self._name} cannot be read")
        if not self._keys.has(key):
            raise invalid_token(f"kid: the issuer {self._name} has withdrawn the token's key: send a new token")

    def read_again(self, wanted: Wanted | None = None) -> None:
        """Raise JwksPending if keys are being fetched, or such a fetch may begin; begin it then.

        Also for a wrong signature: without an id, or with one that is used again, it may be that of a newer key. Raises
        Problem (503) after `close`, for a request that began under earlier rules: sent again, it meets the new ones.
        """
        if self._is_closed:
            why = f"the rules of the issuer {self._name} have changed meanwhile: send the request again"
            raise Problem(NOT_WRITTEN, f"Authorization: {why}")
        if self._fetch is not None and not self._fetch.done():
            raise self._wanted(self._fetch)
        if self._now() >= self._next_at:
            raise self._wanted(self._begin(wanted))

    def start(self) -> None:
        """Read the keys at intervals from now on, if they are not already."""
        if self._keeping is None:
            self._keeping = supervise("issuer-keys", self.keep, self._telemetry)

    async def keep(self) -> None:
        """Read the keys at intervals, for ever."""
        while True:
            fetch = self._fetch
            if fetch is None or fetch.done():
                fetch = self._begin(None)
            await asyncio.wait({fetch})
            await asyncio.sleep(FAILED_PAUSE_S if self._failed else self._source.period_s)

    async def close(self) -> None:
        """Stop reading the keys, and cancel a fetch that is under way. Known keys are found on, no others."""
        self._is_closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._fetch is not None:
            self._fetch.cancel()
            await asyncio.wait({self._fetch})

    def _wanted(self, fetch: asyncio.Task[None]) -> JwksPending:
        return JwksPending(f"Authorization: the keys of the issuer {self._name} are being read", fetch)

    def _begin(self, wanted: Wanted | None) -> asyncio.Task[None]:
        """Begin a fetch; if the wanted key is not in its result, the issuer does not have it."""
        self._next_at = self._now() + REFETCH_LEAST_S
        self._fetch = asyncio.create_task(self._read(wanted), name=f"keys of {self._name}")
        return self._fetch

    async def _read(self, wanted: Wanted | None) -> None:
        try:
            content, keys = await self._source.keys()
            self._take(content, keys)
        except KeysUnreadable as error:
            self._fail(error)
        except Exception as error:  # a bug: tokens must not wait for ever
            self._fail(error, bug=True)
        else:
            if self._failed:
                log.info("the keys of an issuer can be read again", issuer=self._name, **self._trouble.end())
            self._failed = ""
            self._fetches.labels(self._name, "ok").inc()
            if wanted is not None and keys.find(*wanted) is None:
                self._absent.put(wanted, True, len(wanted[0] or ""))

    def _take(self, content: bytes, keys: JwkSet) -> None:
        """Take keys in place of the present ones."""
        self._read_at = self._now()
        if self._keys is not None and content == self._content:
            return
        self._keys, self._content = keys, content
        self.version += 1
        if keys.left_out:
            log.warning("keys of an issuer are left out", issuer=self._name, why="; ".join(keys.left_out[:5]))
        if not keys:
            log.error("the issuer has no keys: none of its tokens is taken", issuer=self._name)

    def _fail(self, error: Exception, *, bug: bool = False) -> None:
        self._failed = str(error) or type(error).__name__
        self._next_at = self._now() + FAILED_PAUSE_S
        self._trouble.add(error, bug=bug, issuer=self._name)
        self._fetches.labels(self._name, "failed").inc()
        if self._keys is not None and self._now() > self._read_at + KEPT_S:
            self._keys = None
            self.version += 1
            log.error("the keys of an issuer are too old, and not trusted any more", issuer=self._name)
