"""TLS of the HTTP listeners: new connections take the newest certificate, and handshakes are bounded."""

import asyncio
import contextlib
import ssl
import time
from itertools import takewhile
from typing import Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

import structlog

from service.contract import PREFIX
from service.core.file_stamps import Stamp, stamp_of
from service.core.metrics import Telemetry
from service.core.settings import HttpTls

log = structlog.get_logger(__name__)

# The longest time of a handshake. Browsers and libraries need two round trips.
HANDSHAKE_S: Final = 10.0
# Between two looks at the files of the certificate.
LOOK_S: Final = 2.0
# X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not name.
_NO_CHECK_TIME: Final = 0x200000
_AGAIN: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Handshakes:
    """The handshakes that are under way, `most` at a time."""

    def __init__(self, most: int, telemetry: Telemetry) -> None:
        self._most = most
        self._begun: WeakKeyDictionary[ssl.SSLObject, float] = WeakKeyDictionary()  # by time.monotonic
        self._outcomes = {outcome: telemetry.tls.handshakes.labels(outcome) for outcome in ("ok", "failed", "refused")}

    def check(self) -> None:
        """Raise ConnectionRefusedError, which ends the connection, if as many are under way as are allowed."""
        if len(self._begun) >= self._most:
            over = time.monotonic() - HANDSHAKE_S
            # Oldest first. Only those are looked at whose connections have ended: a flood must not cost more each time.
            for each, _ in list(takewhile(lambda handshake: handshake[1] < over, self._begun.items())):
                del self._begun[each]
        if len(self._begun) >= self._most:
            self._outcomes["refused"].inc()
            raise ConnectionRefusedError(f"{len(self._begun)} handshakes are under way")

    def begin(self, connection: ssl.SSLObject) -> None:
        """Note that the handshake of a connection has begun."""
        self._begun[connection] = time.monotonic()

    def end(self, connection: ssl.SSLObject, outcome: str) -> None:
        """Note that the handshake of a connection has ended."""
        self._begun.pop(connection, None)
        self._outcomes[outcome].inc()


class _Connection(ssl.SSLObject):
    """One connection; tells when its handshake has ended."""

    handshakes: Handshakes | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except _AGAIN:
            raise
        except OSError:
            self._end("failed")
            raise
        self._end("ok")

    def _end(self, outcome: str) -> None:
        if self.handshakes is not None:
            self.handshakes.end(self, outcome)
            self.handshakes = None


class ServerTls(ssl.SSLContext):
    """The context that a listener holds: it makes each connection by the context of the newest files."""

    _current: ssl.SSLContext

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, settings: HttpTls, handshakes_max: int, telemetry: Telemetry) -> None:
        """Read the files. Raises OSError."""
        self._settings = settings
        self.telemetry = telemetry
        self._handshakes = Handshakes(handshakes_max, telemetry)
        self._read = stamp_of(settings.files)
        self._take(made_of(settings))

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *more: Any, **named: Any) -> ssl.SSLObject:
        """Begin a connection. Raises ConnectionRefusedError while too many handshakes are under way."""
        self._handshakes.check()
        connection = self._current.wrap_bio(incoming, outgoing, *more, **named)
        assert isinstance(connection, _Connection)
        connection.handshakes = self._handshakes
        self._handshakes.begin(connection)
        return connection

    async def watch(self) -> None:
        """Look at the files, for ever, and take a new certificate when they have changed."""
        seen: Stamp = self._read
        while True:
            await asyncio.sleep(LOOK_S)
            found = await asyncio.to_thread(stamp_of, self._settings.files)
            if found == seen and found != self._read:  # both looks have found the same: they are written
                await self._renew(found)
            seen = found

    async def _renew(self, found: Stamp) -> None:
        """Take the files of this stamp, or say why not and keep those before."""
        try:
            made = await asyncio.to_thread(made_of, self._settings)
        except OSError as error:
            self.telemetry.tls.successful.set(0)
            names = f"{PREFIX}HTTP_TLS_CERTFILE, {PREFIX}HTTP_TLS_KEYFILE, {PREFIX}HTTP_TLS_CLIENT_CAFILE"
            log.error("the new certificate is refused, the one before stays", why=str(error), files=names)
        else:
            self._take(made)
            log.info("new connections have the new certificate", valid_until=made.valid_until)
        self._read = found

    def _take(self, made: "Made") -> None:
        self._current = made.context
        self.telemetry.tls.successful.set(1)
        self.telemetry.tls.valid_until.set(made.valid_until)


class Made(NamedTuple):
    """A context made of files, and when its certificate expires: seconds since the Unix epoch, 0 if unknown."""

    context: ssl.SSLContext
    valid_until: float


def made_of(settings: HttpTls) -> Made:
    """Make the context of one reading of the files. Raises OSError, also for a key of another certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _Connection
    context.minimum_version = settings.least_version
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(settings.certfile, settings.keyfile, password="")
    valid_until = _valid_until(settings)
    if settings.client_cafile:
        context.load_verify_locations(settings.client_cafile)
        context.verify_mode = ssl.CERT_REQUIRED if settings.client_required else ssl.CERT_OPTIONAL
    return Made(context, valid_until)


def _valid_until(settings: HttpTls) -> float:
    """Tell when the certificate expires, by showing it to a client in memory; 0 if the client cannot verify it."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(OSError, ValueError):
        server.load_cert_chain(settings.certfile, settings.keyfile, password="")
        client.check_hostname = False
        client.load_verify_locations(settings.certfile)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        theirs, ours = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
        for side in (theirs, ours, theirs):  # hello, certificate, verified
            with contextlib.suppress(*_AGAIN):
                side.do_handshake()
        shown: Any = theirs.getpeercert()
        return ssl.cert_time_to_seconds(shown["notAfter"])
    return 0.0
