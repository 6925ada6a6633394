"""Token providers for SASL OAUTHBEARER, for the reader and for any client of aiokafka.

Reader(topic, store, security_protocol="SASL_SSL", ssl_context=context, sasl_mechanism="OAUTHBEARER",
       sasl_oauth_token_provider=TokenFile("/var/run/secrets/kafka/token"), bootstrap_servers=...)
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote_plus

from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError

if TYPE_CHECKING:
    import httpx

__all__ = ["ClientCredentials", "TokenFile"]

# A new token is asked for after this share of its life.
RENEW_SHARE: Final = 0.75
TIMEOUT_S: Final = 5.0
# The life of a token whose response does not tell it.
LIFE_UNKNOWN_S: Final = 60.0


class TokenFile(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka ships no types
    """Reads the token from a file at each login: who mounts the file replaces it before the token ends."""

    def __init__(self, path: str | Path, extensions: Mapping[str, str] | None = None) -> None:
        """`extensions`: SASL extensions that go with the token."""
        self._path = Path(path)
        self._extensions = dict(extensions or {})

    def extensions(self) -> dict[str, str]:
        return self._extensions

    async def token(self) -> str:
        """Read the token. Raises KafkaConnectionError, after which aiokafka tries to connect again."""
        try:
            return self._path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise KafkaConnectionError(f"the token file {self._path} cannot be read: {error}") from error


class ClientCredentials(AbstractTokenProvider):  # type: ignore[misc]
    """Asks a token endpoint by the grant `client_credentials` (RFC 6749, section 4.4). Needs httpx."""

    def __init__(
        self,
        url: str,
        client_id: str,
        secret: Callable[[], str],
        *,
        scope: str = "",
        extensions: Mapping[str, str] | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        """Prepare a provider.

        Args:
            url: the token endpoint.
            client_id: the client's id there.
            secret: returns the client's secret; called for each token, so that it may read a file.
            scope: the scopes to ask for, separated by spaces.
            extensions: SASL extensions that go with each token.
            verify: as httpx takes it: a TLS context for an authority of your own.
            transport: in place of connections.
        """
        self._url, self._client_id, self._secret = url, client_id, secret
        self._body = {"grant_type": "client_credentials"} | ({"scope": scope} if scope else {})
        self._extensions = dict(extensions or {})
        self._verify, self._transport = verify, transport
        self._asking = asyncio.Lock()
        self._token = ""
        self._renew_at = self._ends_at = 0.0  # by time.monotonic

    def extensions(self) -> dict[str, str]:
        return self._extensions

    async def token(self) -> str:
        """Return a token, a new one if its renewal is due. Raises KafkaConnectionError where there is none."""
        async with self._asking:
            if time.monotonic() >= self._renew_at:
                try:
                    await self._ask()
                except KafkaConnectionError:
                    if time.monotonic() >= self._ends_at:
                        raise
            return self._token

    async def _ask(self) -> None:
        import httpx

        login = quote_plus(self._client_id), quote_plus(self._secret())
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(verify=self._verify, transport=self._transport) as client,
            ):
                response = await client.post(self._url, data=self._body, auth=login)
            response.raise_for_status()
            found = response.json()
            self._token, life_s = str(found["access_token"]), float(found.get("expires_in", LIFE_UNKNOWN_S))
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise KafkaConnectionError(f"no token of {self._url}: {error!r}") from error
        self._renew_at, self._ends_at = began + RENEW_SHARE * life_s, began + life_s
