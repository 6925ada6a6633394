"""Tests how the keys of an issuer are kept: rotation, an issuer that is away, and tokens that anybody can make."""

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc.jwk import OctKey

from service.contract import IssuerRule
from service.core.metrics import Telemetry
from service.core.problems import INVALID_TOKEN, NOT_WRITTEN, Problem
from service.identity import jwks as jwks_module
from service.identity.issuer_keys import FAILED_PAUSE_S, KEPT_S, REFETCH_LEAST_S, IssuerKeys
from service.identity.jwks import (
    CONFIGURATION_BYTES_MAX,
    JWKS_BYTES_MAX,
    FileSource,
    JwkSet,
    KeySource,
    KeysUnreadable,
    PublicKey,
    UrlSource,
)
from service.identity.refusals import JwksPending
from tests.secured import Authority
from tests.unit.identity.signing import ISSUER, Published, Signer, key_set
from tests.unit.scrape import sample

FIRST, SECOND, THIRD = Signer.new("k1"), Signer.new("k2"), Signer.new("k3")
RULE = IssuerRule("corp", ISSUER, ("fencepost",), jwks_url="https://id.example/certs")


class World:
    """The keys of one issuer, at a time that the test chooses."""

    def __init__(self, source: KeySource) -> None:
        self.now = 1_000.0
        self.telemetry = Telemetry()
        self.keys = IssuerKeys(RULE, source, self.telemetry, now=lambda: self.now)

    async def look(self, kid: str) -> PublicKey:
        """Look for a key as a request does."""
        try:
            return self.keys.find(kid, "ES256")
        except JwksPending as wanted:
            await wanted.fetched()
        return self.keys.find(kid, "ES256")

    async def refused(self, kid: str) -> tuple[str, int | None]:
        with pytest.raises(Problem) as caught:
            await self.look(kid)
        assert not isinstance(caught.value, JwksPending)
        return caught.value.kind.code, caught.value.retry_after_s


@pytest.fixture
def source() -> Published:
    return Published(key_set(FIRST))


@pytest.fixture
async def world(source: Published) -> AsyncIterator[World]:
    world = World(source)
    yield world
    await world.keys.close()


async def test_a_new_key_is_found_by_one_read_for_all_who_ask(world: World, source: Published) -> None:
    await world.look("k1")
    version = world.keys.version
    world.now += REFETCH_LEAST_S
    source.content = key_set(FIRST, SECOND)
    found = await asyncio.gather(*(world.look("k2") for _ in range(50)))
    assert {key.kid for key in found} == {"k2"}
    assert source.reads == 2
    assert world.keys.version == version + 1
    assert (await world.look("k1")).kid == "k1"


async def test_unknown_keys_are_looked_for_at_intervals_only(world: World, source: Published) -> None:
    await world.look("k1")
    world.now += REFETCH_LEAST_S
    assert await world.refused("x0") == (INVALID_TOKEN.code, None)
    assert source.reads == 2
    for n in range(100):  # of tokens that anybody can make: the key may be newer than the last read
        assert await world.refused(f"y{n}") == (NOT_WRITTEN.code, REFETCH_LEAST_S)
    assert await world.refused("x0") == (INVALID_TOKEN.code, None)  # was looked for
    assert source.reads == 2
    source.content = key_set(FIRST, SECOND)
    world.now += REFETCH_LEAST_S
    assert await world.refused("y7") == (INVALID_TOKEN.code, None)
    assert source.reads == 3
    await world.look("k2")
    assert source.reads == 3


async def test_a_key_that_the_issuer_has_withdrawn_is_not_taken(world: World, source: Published) -> None:
    await world.look("k1")
    version = world.keys.version
    source.content = key_set(SECOND)
    world.now += REFETCH_LEAST_S
    await world.look("k2")
    assert world.keys.version > version  # tokens that were verified with it are verified again
    assert (await world.refused("k1"))[0] == NOT_WRITTEN.code
    world.now += REFETCH_LEAST_S
    assert await world.refused("k1") == (INVALID_TOKEN.code, None)


