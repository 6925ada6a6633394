"""A connection to a broker, which logs in again before its session ends, with a fast path for some requests.

A broker with `connections.max.reauth.ms`, or with tokens that end, tells at each login how long the session lasts, and
ends a connection that sends a request later without another login (KIP-368). Another login is two requests or three on
the same connection, between other requests. aiokafka implements the first login only; here both are the same one.

Requests in protocol.CODECS are encoded and decoded there, and ResponseReader splits the received bytes into responses
in `data_received`, without aiokafka's reader task.
"""

import asyncio
import io
import math
import random
import socket
import struct
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog
from aiokafka import errors
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.admin import ApiVersionRequest, SaslAuthenticateRequest, SaslHandShakeRequest

from service.kafka.deadline import shared
from service.kafka.protocol import CODECS, ApiCodec
from service.kafka.security import Security
from service.kafka.tokens import TokenRefused

log = structlog.get_logger(__name__)

# Errors of a connection that cannot be opened; TimeoutError is an OSError, ValueError is one of SCRAM.
UNREACHABLE: Final = (errors.KafkaError, OSError, ValueError)
# Errors of a response that is malformed or truncated.
BROKEN: Final = (errors.KafkaError, OSError, ValueError, struct.error)
_SIZE_BYTES: Final = 4
# Correlation ids of requests that have codecs; aiokafka counts those of its own requests from 1.
_CORRELATION_ID_LEAST: Final = 2**30
_CORRELATION_IDS: Final = 2**30
# Larger requests are written in pieces instead of being copied into one buffer.
_JOINED_MOST_BYTES: Final = 32 * 1024
# A firewall may drop an idle connection without a reset. A connection that was idle for longer is therefore probed
# with an ApiVersions request before its next use, and replaced where no response comes in time.
IDLE_S: Final = 5.0
# TCP keepalive while a connection is idle (s), which also keeps firewall state alive, and the time (ms) after which
# the kernel ends a connection whose packets are not acknowledged. A slow broker still acknowledges packets.
TCP_OPTIONS: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4_000}

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

    `transport` is there once the connection is open.
    """

    transport: asyncio.WriteTransport

    def __init__(
        self, host: str, port: int, security: Security, *, client_id: str = "aiokafka", **options: Any
    ) -> None:
        super().__init__(host, port, client_id=client_id, **options, **security.tls_options())
        self._security = security
        self._own_id = client_id.encode()
        self._requests_sent = 0  # that have codecs
        self._new_future = asyncio.get_running_loop().create_future
        self.renew_at = math.inf  # from when on the session is renewed as soon as no transaction is open
        self.ends_at = math.inf  # from when on nothing else may be sent
        self.versions: dict[int, tuple[int, int]] = {}  # the least and the last one of each API, by its key
        self.transaction_version = 0  # the finalized level of transaction.version, as the broker reported; 0: not asked
        # A probe, or the re-authentication of KIP-368; nothing else is sent meanwhile.
        self.check_task: asyncio.Task[None] | None = None

    async def connect(self) -> Any:
        """Open the connection, and log in. Raises KafkaError, OSError, and ValueError of SCRAM."""
        reader, writer = await super().connect()
        self.transport = writer.transport
        if self._security.mechanism:
            try:
                await self._log_in()
            except BaseException:
                self.close(CloseReason.AUTH_FAILURE)
                raise
        return reader, writer

    def send(self, request: Any, expect_response: bool = True) -> Coroutine[Any, Any, Any]:
        """Write a request; returns a coroutine that awaits its response. Raises KafkaError."""
        try:
            response: Coroutine[Any, Any, Any] = super().send(request, expect_response)
        except errors.KafkaError:  # which is a RuntimeError
            raise
        except RuntimeError as error:  # of uvloop: the transport has ended, which aiokafka hears of some steps later
            self.close(CloseReason.CONNECTION_BROKEN, error)
            raise errors.KafkaConnectionError(f"{self} has just ended") from error
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

    def abort(self) -> Any:
        """Close the connection without waiting for unsent data; returns a future of its end.

        A TLS shutdown waits for the broker's close_notify, which uvloop may miss: it then waits for 30 s.
        """
        ended = self.close(CloseReason.SHUTDOWN)
        self.transport.abort()
        return ended

    # ------------------------------------------------------------------------------------------------------- checks

    @property
    def is_open(self) -> bool:
        """Whether the connection can be written to; after a reset, `connected()` alone notices some steps later."""
        return self.connected() and not self.transport.is_closing()

    def is_idle(self, now: float) -> bool:
        """Whether no response is pending, and none has come for IDLE_S."""
        return not self._requests and now - self._last_action > IDLE_S

    async def check_once(self, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `probe` or `renew`, or await the one that runs already. The connection may be closed by it."""
        if self.check_task is None:
            self.check_task = asyncio.create_task(check())
            self.check_task.add_done_callback(self._end_check)
        await shared(self.check_task)

    def _end_check(self, _: asyncio.Task[None]) -> None:
        self.check_task = None

    async def probe(self, timeout_s: float) -> None:
        """Close the connection if an ApiVersions request is not answered in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(ApiVersionRequest())
        except (errors.KafkaError, OSError) as error:  # TimeoutError is an OSError
            self.close(CloseReason.IDLE_DROP, error)

    def enable_keepalive(self) -> None:
        """Set TCP_OPTIONS on the socket."""
        connected = self.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in TCP_OPTIONS.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system has every option
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    async def renew(self) -> None:
        """Log in again. Where that fails, the connection is closed, and the one that replaces it logs in again.

        An idle connection, which may be dead, is closed at once. Without a new token the renewal is postponed, for as
        long as the session lasts.
        """
        now = time.monotonic()
        if self.is_idle(now):
            self.close(CloseReason.IDLE_DROP)
            return
        if not self._security.is_ready and now < self.ends_at:
            self._security.prepare()
            self.renew_at = min(now + POSTPONED_S, self.ends_at)
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

    # ------------------------------------------------------------------------------------------------- the fast path

    def try_send(self, request: Any) -> asyncio.Future[Any] | None:
        """Write a request; returns a future of its response.

        Returns None for a request without a codec, and where the broker does not support the codec's version.
        """
        codec = CODECS.get(type(request))
        if codec is None:
            return None
        least, most = self.versions.get(codec.api_key, (0, -1))
        if not least <= codec.version <= most:
            return None
        self._requests_sent += 1
        correlation_id = _CORRELATION_ID_LEAST + self._requests_sent % _CORRELATION_IDS
        size, pieces = codec.frame(request, correlation_id, self._own_id)
        if size <= _JOINED_MOST_BYTES:
            self.transport.write(b"".join(pieces))
        else:
            self.transport.writelines(pieces)
        response = self._new_future()
        self._requests.append((correlation_id, codec, response))
        return response

    def take_response(self, frame: bytes) -> None:
        """Match a response to the oldest request, in whose order a broker answers. Any fault ends the connection."""
        try:
            correlation_id, request, response = self._requests[0]
            if int.from_bytes(frame[:4], "big") != correlation_id:
                raise errors.CorrelationIdError(f"the response is not to request {correlation_id}")
            if not response.done():  # done: its caller has cancelled it
                response.set_result(request.decode(frame) if isinstance(request, ApiCodec) else _decode(request, frame))
            self._last_action = time.monotonic()
            self._requests.popleft()
        except Exception as error:  # after any error, later responses cannot be matched to their requests
            if not isinstance(error, BROKEN):
                log.exception("bug: a response of Kafka could not be read")
            self.close(CloseReason.OUT_OF_SYNC, error)


def _decode(request: Any, frame: bytes) -> Any:
    """Decode the response to one of aiokafka's own requests."""
    content = io.BytesIO(frame)
    request.parse_response_header(content)
    return request.RESPONSE_TYPE.decode(content)


