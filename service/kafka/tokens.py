"""Tokens for SASL OAUTHBEARER (RFC 7628): from a token endpoint, from a file, or signed for Amazon MSK.

A token is cached until RENEW_SHARE of its life has passed. Then a new one is fetched in the background, and the cached
one stays in use until it ends, also while the endpoint is away.
"""

import asyncio
import base64
import binascii
import json
import math
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote_plus, urlsplit

import httpx
import structlog
from aiokafka import errors
from aiokafka.abc import AbstractTokenProvider

from service.contract import SettingsError, SharedSettings, tls_context
from service.core.logs import Incident
from service.core.shared_task import unwaited
from service.kafka.deadline import shared

log = structlog.get_logger(__name__)

# A new token is fetched after this share of its life, before the connections log in again (`login.RENEW_SHARES`).
RENEW_SHARE: Final = 0.75
# A token that ends sooner is not used: a session of SASL ends with its token.
LEFT_LEAST_S: Final = 2.0
# The deadline of a fetch, and the pause after one: tokens of a short life make no storm of fetches.
FETCH_TIMEOUT_S: Final = 5.0
FETCH_PAUSE_S: Final = 1.0
# The life of a token whose response does not tell it (RFC 6749, section 5.1), or tells one that has no end or is over.
LIFE_UNKNOWN_S: Final = 60.0
ANSWER_BYTES_MAX: Final = 64 * 1024
DETAIL_CHARS: Final = 300
# RFC 6750, section 2.1. Control characters would end the message of the mechanism.
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
# Errors of a token endpoint (RFC 6749, section 5.2) that a retry does not change.
_REFUSALS: Final = (400, 401, 403)


class TokenError(errors.KafkaConnectionError):  # type: ignore[misc]  # aiokafka ships no types
    """There is no token for a login: Kafka is away."""


class TokenRefused(TokenError):
    """The token endpoint refuses the client; a retry does not change that."""


class Token(NamedTuple):
    """A token, from when on a new one is fetched, and when it ends, both by time.monotonic."""

    value: str
    renew_at: float
    ends_at: float


class TokenSource(AbstractTokenProvider):  # type: ignore[misc]
    """Gives the token for each login of a connection. `name` says where the tokens come from."""

    def __init__(self, name: str, extensions: Mapping[str, str]) -> None:
        self.name = name
        self._extensions = dict(extensions)

    def extensions(self) -> dict[str, str]:
        """Return the SASL extensions that go with each token."""
        return self._extensions

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `token` returns at once a token that is not due for renewal."""

    def start_renewal(self) -> None:
        """Begin to fetch a token in the background, unless that is under way."""

    @abstractmethod
    async def token(self) -> str:
        """Return a token. Raises TokenError."""

    def close(self) -> None:
        """Give up what is under way."""


class TokenFile(TokenSource):
    """Reads the token from a file at each login; who mounts the file replaces it before the token ends."""

    def __init__(self, path: str, extensions: Mapping[str, str]) -> None:
        super().__init__(f"the token file {path}", extensions)
        self._path = Path(path)

    @property
    def is_ready(self) -> bool:
        try:
            self._read()
        except TokenError:
            return False
        return True

    async def token(self) -> str:
        return self._read()

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                text = file.read(ANSWER_BYTES_MAX).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"{self.name} cannot be read: {error}") from error
        return _checked(text, self.name)


class CachedSource(TokenSource):
    """Keeps a token that has a known end. One fetch is under way at a time, and is shared by all who wait."""

    def __init__(self, name: str, extensions: Mapping[str, str]) -> None:
        super().__init__(name, extensions)
        self._token: Token | None = None
        self._fetching: asyncio.Task[Token] | None = None
        self._failure: TokenError | None = None  # of the last fetch
        self._not_before = 0.0  # by time.monotonic: no fetch until then
        self._trouble = Incident(log, "no new token for Kafka")

    @abstractmethod
    async def fetch(self) -> Token:
        """Get a new token. Raises TokenError; any other error becomes one."""

    @property
    def is_ready(self) -> bool:
        return self._token is not None and time.monotonic() < self._token.renew_at

    def start_renewal(self) -> None:
        if (self._fetching is None or self._fetching.done()) and time.monotonic() >= self._not_before:
            self._fetching = asyncio.create_task(self._renew(), name="kafka-token")
            self._fetching.add_done_callback(unwaited)

    async def token(self) -> str:
        if not self.is_ready:
            self.start_renewal()
        if self._token is not None and time.monotonic() < self._token.ends_at - LEFT_LEAST_S:
            return self._token.value
        if self._fetching is None or (self._fetching.done() and self._failure is not None):
            raise self._failure or TokenError(f"{self.name}: no token yet")
        return (await shared(self._fetching)).value

    async def _renew(self) -> Token:
        """Fetch a token and cache it. Raises TokenError."""
        try:
            self._token = await self._fetch_in_time()
        except TokenError as error:
            self._failure, self._not_before = error, time.monotonic() + FETCH_PAUSE_S
            self._trouble.add(error)
            raise
        self._failure, self._not_before = None, time.monotonic() + FETCH_PAUSE_S
        if failures := self._trouble.end():
            log.info("there is a new token for Kafka again", **failures)
        return self._token

    async def _fetch_in_time(self) -> Token:
        """Fetch a token within FETCH_TIMEOUT_S. Raises TokenError."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await self.fetch()
        except TokenError:
            raise
        except Exception as error:  # another error would end a task of aiokafka's, and have no pause
            raise TokenError(f"{self.name}: {shortened(str(error) or repr(error))}") from error

    def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()