@pytest.mark.parametrize("content", [key_set(), json.dumps({"keys": [{**FIRST.jwk, "use": "enc"}]}).encode()])
async def test_an_issuer_that_withdraws_all_keys_has_none(world: World, source: Published, content: bytes) -> None:
    await world.look("k1")
    version = world.keys.version
    source.content = content
    world.now += REFETCH_LEAST_S
    assert await world.refused("k2") == (INVALID_TOKEN.code, None)
    assert world.keys.version == version + 1
    world.now += REFETCH_LEAST_S
    assert await world.refused("k1") == (INVALID_TOKEN.code, None)
    assert sample(world.telemetry, "fencepost_issuer_fetches_total", issuer="corp", outcome="ok") == 3


async def test_while_the_issuer_is_away_known_keys_are_used_and_unknown_ones_answered_503(
    world: World, source: Published
) -> None:
    await world.look("k1")
    version = world.keys.version
    source.content = "no route"
    world.now += REFETCH_LEAST_S
    assert await world.refused("k2") == (NOT_WRITTEN.code, FAILED_PAUSE_S)
    for _ in range(100):
        assert await world.refused("k3") == (NOT_WRITTEN.code, FAILED_PAUSE_S)
    assert source.reads == 2
    with pytest.raises(Problem, match="the keys of the issuer corp cannot be read: no route"):
        await world.look("k2")
    assert (await world.look("k1")).kid == "k1"
    assert world.keys.version == version
    source.content = key_set(FIRST, SECOND)
    world.now += FAILED_PAUSE_S
    await world.look("k2")


async def test_keys_that_cannot_be_read_again_are_trusted_for_a_day(world: World, source: Published) -> None:
    await world.look("k1")
    version = world.keys.version
    source.content = "no route"
    world.now += KEPT_S
    await world.refused("k2")
    await world.look("k1")
    world.now += FAILED_PAUSE_S
    await world.refused("k2")
    assert await world.refused("k1") == (NOT_WRITTEN.code, FAILED_PAUSE_S)
    assert world.keys.version > version


async def test_a_process_that_never_had_the_keys_answers_503() -> None:
    world = World(Published("no route"))
    assert await world.refused("k1") == (NOT_WRITTEN.code, FAILED_PAUSE_S)
    assert sample(world.telemetry, "fencepost_issuer_fetches_total", issuer="corp", outcome="failed") == 1


async def test_a_bug_of_a_read_leaves_nobody_waiting(world: World, source: Published) -> None:
    async def fail() -> bytes:
        raise RuntimeError("bug")

    source.read = fail  # type: ignore[method-assign]
    assert await world.refused("k1") == (NOT_WRITTEN.code, FAILED_PAUSE_S)


async def test_after_the_end_known_keys_are_found_and_no_read_begins(world: World, source: Published) -> None:
    await world.look("k1")
    await world.keys.close()
    world.now += REFETCH_LEAST_S
    assert (await world.look("k1")).kid == "k1"
    for look in (lambda: world.keys.find("k2", "ES256"), world.keys.read_again):
        with pytest.raises(Problem, match="the rules of the issuer corp have changed meanwhile") as caught:
            look()
        assert caught.value.kind is NOT_WRITTEN
    assert source.reads == 1


async def test_the_keys_are_read_at_once_and_at_intervals(world: World, source: Published) -> None:
    source.period_s = 0.01
    keeping = asyncio.create_task(world.keys.keep())
    async with asyncio.timeout(5.0):
        while source.reads < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    keeping.cancel()
    assert world.keys.version == 1  # the content is the same


# ----------------------------------------------------------------------------------------------------- JWK Sets


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": []}',
        b'{"keys": [1, null, {}, {"kty": "x"}, {"kty": ["RSA"]}]}',
        b"[" * 100_000,
        json.dumps({"keys": [FIRST.jwk] * 101}).encode(),
        json.dumps({"keys": [{**FIRST.jwk, "use": "enc"}]}).encode(),
        json.dumps({"keys": [{**FIRST.jwk, "key_ops": ["encrypt"]}]}).encode(),
        json.dumps({"keys": [{**FIRST.jwk, "kid": 1}]}).encode(),
        json.dumps({"keys": [{**FIRST.jwk, "x": "AA"}]}).encode(),
        json.dumps({"keys": [{**FIRST.jwk, "crv": "P-1"}]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "n": "AQAB" * 20, "e": "AQAB"}]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "n": "_" * 1000, "e": "AQAB"}]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "n": [1], "e": "AQAB"}]}).encode(),
        json.dumps({"keys": [FIRST.key.as_dict(private=True)]}).encode(),
        json.dumps({"keys": [OctKey.import_key(bytes(32)).as_dict(private=True)]}).encode(),
    ],
)
def test_what_has_no_public_key_for_signatures_is_unreadable(content: bytes) -> None:
    with pytest.raises(KeysUnreadable):
        JwkSet(content).check_usable()


