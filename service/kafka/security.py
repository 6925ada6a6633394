"""The TLS and SASL options of connections to Kafka: certificates and passwords as their files have them now."""

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any

import structlog
from aiokafka.conn import OAuthAuthenticator, SaslPlainAuthenticator, ScramAuthenticator

from service.contract import PREFIX, SettingsError, SharedSettings, tls_context
from service.core.file_stamps import Stamp, stamp_of
from service.core.logs import Incident
from service.kafka.tokens import TokenRefused, TokenSource, token_source_of

log = structlog.get_logger(__name__)


class Security:
    """The credentials of a new connection, and of the next login on an open one.

    A file that cannot be used when it is read again is logged, and what was read before stays in use: certificate and
    key may be replaced one after the other.
    """

    def __init__(self, settings: SharedSettings, tokens: TokenSource | None = None) -> None:
        """`tokens` is in place of the source that the settings name. Raises OSError where a certificate is unusable."""
        self.tokens = tokens or token_source_of(settings)
        self._settings = settings
        self._password = settings.kafka_sasl_password
        self._stamp: Stamp = ()
        self._context: ssl.SSLContext | None = None
        self._trouble = Incident(log, "a certificate for Kafka cannot be used: what was read before stays in use")
        self._password_trouble = Incident(log, "the password for Kafka cannot be read: the former one stays in use")
        if settings.kafka_tls:
            self._stamp = self._stamp_now()
            self._context = self._new_context()

    def tls_options(self) -> dict[str, Any]:
        """Return a connection's arguments for TLS as they are now; none without TLS."""
        if not self._settings.kafka_tls:
            return {}
        return {"security_protocol": "SSL", "ssl_context": self._current_context()}

    @property
    def mechanism(self) -> str:
        """The SASL mechanism of a login; empty where connections need none."""
        return self._settings.kafka_sasl_mechanism if self._settings.kafka_sasl else ""

    def authenticator(self) -> Any:
        """Return an object that makes the client's messages of one login, from the credentials as they are now.

        Its `step` takes the broker's last message, and returns the next one and a flag, or None after the last.
        """
        if self.tokens is not None:
            return OAuthAuthenticator(sasl_oauth_token_provider=self.tokens)
        credentials = {
            "loop": asyncio.get_running_loop(),
            "sasl_plain_username": self._settings.kafka_sasl_username,
            "sasl_plain_password": self.password,
        }
        if self.mechanism == "PLAIN":
            return SaslPlainAuthenticator(**credentials)
        return ScramAuthenticator(sasl_mechanism=self.mechanism, **credentials)

    @property
    def password(self) -> str:
        """The password, read again if it stands in a file."""
        try:
            self._password = self._settings.secret("kafka_sasl_password")
        except SettingsError as error:
            self._password_trouble.add(error)
        else:
            self._password_trouble.end()
        return self._password

    @property
    def is_ready(self) -> bool:
        """Whether a login needs to wait for nothing but the broker."""
        return self.tokens is None or self.tokens.is_ready

    def prepare(self) -> None:
        """Begin in the background what makes the next login ready."""
        if self.tokens is not None:
            self.tokens.start_renewal()

    def remedy(self, refused: Exception) -> str:
        """Say which settings are wrong where a login is refused, and what to set."""
        settings = self._settings
        if isinstance(refused, TokenRefused):
            names = ("CLIENT_ID", "CLIENT_SECRET", "SCOPE")
            return f"{_one_of('KAFKA_OAUTH_', names)} is wrong ({refused}): set what the token endpoint knows"
        if self.tokens is not None:
            return (
                f"{PREFIX}KAFKA_SASL_MECHANISM=OAUTHBEARER: Kafka at {settings.kafka} refuses the token of "
                f"{self.tokens.name} ({refused!r}): set a source whose issuer, audience and scope the listener expects"
            )
        names = ("USERNAME", "PASSWORD", "MECHANISM")
        return (
            f"{_one_of('KAFKA_SASL_', names)} is wrong (Kafka at {settings.kafka}: {refused!r}): set credentials that "
            "the brokers accept"
        )

    def close(self) -> None:
        """Give up a token that is being fetched."""
        if self.tokens is not None:
            self.tokens.close()

    def _current_context(self) -> ssl.SSLContext | None:
        """Return the TLS context, made again where one of its files was replaced."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            try:
                self._context = self._new_context()
            except OSError as error:
                self._trouble.add(error)
            else:
                self._stamp = stamp
                self._trouble.end()
        return self._context

    def _new_context(self) -> ssl.SSLContext:
        settings = self._settings
        return tls_context(
            settings.kafka_ssl_cafile,
            settings.kafka_ssl_certfile,
            settings.kafka_ssl_keyfile,
            settings.kafka_ssl_check_hostname,
        )

    def _stamp_now(self) -> Stamp:
        settings = self._settings
        files = (settings.kafka_ssl_cafile, settings.kafka_ssl_certfile, settings.kafka_ssl_keyfile)
        return stamp_of(path for path in files if path)


def _one_of(prefix: str, names: Sequence[str]) -> str:
    *first, last = (f"{PREFIX}{prefix}{name}" for name in names)
    return f"{', '.join(first)} or {last}"
