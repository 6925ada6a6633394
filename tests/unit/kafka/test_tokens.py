"""Tests the sources of tokens for OAUTHBEARER: what they ask for, keep and refuse, and what they say of failures."""

import asyncio
import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httpx
import pytest

from service.contract import SharedSettings
from service.kafka import tokens as module
from service.kafka.tokens import (
    ClientCredentials,
    MskSource,
    TokenError,
    TokenFile,
    TokenRefused,
    claims_of,
    token_source_of,
)

URL: Final = "https://login.example/token"


def settings(**changes: Any) -> SharedSettings:
    return SharedSettings(
        kafka_security_protocol="SASL_SSL",
        kafka_sasl_mechanism="OAUTHBEARER",
        **{
            "kafka_oauth_token_url": URL,
            "kafka_oauth_client_id": "fencepost",
            "kafka_oauth_client_secret": "hush +/",
            "kafka_oauth_scope": "kafka write",
            **changes,
        },
    )


class Endpoint:
    """A token endpoint that counts its tokens."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.answer: Any = None  # in place of a token
        self.status = 200
        self.life_s: Any = 300
        self.held: asyncio.Event | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.held is not None:
            await self.held.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        token = {"access_token": f"t.{len(self.requests)}.x", "token_type": "Bearer", "expires_in": self.life_s}
        content = json.dumps(token if self.answer is None else self.answer).encode()
        return httpx.Response(self.status, stream=httpx.ByteStream(content))


def asking(endpoint: Endpoint, **changes: Any) -> ClientCredentials:
    return ClientCredentials(settings(**changes), httpx.MockTransport(endpoint))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `time.monotonic` in the module, s."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def test_a_token_is_asked_for_as_rfc_6749_defines_it() -> None:
    endpoint = Endpoint()
    assert await asking(endpoint).token() == "t.1.x"
    (request,) = endpoint.requests
    assert (request.method, str(request.url)) == ("POST", URL)
    login = base64.b64encode(b"fencepost:hush+%2B%2F").decode()
    assert request.headers["authorization"] == f"Basic {login}"
    assert request.content == b"grant_type=client_credentials&scope=kafka+write"


async def test_concurrent_logins_share_a_token_and_a_fetch() -> None:
    endpoint = Endpoint()
    source = asking(endpoint)
    assert not source.is_ready
    assert set(await asyncio.gather(*(source.token() for _ in range(9)))) == {"t.1.x"}
    assert source.is_ready
    assert await source.token() == "t.1.x"
    assert len(endpoint.requests) == 1


async def test_a_token_is_renewed_before_it_ends_and_meanwhile_the_former_one_is_used(clock: list[float]) -> None:
    endpoint = Endpoint()
    source = asking(endpoint)
    await source.token()
    clock[0] += 0.7 * 300
    assert source.is_ready
    clock[0] += 0.1 * 300
    assert not source.is_ready
    endpoint.held = asyncio.Event()
    assert await source.token() == "t.1.x"
    endpoint.held.set()
    async with asyncio.timeout(1):
        while not source.is_ready:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert await source.token() == "t.2.x"


async def test_while_the_endpoint_is_away_a_token_is_used_until_it_ends(clock: list[float]) -> None:
    endpoint = Endpoint()
    source = asking(endpoint)
    await source.token()
    endpoint.answer = httpx.ConnectError("refused")
    clock[0] += 290
    assert await source.token() == "t.1.x"
    clock[0] += 9
    with pytest.raises(TokenError, match=r"token endpoint https://login.example/token does not answer: .*refused"):
        await source.token()
    asked = len(endpoint.requests)
    with pytest.raises(TokenError):
        await source.token()
    assert len(endpoint.requests) == asked, "not asked again at once"
    endpoint.answer = None
    clock[0] += module.FETCH_PAUSE_S
    assert await source.token() == f"t.{asked + 1}.x"


@pytest.mark.parametrize(
    ("status", "answer", "kind", "why"),
    [
        (401, {"error": "invalid_client", "error_description": "no\nsuch"}, TokenRefused, "401 invalid_client no such"),
        (400, {"error": "invalid_scope"}, TokenRefused, "400 invalid_scope"),
        (403, [], TokenRefused, "403"),
        (503, {}, TokenError, "503"),
        (302, {}, TokenError, "302"),
        (200, {"token": "x"}, TokenError, "has no token"),
        (200, {"access_token": "a\x01b"}, TokenError, "has no token"),
        (200, {"access_token": 5}, TokenError, "has no token"),
        (200, [], TokenError, "has no token"),
        (200, {"access_token": "x" * 70_000}, TokenError, "more than 65536 bytes"),
    ],
)
async def test_an_answer_without_a_token_is_named_and_no_secret_is(
    status: int, answer: Any, kind: type[TokenError], why: str
) -> None:
    endpoint = Endpoint()
    endpoint.status, endpoint.answer = status, answer
    with pytest.raises(TokenError, match=why) as raised:
        await asking(endpoint).token()
    assert type(raised.value) is kind
    assert "hush" not in str(raised.value)


async def test_an_endpoint_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FETCH_TIMEOUT_S", 0.02)
    endpoint = Endpoint()
    endpoint.held = asyncio.Event()
    with pytest.raises(TokenError, match="TimeoutError"):
        await asking(endpoint).token()


@pytest.mark.parametrize("fault", [ImportError("socksio"), OverflowError("too large"), RecursionError("too deep")])
async def test_any_failure_of_a_fetch_is_a_token_error_and_paced(fault: Exception, clock: list[float]) -> None:
    endpoint = Endpoint()
    endpoint.answer = fault
    source = asking(endpoint)
    for _ in range(2):
        with pytest.raises(TokenError, match=f"token endpoint {URL}: {fault}"):
            await source.token()
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("life_s", [0.5, 1])
async def test_tokens_of_a_short_life_are_no_storm_of_fetches(life_s: float, clock: list[float]) -> None:
    endpoint = Endpoint()
    endpoint.life_s = life_s
    source = asking(endpoint)
    for _ in range(5):
        await source.token()
        clock[0] += 0.199
    assert len(endpoint.requests) == 1
    clock[0] += 0.01
    assert await source.token() == "t.2.x"


@pytest.mark.parametrize(
    ("life_s", "left_s"),
    [(300, 300), ("300", 300), *[(wrong, 60) for wrong in (None, "soon", 0, -5, "nan", "inf")]],
)
async def test_a_life_that_is_not_told_is_taken_for_a_minute(life_s: Any, left_s: int, clock: list[float]) -> None:
    endpoint = Endpoint()
    endpoint.life_s = life_s
    source = asking(endpoint)
    await source.token()
    clock[0] += 0.74 * left_s
    assert source.is_ready
    clock[0] += 0.02 * left_s
    assert not source.is_ready


async def test_a_secret_in_a_file_is_read_again_for_each_token(tmp_path: Path, clock: list[float]) -> None:
    file = tmp_path / "secret"
    file.write_text("one\n")
    endpoint = Endpoint()
    source = asking(endpoint, secret_files={"kafka_oauth_client_secret": str(file)})
    await source.token()
    file.write_text("two\n")
    clock[0] += 299
    await source.token()
    sent = [base64.b64decode(request.headers["authorization"].split()[1]) for request in endpoint.requests]
    assert sent == [b"fencepost:one", b"fencepost:two"]
    file.unlink()
    clock[0] += 299
    with pytest.raises(TokenError, match=r"FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET_FILE=.* cannot be read"):
        await source.token()


async def test_a_token_file_is_read_at_each_login(tmp_path: Path) -> None:
    file = tmp_path / "token"
    source = TokenFile(str(file), {})
    assert not source.is_ready
    with pytest.raises(TokenError, match=r"the token file .* cannot be read: .*No such file"):
        await source.token()
    for text in ("a.b.c\n", "d.e.f"):
        file.write_text(text)
        assert source.is_ready
        assert await source.token() == text.strip()
    for wrong in ("", "two words", "ü"):
        file.write_text(wrong)
        assert not source.is_ready
        with pytest.raises(TokenError):
            await source.token()


async def test_a_token_for_msk_is_a_presigned_url_of_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that MSK's brokers take: a URL of kafka-cluster:Connect in base64, signed for 15 minutes."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    source = MskSource(settings(kafka_oauth_token_url="", kafka_oauth_aws_region="eu-central-1"))
    token = await source.token()
    signed = httpx.URL(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode())
    assert (signed.scheme, signed.host) == ("https", "kafka.eu-central-1.amazonaws.com")
    assert signed.params["Action"] == "kafka-cluster:Connect"
    assert signed.params["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
    assert signed.params["X-Amz-Credential"].startswith("AKIDEXAMPLE/")
    assert signed.params["X-Amz-Credential"].endswith("/eu-central-1/kafka-cluster/aws4_request")
    assert signed.params["X-Amz-Expires"] == "900"
    assert len(signed.params["X-Amz-Signature"]) == 64
    assert source.is_ready
    assert await source.token() == token


async def test_credentials_that_aws_does_not_find_are_a_token_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(TokenError, match="Amazon MSK's signer for eu-central-1: "):
        await MskSource(settings(kafka_oauth_token_url="", kafka_oauth_aws_region="eu-central-1")).token()


def test_the_settings_choose_the_source() -> None:
    none = {"kafka_oauth_token_url": ""}
    assert isinstance(token_source_of(settings()), ClientCredentials)
    assert isinstance(token_source_of(settings(**none, kafka_oauth_token_file="/x")), TokenFile)
    assert isinstance(token_source_of(settings(**none, kafka_oauth_aws_region="eu-central-1")), MskSource)
    assert token_source_of(SharedSettings()) is None


def test_claims_are_read_of_a_jwt_only() -> None:
    payload = base64.urlsafe_b64encode(json.dumps({"sub": "me"}).encode()).decode().rstrip("=")
    assert claims_of(f"e30.{payload}.x") == {"sub": "me"}
    for other in ("opaque", "a.b.c", "a.W10.c", "e30..x"):
        assert claims_of(other) == {}


@pytest.mark.parametrize(("life_s", "renewed_after_s"), [(300.0, 225.0), (16.0, 12.0), (6.0, 2.0), (3.0, 0.0)])
def test_a_short_token_is_renewed_while_it_can_still_be_used(life_s: float, renewed_after_s: float) -> None:
    token = module.token_of("t", life_s, began=100.0)
    assert token.renew_at == 100.0 + renewed_after_s
    assert token.ends_at == 100.0 + life_s