def test_a_key_that_cannot_be_used_is_left_out() -> None:
    encryption = {**SECOND.jwk, "use": "enc"}
    unknown: dict[str, Any] = {"kty": "AKP", "kid": "pq", "alg": "ML-DSA-44", "pub": "AA"}
    keys = JwkSet(json.dumps({"keys": [unknown, encryption, FIRST.jwk]}).encode())
    assert [line.partition(":")[0] for line in keys.left_out] == ["keys[0]"]  # one for encryption is no fault
    assert keys.find("k1", "ES256") is not None
    assert keys.find("k2", "ES256") is None


def test_a_key_is_for_its_own_algorithms_only() -> None:
    without_alg = {name: value for name, value in FIRST.jwk.items() if name != "alg"}
    rsa = Signer.new("r", "RS256")
    keys = JwkSet(json.dumps({"keys": [without_alg, rsa.jwk]}).encode())
    assert [keys.find("k1", algorithm) is not None for algorithm in ("ES256", "ES384", "RS256", "HS256")] == [
        True,
        False,
        False,
        False,
    ]
    assert [keys.find("r", algorithm) is not None for algorithm in ("RS256", "PS256", "RS512", "ES256", "HS256")] == [
        True,
        False,
        False,
        False,
        False,
    ]


def test_two_keys_with_one_id_are_told_apart_by_their_types() -> None:
    rsa = Signer.new("k1", "RS256")
    keys = JwkSet(key_set(rsa, FIRST))
    assert [type(keys.find("k1", algorithm)).__name__ for algorithm in ("RS256", "ES256")] == ["RSAKey", "ECKey"]
    assert keys.find(None, "ES256") is not None
    assert JwkSet(key_set(FIRST, SECOND)).find(None, "ES256") is None


# ------------------------------------------------------------------------------------------------------- sources


async def test_a_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(key_set(FIRST))
    world = World(FileSource(str(path)))
    await world.look("k1")
    path.write_bytes(key_set(SECOND))
    world.now += REFETCH_LEAST_S
    await world.look("k2")
    path.write_bytes(b" " * (JWKS_BYTES_MAX + 1))
    world.now += REFETCH_LEAST_S
    with pytest.raises(Problem, match=f"it has more than {JWKS_BYTES_MAX} bytes"):
        await world.look("k3")
    path.unlink()
    world.now += FAILED_PAUSE_S
    with pytest.raises(Problem, match="No such file"):
        await world.look("k3")
    await world.look("k2")


def url_source(answer: Any, **changes: Any) -> UrlSource:
    return UrlSource(
        IssuerRule("corp", ISSUER, ("f",), "http://127.0.0.1:1/certs", **changes), httpx.MockTransport(answer)
    )


async def test_a_url_is_read_with_the_token_that_its_file_has_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200, content=_once(key_set(FIRST)))

    source = url_source(answer, jwks_token_file=str(path))
    for token in ("t1\n", "t2"):
        path.write_text(token)
        await source.keys()
    assert seen == ["Bearer t1", "Bearer t2"]
    path.unlink()
    with pytest.raises(KeysUnreadable, match="No such file"):
        await source.keys()


OWN = {"issuer": ISSUER, "jwks_uri": "https://keys.example/certs"}


