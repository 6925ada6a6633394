"""The checks of each request, whichever API it belongs to: its caller, its address, and the bounds of its body."""

import asyncio
from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Final

from service.contract import PREFIX
from service.core.problems import FORBIDDEN_CALLER, Problem
from service.core.settings import Settings
from service.core.supervision import failure_of
from service.events.strict_json import in_thread
from service.http.caller import Caller
from service.http.callers import Callers
from service.http.certificates import NO_CERTIFICATE, Names
from service.http.encodings import Decoder, coding_of, decode
from service.http.headers import UsedHeaders, check_message, pick
from service.http.rates import RatePending
from service.http.request import Bodies, PostRequest, StopSignal
from service.identity.refusals import JwksPending

# Pieces of a body to decode on the event loop; a longer body is decoded in a thread.
PIECES_AT_ONCE: Final = 2

# What an endpoint does with a request that passed the checks of all requests.
AfterChecks = Callable[[PostRequest, UsedHeaders, Caller], None]
# Answers a request with the problem of an error, in the form of its API, and with more header lines.
Fail = Callable[[PostRequest, Exception, bytes], None]


class RequestGuard:
    """Finds the caller of each request and refuses what no endpoint takes; has the bounds that all endpoints share."""

    def __init__(self, settings: Settings, callers: Callers) -> None:
        self.callers = callers
        self.body_bytes_max = settings.body_bytes_max
        # Of all transports, as `stopping` is.
        self.bodies: Bodies = Bodies(settings.bodies_bytes_max)
        self.stopping: StopSignal = StopSignal()
        self._rules_path = settings.rules
        self._why_loopback = _why_loopback_only(settings.rules, callers)

    def with_callers(self, callers: Callers) -> "RequestGuard":
        """Return the guard of other rules, with the same bounds."""
        other = copy(self)
        other.callers = callers
        other._why_loopback = _why_loopback_only(self._rules_path, callers)
        return other

    def take(self, step: AfterChecks, fail: Fail, post: PostRequest) -> None:
        """Check a POST (caller, address, body), then do the step of its endpoint; `fail` answers the problems."""
        try:
            used = post.used or pick(post.headers)
            caller = self.caller_of(post.client, used, host_needed=post.chunked, certificate=post.certificate)
            post.check_body(self.body_bytes_max)
            if caller.is_rated:
                admit(post, caller)  # before the body is parsed: a caller over its rate costs little
            if b"content-encoding" in used and (coding := coding_of(used)):
                self._decode(post, coding, partial(step, post, used, caller), fail)
            else:
                step(post, used, caller)
        except (JwksPending, RatePending) as wanted:
            post.run_in_task(self._take_later(wanted, step, fail, post))
        except Exception as error:
            fail(post, error, b"")

    async def _take_later(
        self, wanted: JwksPending | RatePending, step: AfterChecks, fail: Fail, post: PostRequest
    ) -> None:
        """Take a request once the keys are read that its token may be signed with, or the caller has its next slice."""
        await wanted.fetched()
        self.take(step, fail, post)

    def _decode(self, post: PostRequest, coding: str, step: Callable[[], None], fail: Fail) -> None:
        """Decode a body, a long one in a thread, then do the step of its request. Raises Problem (400, 413, 503)."""
        decoder = Decoder(coding, self.body_bytes_max)
        decoder.feed(post.body)
        pieces: list[bytes] = []
        for piece in iter(decoder.next, None):
            pieces.append(piece)
            if len(pieces) == PIECES_AT_ONCE:
                post.run_in_task(self._decode_in_thread(post, decoder, pieces, step, fail))
                return
        post.decode(decode(decoder, pieces))
        step()

    async def _decode_in_thread(
        self, post: PostRequest, decoder: Decoder, pieces: list[bytes], step: Callable[[], None], fail: Fail
    ) -> None:
        try:
            post.decode(await in_thread(decode, decoder, pieces))
            step()
        except (Exception, asyncio.CancelledError) as error:
            fail(post, failure_of(error), b"")

    def caller_of(
        self, client: str | None, used: UsedHeaders, *, host_needed: bool, certificate: Names = NO_CERTIFICATE
    ) -> Caller:
        """Return the caller of a request from an address. Raises Problem (400, 401, 403, 501, 503) and JwksPending."""
        self._check_head(client, used, host_needed)
        return self.callers.of(used.get(b"authorization"), certificate)

    async def find_caller(
        self, client: str | None, used: UsedHeaders, *, host_needed: bool, certificate: Names = NO_CERTIFICATE
    ) -> Caller:
        """Return the caller as caller_of does; wait for the keys of an issuer if need be. Raises Problem."""
        self._check_head(client, used, host_needed)
        return await self.callers.find(used.get(b"authorization"), certificate)

    def _check_head(self, client: str | None, used: UsedHeaders, host_needed: bool) -> None:
        """Check what does not depend on the caller. Raises Problem (400, 403, 501).

        An address other than loopback gets 403 if the rules do not say who may write.
        """
        if self._why_loopback and client is not None and not _is_loopback(client):
            raise Problem(FORBIDDEN_CALLER, self._why_loopback)
        if b"host" not in used or b"transfer-encoding" in used:
            check_message(used, host_needed)  # HTTP/1.0 has neither


def admit(post: PostRequest, caller: Caller) -> None:
    """Have the answer say what is left of the caller's rates; raise what Caller.admit does."""
    post.rated = caller
    caller.admit()


def _why_loopback_only(rules_path: str, callers: Callers) -> str:
    """Say why only clients on this machine may write or list topics, and the remedy; "" if the rules say who may."""
    if not rules_path:
        return f"{PREFIX}RULES is not set, so only callers on this machine may write: set it"
    if callers.are_missing:
        return (
            "the rules name sources and no callers, so only callers on this machine may write: "
            "add [[callers]] or [[issuers]]"
        )
    return ""


@lru_cache(maxsize=256)  # the loopback has 16 million addresses
def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a server may take the address from X-Forwarded-For, which a client can forge
        return False
