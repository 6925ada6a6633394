"""Token providers for SASL OAUTHBEARER, for the reader and for any client of aiokafka.

Reader(topic, store, security_protocol="SASL_SSL", ssl_context=context, sasl_mechanism="OAUTHBEARER",
       sasl_oauth_token_provider=TokenFile("/var/run/secrets/kafka/token"), bootstrap_servers=...)
"""

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote_plus

from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError

if TYPE_CHECKING:
    import httpx

__all__ = ["ClientCredentials", "TokenFile"]

# A new token is asked for after this share of its life, in the background.
RENEW_SHARE: Final = 0.75
# A token that ends sooner is not used: a session of SASL ends with its token.
LEFT_LEAST_S: Final = 2.0
# The deadline of a request to the endpoint, the pause after one, and the most bytes of an answer.
TIMEOUT_S: Final = 5.0
PAUSE_S: Final = 1.0
ANSWER_BYTES_MAX: Final = 64 * 1024
# The life of a token whose response does not tell it, or tells one that has no end or is over.
LIFE_UNKNOWN_S: Final = 60.0
# RFC 6750, section 2.1. Control characters would end the message of the mechanism.
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")


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

        Raises ImportError without httpx.
        """
        import httpx

        self._url, self._client_id, self._secret = url, client_id, secret
        self._body = {"grant_type": "client_credentials"} | ({"scope": scope} if scope else {})
        self._extensions = dict(extensions or {})
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        self._client = partial(httpx.AsyncClient, verify=verify, transport=transport, headers=headers)
        self._asking: asyncio.Task[str] | None = None
        self._token = ""
        self._renew_at = self._ends_at = self._not_before = -math.inf  # by time.monotonic

    def extensions(self) -> dict[str, str]:
        return self._extensions

    async def token(self) -> str:
        """Return the cached token, or wait for a new one if it ends. Raises KafkaConnectionError where there is none.

        A new token that is due is asked for in the background.
        """
        now = time.monotonic()
        asking = self._asking
        if asking is None or (asking.done() and now >= max(self._renew_at, self._not_before)):
            asking = self._asking = asyncio.create_task(self._renew(), name="kafka-token")
            asking.add_done_callback(_retrieve)
        return self._token if now < self._ends_at - LEFT_LEAST_S else await asyncio.shield(asking)

    async def _renew(self) -> str:
        """Ask for a token, and cache it. Raises KafkaConnectionError."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                self._token, life_s = _token_in(await self._ask())
        except Exception as error:  # another error would end a task of aiokafka's, and have no pause
            self._not_before = time.monotonic() + PAUSE_S
            raise KafkaConnectionError(f"no token of {self._url}: {error!r}") from error
        self._not_before = time.monotonic() + PAUSE_S
        # A short one is renewed while the cached token can still be used for LEFT_LEAST_S.
        renew_s = max(0.0, min(RENEW_SHARE * life_s, life_s - 2 * LEFT_LEAST_S))
        self._renew_at, self._ends_at = began + renew_s, began + life_s
        return self._token

    async def _ask(self) -> bytes:
        """Return the endpoint's answer. Raises ValueError for one that is too long, and httpx's errors."""
        login = quote_plus(self._client_id), quote_plus(self._secret())
        async with (
            self._client() as client,
            client.stream("POST", self._url, data=self._body, auth=login) as response,
        ):
            response.raise_for_status()
            content = b""
            async for part in response.aiter_raw():
                content += part
                if len(content) > ANSWER_BYTES_MAX:
                    raise ValueError(f"the answer has more than {ANSWER_BYTES_MAX} bytes")
        return content


def _token_in(content: bytes) -> tuple[str, float]:
    """Read a token and its life, in seconds, from an endpoint's answer. Raises ValueError."""
    found = json.loads(content)
    token = found.get("access_token") if isinstance(found, dict) else None
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        raise ValueError("the answer has no token: letters, digits and -._~+/= are wanted (RFC 6750)")
    try:
        life_s = float(found.get("expires_in", LIFE_UNKNOWN_S))
    except (TypeError, ValueError, OverflowError):
        life_s = LIFE_UNKNOWN_S
    return token, life_s if 0 < life_s < math.inf else LIFE_UNKNOWN_S


def _retrieve(asking: asyncio.Task[str]) -> None:
    """Look at the error of a request that nobody waits for: asyncio would log it."""
    if not asking.cancelled():
        asking.exception()