def discovering(configuration: bytes, **changes: Any) -> tuple[UrlSource, list[str]]:
    """Return the source of a rule that names only its issuer, and the URLs that it has read."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        is_configuration = request.url.path.endswith("/openid-configuration")
        return httpx.Response(200, content=_once(configuration if is_configuration else key_set(FIRST)))

    return UrlSource(
        IssuerRule("corp", **{"issuer": ISSUER, **changes}, audience=("f",)), httpx.MockTransport(answer)
    ), asked


async def test_the_issuer_s_configuration_names_the_place_of_its_keys_at_each_read() -> None:
    source, asked = discovering(json.dumps(OWN).encode())
    for _ in range(2):
        assert (await source.keys())[0] == key_set(FIRST)
    assert asked == [f"{ISSUER}/.well-known/openid-configuration", "https://keys.example/certs"] * 2


async def test_on_this_machine_the_place_may_be_without_tls() -> None:
    local = {"issuer": "http://localhost:8080/r", "jwks_uri": "http://127.0.0.1:8080/r/certs"}
    source, asked = discovering(json.dumps(local).encode(), issuer=local["issuer"])
    await source.keys()
    assert asked == ["http://localhost:8080/r/.well-known/openid-configuration", local["jwks_uri"]]


@pytest.mark.parametrize(
    ("configuration", "why"),
    [
        (b"<html>", "it is no OpenID configuration"),
        (b"[" * 50_000, "it is no OpenID configuration"),
        (b"[]", "it is no OpenID configuration"),
        (b"{}", "its issuer is None"),
        (json.dumps({**OWN, "issuer": f"{ISSUER}/"}).encode(), "its issuer is 'https://id.example/realms/shop/'"),
        (json.dumps({"issuer": ISSUER}).encode(), '"jwks_uri" is no URL'),
        (json.dumps({**OWN, "jwks_uri": ["https://keys.example"]}).encode(), '"jwks_uri" is no URL'),
        (json.dumps({**OWN, "jwks_uri": "http://keys.example/certs"}).encode(), '"jwks_uri" is no URL'),
        (json.dumps({**OWN, "jwks_uri": "http://127.0.0.1/certs"}).encode(), '"jwks_uri" is no URL'),
        (json.dumps({**OWN, "jwks_uri": "file:///etc/passwd"}).encode(), '"jwks_uri" is no URL'),
        (json.dumps({**OWN, "jwks_uri": "https://u:p@keys.example/"}).encode(), '"jwks_uri" is no URL'),
        (json.dumps({**OWN, "more": "x" * CONFIGURATION_BYTES_MAX}).encode(), "more than 65536 bytes"),
    ],
)
async def test_a_configuration_that_does_not_name_a_safe_place_is_refused(configuration: bytes, why: str) -> None:
    source, asked = discovering(configuration)
    with pytest.raises(KeysUnreadable, match=why) as caught:
        await source.keys()
    assert str(caught.value).startswith(f"{ISSUER}/.well-known/openid-configuration: ")
    assert len(asked) == 1


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
async def test_the_authorities_of_a_url_are_read_for_each_fetch(
    scheme: str, authority: Authority, tmp_path: Path
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + key_set(FIRST))
        writer.close()

    certificate = authority.issue("issuer", "IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certfile, certificate.keyfile)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    cafile = tmp_path / "ca.crt"
    shutil.copy(Authority(tmp_path / "before").cafile, cafile)
    url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/certs"
    source = UrlSource(IssuerRule("corp", ISSUER, ("f",), url, jwks_cafile=str(cafile)))
    with pytest.raises(KeysUnreadable, match="certificate verify failed"):
        await source.keys()
    shutil.copy(authority.cafile, cafile)
    assert (await source.keys())[0] == key_set(FIRST)
    cafile.unlink()
    with pytest.raises(KeysUnreadable, match="No such file"):
        await source.keys()
    server.close()
    await server.wait_closed()


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 10_000


async def _never() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(302, headers={"location": "http://127.0.0.1:2/"}), "the URL answers 302"),
        (httpx.Response(503), "the URL answers 503"),
        (httpx.Response(200, content=_once(b"<html>")), "no JWK Set"),
        (httpx.Response(200, content=_endless()), "more than 262144 bytes"),
        (httpx.Response(200, content=_never()), "no answer within 0.05 s"),
    ],
)
async def test_a_url_that_has_no_keys_is_unreadable(
    answer: httpx.Response, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_module, "FETCH_TIMEOUT_S", 0.05)
    source = url_source(lambda _: answer)
    with pytest.raises(KeysUnreadable, match=why):
        await source.keys()
