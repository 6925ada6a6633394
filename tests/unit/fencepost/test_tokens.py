"""Tests the token providers for applications."""

import asyncio
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

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        token = {"access_token": f"t{len(self.requests)}", "expires_in": 100}
        return httpx.Response(self.status, json=token if self.answer is None else self.answer)


async def test_a_token_file_is_read_at_each_login(tmp_path: Path) -> None:
    file = tmp_path / "token"
    provider = TokenFile(file, {"logicalCluster": "lkc-1"})
    assert provider.extensions() == {"logicalCluster": "lkc-1"}
    with pytest.raises(KafkaConnectionError, match="cannot be read"):
        await provider.token()
    for text in ("a.b.c\n", "d.e.f"):
        file.write_text(text)
        assert await provider.token() == text.strip()


async def test_a_token_is_asked_for_once_and_kept_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    endpoint = Endpoint()
    secrets = iter(["one", "two", "three", "four"])
    provider = ClientCredentials(
        "https://login/token", "me", lambda: next(secrets), scope="a b", transport=httpx.MockTransport(endpoint)
    )
    assert await asyncio.gather(*(provider.token() for _ in range(3))) == ["t1"] * 3
    assert endpoint.requests[0].content == b"grant_type=client_credentials&scope=a+b"
    now[0] += 76
    assert await provider.token() == "t2"
    endpoint.status = 503
    now[0] += 76
    assert await provider.token() == "t2"
    now[0] += 25
    with pytest.raises(KafkaConnectionError, match=r"no token of https://login/token: .*503"):
        await provider.token()


@pytest.mark.parametrize("answer", [{}, [], {"access_token": "x", "expires_in": "soon"}])
async def test_an_answer_without_a_token_is_an_error_of_the_connection(answer: Any) -> None:
    endpoint = Endpoint()
    endpoint.answer = answer
    provider = ClientCredentials("https://login/token", "me", lambda: "x", transport=httpx.MockTransport(endpoint))
    with pytest.raises(KafkaConnectionError):
        await provider.token()
