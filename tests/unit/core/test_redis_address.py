"""Tests the addresses of Redis that name sentinels or nodes of a cluster."""

import pytest

from service.claims.redis_connections import check_url
from service.contract import SettingsError
from service.core.redis_address import SEEDS_MAX, RedisAddress, is_tls
from service.core.settings import Settings


def lines(**settings: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({f"FENCEPOST_{name.upper()}": text for name, text in settings.items()})
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (
            "redis+sentinel://s1:26379,10.0.0.2:26380/my-master.1/3",
            RedisAddress("redis://localhost:6379/3", "sentinel", (("s1", 26379), ("10.0.0.2", 26380)), "my-master.1"),
        ),
        (
            "rediss+sentinel://me:h%40u%3As@[::1]:1/keys",
            RedisAddress("rediss://me:h%40u%3As@localhost:6379/0", "sentinel", (("::1", 1),), "keys"),
        ),
        (
            "redis+cluster://:hush@a.b:7000,c:7001?client_name=me",
            RedisAddress("redis://:hush@localhost:6379/0?client_name=me", "cluster", (("a.b", 7000), ("c", 7001))),
        ),
        ("rediss+cluster://a:1/0", RedisAddress("rediss://localhost:6379/0", "cluster", (("a", 1),))),
        ("redis://me:hush@h:1/2", RedisAddress("redis://me:hush@h:1/2")),
    ],
)
def test_an_address_has_its_seeds_and_all_else_for_redis_py(text: str, address: RedisAddress) -> None:
    assert RedisAddress.parse(text) == address
    check_url(text)
    assert is_tls(text) == text.startswith("rediss")


@pytest.mark.parametrize(
    "text",
    [
        "redis+sentinel://s1:26379",  # without the name of the primary
        "redis+sentinel://s1:26379/keys/x",
        "redis+sentinel://s1:26379/ke ys/0",
        "redis+sentinel://s1/keys/0",  # without a port
        "redis+sentinel://s1:0/keys/0",
        "redis+sentinel://:hu@sh@s1:1/keys/0",
        "redis+sentinel://:hu/sh@s1:1/keys/0",
        "redis+sentinel://s1:26379,/keys/0",
        "redis+sentinel://s1:26379/keys/0#hush",
        "redis+cluster://",
        "redis+cluster://a:1/1",  # a cluster has one database
        "redis+cluster://a:1/hush",
        "redis+cluster://" + ",".join(["a:1"] * (SEEDS_MAX + 1)),
    ],
)
def test_an_address_that_is_wrong_is_refused_with_the_form_and_without_a_password(text: str) -> None:
    (line,) = lines(redis=text)
    form = text.partition("://")[0] + "://host:port,host:port"
    assert form in line
    assert line.startswith("FENCEPOST_REDIS is wrong: set ")
    assert "hu" not in line
    assert "sh@" not in line


def test_another_form_is_no_address() -> None:
    assert lines(redis="redis+nodes://a:1") == [
        "FENCEPOST_REDIS is wrong: set redis://host:port/db, rediss://… or unix://…"
    ]


def test_an_option_that_redis_py_does_not_take_is_refused_for_each_form() -> None:
    for text in ("redis+sentinel://a:1/keys/0?nonsense=1", "redis+cluster://a:1?nonsense=1"):
        with pytest.raises(SettingsError, match="FENCEPOST_REDIS is wrong: set after its"):
            check_url(text)


def test_the_login_of_sentinels_belongs_to_their_address() -> None:
    address = "redis+sentinel://s1:26379/keys/0"
    environment = {"FENCEPOST_REDIS": address, "FENCEPOST_REDIS_SENTINEL_PASSWORD": "hush"}
    assert Settings.from_env(environment).redis_sentinel_login == ("", "hush")
    assert lines(redis_sentinel_password="hush") == [
        "FENCEPOST_REDIS_SENTINEL_PASSWORD means nothing without sentinels: set FENCEPOST_REDIS=redis+sentinel://…, "
        "or leave FENCEPOST_REDIS_SENTINEL_PASSWORD empty"
    ]
    assert lines(redis=address, redis_sentinel_username="me") == [
        "FENCEPOST_REDIS_SENTINEL_USERNAME needs FENCEPOST_REDIS_SENTINEL_PASSWORD: set it"
    ]


def test_files_for_tls_belong_to_an_address_with_tls() -> None:
    (line,) = lines(redis="redis+cluster://a:1", redis_cafile="/a/file")
    assert line.startswith("FENCEPOST_REDIS_CAFILE means nothing without TLS")
    (line,) = lines(redis="rediss+cluster://a:1", redis_cafile="/a/file")
    assert line.startswith("FENCEPOST_REDIS_CAFILE='/a/file' cannot be used")