class ClientCredentials(CachedSource):
    """Asks a token endpoint by the grant `client_credentials` (RFC 6749, section 4.4), with HTTP's Basic login."""

    def __init__(self, settings: SharedSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` is in place of connections."""
        super().__init__(
            f"the token endpoint {settings.kafka_oauth_token_url}", settings.kafka_oauth_extensions_by_name
        )
        self._settings = settings
        self._transport = transport

    async def fetch(self) -> Token:
        settings = self._settings
        secure = urlsplit(settings.kafka_oauth_token_url).scheme == "https"
        # In a thread, because reading the system's authorities takes milliseconds.
        verify = await asyncio.to_thread(tls_context, settings.kafka_oauth_cafile, "", "") if secure else False
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        body = {"grant_type": "client_credentials"}
        if settings.kafka_oauth_scope:
            body["scope"] = settings.kafka_oauth_scope
        began = time.monotonic()
        try:
            async with (
                httpx.AsyncClient(
                    headers=headers, verify=verify, transport=self._transport, timeout=FETCH_TIMEOUT_S
                ) as client,
                client.stream("POST", settings.kafka_oauth_token_url, data=body, auth=self._login()) as response,
            ):
                content = b""
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > ANSWER_BYTES_MAX:
                        raise TokenError(f"{self.name} answers with more than {ANSWER_BYTES_MAX} bytes")
        except httpx.HTTPError as error:
            raise TokenError(f"{self.name} does not answer: {error!r}") from error
        return self._token_in(response.status_code, content, began)

    def _login(self) -> tuple[str, str]:
        """Return client id and secret, encoded as RFC 6749, section 2.3.1, demands; the secret is read again."""
        try:
            secret = self._settings.secret("kafka_oauth_client_secret")
        except SettingsError as error:
            raise TokenError(str(error)) from error
        return quote_plus(self._settings.kafka_oauth_client_id), quote_plus(secret)

    def _token_in(self, status: int, content: bytes, began: float) -> Token:
        """Read the endpoint's answer to a request of the time `began`."""
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        found = answer if isinstance(answer, dict) else {}
        if status != 200:
            kind = TokenRefused if status in _REFUSALS else TokenError
            detail = " ".join(str(found[name]) for name in ("error", "error_description") if name in found)
            raise kind(f"{self.name} answers {status} {shortened(detail)}".rstrip())
        value, life_s = found.get("access_token"), found.get("expires_in", LIFE_UNKNOWN_S)
        try:
            life_s = float(life_s)  # some endpoints send the number as a string
        except (TypeError, ValueError, OverflowError):
            life_s = LIFE_UNKNOWN_S
        is_life = 0 < life_s < math.inf
        return token_of(_checked(value, self.name), life_s if is_life else LIFE_UNKNOWN_S, began)


class MskSource(CachedSource):
    """Signs tokens for Amazon MSK by the IAM credentials that AWS's SDK finds (in variables, files, of a role)."""

    def __init__(self, settings: SharedSettings) -> None:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider  # of the extra `msk`; takes a second to load

        region = settings.kafka_oauth_aws_region
        super().__init__(f"Amazon MSK's signer for {region}", settings.kafka_oauth_extensions_by_name)
        self._region = region
        self._sign: Callable[[str], tuple[str, int]] = MSKAuthTokenProvider.generate_auth_token

    async def fetch(self) -> Token:
        began = time.monotonic()
        try:
            # In a thread: the SDK may ask the machine's metadata service, or STS, for credentials.
            value, ends_ms = await asyncio.to_thread(self._sign, self._region)
        except Exception as error:  # the SDK has dozens of errors without a common class
            raise TokenError(f"{self.name}: {shortened(str(error) or repr(error))}") from error
        return token_of(_checked(value, self.name), ends_ms / 1000 - time.time(), began)


def token_source_of(settings: SharedSettings) -> TokenSource | None:
    """Make the source of tokens that the settings name; None where the mechanism needs none."""
    if not settings.kafka_oauth:
        return None
    if settings.kafka_oauth_token_url:
        return ClientCredentials(settings)
    if settings.kafka_oauth_aws_region:
        return MskSource(settings)
    return TokenFile(settings.kafka_oauth_token_file, settings.kafka_oauth_extensions_by_name)


def token_of(value: str, life_s: float, began: float) -> Token:
    """Make a token that was asked for at `began` and lives for `life_s`.

    The renewal of a short one begins while the cached token can still be used for as long as LEFT_LEAST_S.
    """
    renew_s = max(0.0, min(RENEW_SHARE * life_s, life_s - 2 * LEFT_LEAST_S))
    return Token(value, began + renew_s, began + life_s)


def claims_of(token: str) -> dict[str, Any]:
    """Read the claims of a token that is a JWT, unverified, to show them; none of any other token."""
    try:
        _, payload, _ = token.split(".")
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, binascii.Error):
        return {}
    return found if isinstance(found, dict) else {}


def shortened(text: str) -> str:
    """Cut a foreign text, and replace its control characters."""
    return "".join(char if char.isprintable() else " " for char in text[:DETAIL_CHARS])


def _checked(value: object, name: str) -> str:
    if not isinstance(value, str) or _TOKEN.fullmatch(value) is None:
        raise TokenError(f"{name} has no token: letters, digits and -._~+/= are wanted (RFC 6750)")
    return value