class ResponseReader(asyncio.Protocol):
    """Reads a connection's responses in place of aiokafka's stream, which still gets EOF and connection_lost.

    Holds the connection weakly, as aiokafka's reader does: an unreferenced connection is collected and so closed.
    """

    def __init__(self, connection: Connection, stream: Any) -> None:
        self._connection = weakref.ref(connection)
        self._stream = stream
        self._parts: list[bytes] = []
        self._have = 0
        self._need = _SIZE_BYTES  # bytes to receive before another response can be complete

    @classmethod
    def of(cls, connection: Connection) -> None:
        """Install a ResponseReader on a connection that has none."""
        stream = connection.transport.get_protocol()
        if not isinstance(stream, cls):
            connection.transport.set_protocol(cls(connection, stream))

    def data_received(self, data: bytes) -> None:
        if not self._parts and len(data) == _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big"):
            self._take(data[_SIZE_BYTES:])  # the usual case: exactly one response
            return
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        whole = data if len(self._parts) == 1 else b"".join(self._parts)
        start, self._need = 0, _SIZE_BYTES
        while len(whole) - start >= _SIZE_BYTES:
            size = int.from_bytes(whole[start : start + _SIZE_BYTES], "big")
            end = start + _SIZE_BYTES + size
            if end > len(whole):
                self._need = end - start
                break
            self._take(whole[start + _SIZE_BYTES : end])
            start = end
        rest = whole[start:]
        self._parts, self._have = [rest] if rest else [], len(rest)

    def _take(self, frame: bytes) -> None:
        connection = self._connection()
        if connection is not None and connection.connected():  # not closed by an earlier response, nor collected
            connection.take_response(frame)

    def eof_received(self) -> bool | None:
        return self._stream.eof_received()  # type: ignore[no-any-return]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()
