"""A connection that logs in, and logs in again before its session ends (KIP-368).

A broker with `connections.max.reauth.ms`, or with tokens that end, tells at each login how long the session lasts, and
ends a connection that sends a request later without another login. Another login is two requests or three on the same
connection, between other requests. aiokafka implements the first login only; here both are the same one.
"""

import asyncio
import math
import random
import time
from collections.abc import Coroutine
from typing import Any, Final

from aiokafka import errors
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.admin import ApiVersionRequest, SaslAuthenticateRequest, SaslHandShakeRequest

from service.kafka.security import Security
from service.kafka.tokens import TokenRefused

# A session is renewed after a share of its time between these two, so that connections do not all log in at once.
RENEW_SHARES: Final = (0.80, 0.90)
# After this share it is renewed before any request, also amid a transaction, whose next request would else be lost.
ENDS_SHARE: Final = 0.95
# Kafka refuses a login that follows another one on the same connection within a second.
AGAIN_LEAST_S: Final = 1.1
# The pause until a renewal is tried again that had no token yet.
POSTPONED_S: Final = 0.1
# For the token and the login.
RENEW_TIMEOUT_S: Final = 6.0

# Login errors that a retry does not change.
LOGIN_ERRORS: Final = (errors.SaslAuthenticationFailed, errors.UnsupportedSaslMechanismError, TokenRefused)
# RFC 7628, section 3.2.3: the client's part of a refused login, after which the broker sends the error.
_REFUSAL_READ: Final = b"\x01"


class Connection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka ships no types
    """A connection to a broker. Times are by time.monotonic, and infinite if the session has no end.

    `writer` is there once the connection is open.
    """

    writer: asyncio.StreamWriter

    def __init__(self, host: str, port: int, security: Security, **options: Any) -> None:
        super().__init__(host, port, **options, **security.tls_options())
        self._security = security
        self.renew_at = math.inf  # from when on the session is renewed as soon as no transaction is open
        self.ends_at = math.inf  # from when on nothing else may be sent
        self.versions: dict[int, tuple[int, int]] = {}  # the least and the last one of each API, by its key
        self.transaction_version = 0  # the finalized level of transaction.version, as the broker reported; 0: not asked
        # A probe, or the re-authentication of KIP-368; nothing else is sent meanwhile.
        self.check: asyncio.Task[None] | None = None

    async def connect(self) -> Any:
        """Open the connection, and log in. Raises KafkaError, OSError, and ValueError of SCRAM."""
        reader, self.writer = await super().connect()
        if self._security.mechanism:
            try:
                await self._log_in()
            except BaseException:
                self.close(CloseReason.AUTH_FAILURE)
                raise
        return reader, self.writer

    def send(self, request: Any, expect_response: bool = True) -> Coroutine[Any, Any, Any]:
        response: Coroutine[Any, Any, Any] = super().send(request, expect_response)
        return self._note_versions(response) if isinstance(request, ApiVersionRequest) else response

    async def _note_versions(self, response: Coroutine[Any, Any, Any]) -> Any:
        answer = await response
        self.versions = {api_key: (least, most) for api_key, least, most in answer.api_versions}
        return answer

    async def _log_in(self) -> None:
        """Log in by SASL, and note the end of the session. Raises KafkaError, OSError, and ValueError of SCRAM."""
        mechanism = self._security.mechanism
        handshake = await self.send(SaslHandShakeRequest(mechanism))
        if handshake.error_code:
            kind = errors.for_code(handshake.error_code)
            raise kind(f"{mechanism} is refused: the broker has {', '.join(handshake.enabled_mechanisms) or 'none'}")
        authenticator, challenge, lifetime_ms = self._security.authenticator(), None, 0
        sent_at = time.monotonic()
        while (step := await authenticator.step(challenge)) is not None:
            message, _ = step
            sent_at = time.monotonic()
            answer = await self._authenticate(message)
            challenge = answer.sasl_auth_bytes
            lifetime_ms = getattr(answer, "session_lifetime_ms", 0)  # from version 1 on
        self._note_session(sent_at, lifetime_ms)

    async def _authenticate(self, message: bytes) -> Any:
        """Send a message of the login; returns the response. Raises KafkaError where the broker refuses it."""
        answer = await self.send(SaslAuthenticateRequest(message))
        if not answer.error_code and answer.sasl_auth_bytes and self._security.tokens is not None:
            answer = await self.send(SaslAuthenticateRequest(_REFUSAL_READ))
        if answer.error_code:
            raise errors.for_code(answer.error_code)(answer.error_message)
        return answer

    def _note_session(self, since: float, lifetime_ms: int) -> None:
        """Note a session that began no earlier than `since`; 0: it has no end."""
        self.renew_at = self.ends_at = math.inf
        if lifetime_ms > 0:
            lifetime_s = lifetime_ms / 1000
            share = random.uniform(*RENEW_SHARES)  # noqa: S311
            self.renew_at = since + max(share * lifetime_s, AGAIN_LEAST_S)
            self.ends_at = since + max(ENDS_SHARE * lifetime_s, AGAIN_LEAST_S)

    def close(self, reason: CloseReason | None = None, exc: BaseException | None = None) -> Any:
        self.renew_at = self.ends_at = math.inf
        return super().close(reason, exc)

    async def renew(self) -> None:
        """Log in again. Where that fails, the connection is closed, and the one that replaces it logs in anew.

        Without a new token the renewal is postponed, for as long as the session lasts.
        """
        if not self._security.is_ready and time.monotonic() < self.ends_at:
            self._security.prepare()
            self.renew_at = min(time.monotonic() + POSTPONED_S, self.ends_at)
            return
        try:
            async with asyncio.timeout(RENEW_TIMEOUT_S):
                if self._security.tokens is not None:
                    await self._security.tokens.token()  # before the broker waits for it
                await self._log_in()
        except (errors.KafkaError, OSError, ValueError) as error:  # OSError: also TimeoutError; ValueError: of SCRAM
            self.close(CloseReason.AUTH_FAILURE, error)
        except BaseException:  # the broker may wait for the rest of a login
            self.close(CloseReason.AUTH_FAILURE)
            raise
