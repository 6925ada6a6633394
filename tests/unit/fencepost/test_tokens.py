"""Tests the token providers for applications."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiokafka.errors import KafkaConnectionError

from service.fencepost import tokens as module
from service.fencepost.tokens import ClientCredentials, TokenFile


class Endpoint:
    """A token endpoint that counts its tokens."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.status = 200
        self.answer: Any = None
        self.held: asyncio.Event | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.held is not None:
            await self.held.wait()
        token = {"access_token": f"t{len(self.requests)}", "expires_in": 100}
        content = json.dumps(token if self.answer is None else self.answer).encode()
        return httpx.Response(self.status, stream=httpx.ByteStream(content))


def asking(endpoint: Endpoint, secret: Callable[[], str] = lambda: "x") -> ClientCredentials:
    return ClientCredentials("https://login/token", "me", secret, scope="a b", transport=httpx.MockTransport(endpoint))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `time.monotonic` in the module, s."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def test_a_token_file_is_read_at_each_login(tmp_path: Path) -> None:
    file = tmp_path / "token"
    provider = TokenFile(file, {"logicalCluster": "lkc-1"})
    assert provider.extensions() == {"logicalCluster": "lkc-1"}
    with pytest.raises(KafkaConnectionError, match="cannot be read"):
        await provider.token()
    for text in ("a.b.c\n", "d.e.f"):
        file.write_text(text)
        assert await provider.token() == text.strip()


async def test_a_token_is_asked_for_once_and_renewed_in_the_background(now: list[float]) -> None:
    endpoint = Endpoint()
    secrets = iter(["one", "two"])
    provider = asking(endpoint, lambda: next(secrets))
    assert await asyncio.gather(*(provider.token() for _ in range(3))) == ["t1"] * 3
    assert endpoint.requests[0].content == b"grant_type=client_credentials&scope=a+b"
    now[0] += 76
    endpoint.held = asyncio.Event()
    async with asyncio.timeout(1):
        assert await provider.token() == "t1"  # though the endpoint hangs
        endpoint.held.set()
        while await provider.token() == "t1":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert await provider.token() == "t2"
    assert len(endpoint.requests) == 2


async def test_while_the_endpoint_is_away_it_is_asked_with_pauses_and_the_token_is_used_until_it_ends(
    now: list[float],
) -> None:
    endpoint = Endpoint()
    provider = asking(endpoint)
    assert await provider.token() == "t1"
    endpoint.status = 503
    now[0] += 97
    assert await provider.token() == "t1"
    now[0] += 2  # less than a login needs is left
    for _ in range(3):
        with pytest.raises(KafkaConnectionError, match=r"no token of https://login/token: .*503"):
            await provider.token()
    assert len(endpoint.requests) == 2
    endpoint.status = 200
    now[0] += module.PAUSE_S
    assert await provider.token() == "t3"


def test_a_provider_serves_the_event_loop_after_one_that_ended_within_a_fetch() -> None:
    endpoint = Endpoint()
    provider = asking(endpoint)

    async def give_up() -> None:
        endpoint.held = asyncio.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(provider.token(), 0.01)

    asyncio.run(give_up())
    endpoint.held = None
    assert asyncio.run(provider.token()) == "t2"


async def test_a_token_of_seconds_is_renewed_before_it_counts_as_unusable(now: list[float]) -> None:
    endpoint = Endpoint()
    endpoint.answer = {"access_token": "first", "expires_in": 6}
    provider = asking(endpoint)
    assert await provider.token() == "first"
    endpoint.answer = {"access_token": "second", "expires_in": 6}
    now[0] += 4.2  # its end is nearer than LEFT_LEAST_S
    assert await provider.token() == "second"


async def test_a_life_of_nothing_is_no_storm_of_requests(now: list[float]) -> None:
    endpoint = Endpoint()
    endpoint.answer = {"access_token": "x", "expires_in": 0}
    provider = asking(endpoint)
    for _ in range(3):
        assert await provider.token() == "x"
    assert len(endpoint.requests) == 1


def no_secret() -> str:
    raise OSError("no such file")


@pytest.mark.parametrize(
    ("answer", "secret"),
    [
        ({}, str),
        ([], str),
        ({"access_token": 5}, str),
        ({"access_token": "x\x01y"}, str),
        ({"access_token": "x" * 70_000}, str),
        (None, no_secret),
    ],
)
async def test_without_a_token_there_is_an_error_of_the_connection(answer: Any, secret: Callable[[], str]) -> None:
    endpoint = Endpoint()
    endpoint.answer = answer
    with pytest.raises(KafkaConnectionError, match="no token of https://login/token: "):
        await asking(endpoint, secret).token()
