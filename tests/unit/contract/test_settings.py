"""Tests the settings: the defaults of the contract, a line for each mistake, and conflicts of two settings."""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from service.claims.redis_connections import check_url
from service.contract import SettingsError, SharedSettings
from service.contract.wire.names import TOPIC, internal_topics
from service.core.settings import Settings
from tests.secured import Authority


def read(**settings: str) -> Settings:
    return Settings.from_env({f"FENCEPOST_{name.upper()}": text for name, text in settings.items()})


def lines(**settings: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(**settings)
    return str(caught.value).splitlines()


def test_every_setting_has_its_documented_default() -> None:
    settings = read()
    assert settings == Settings(
        kafka="127.0.0.1:9092",
        redis="redis://127.0.0.1:6379/0",
        namespace="fencepost",
        host="127.0.0.1",
        port=8000,
        instance="",
        slots=4,
        slots_max=64,
        key_ttl_s=86_400,
        transaction_timeout_ms=10_000,
        request_timeout_ms=10_000,
        lease_ttl_ms=3_000,
        queue_events_max=20_000,
        queue_bytes_max=64 * 1024 * 1024,
        body_bytes_max=8 * 1024 * 1024,
        rules="",
    )
    assert settings.name == "127.0.0.1:8000"


@pytest.mark.parametrize("text", ["kafka-0.kafka:9092", "10.0.0.1:1, b_c:2", "[::1]:9092", "fe80::1%eth0:9092"])
def test_servers_are_names_or_addresses(text: str) -> None:
    assert read(kafka=text).kafka == text


def test_a_set_variable_is_read_and_an_empty_one_is_ignored() -> None:
    settings = read(port="9000", slots="2", namespace="a.b_c-d", instance="host-1:2", kafka="a:1,b:2", redis="")
    assert (settings.port, settings.slots, settings.namespace, settings.name) == (9000, 2, "a.b_c-d", "host-1:2")
    assert settings.kafka == "a:1,b:2"
    assert settings.redis == "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kafka", "localhost"),
        ("kafka", "localhost:"),
        ("kafka", "a:1,"),
        ("kafka", "a:99999"),
        ("kafka", "a:٩"),
        ("kafka", "http://a:9092"),
        ("kafka", "a:9092 b:9092"),
        ("instance", "a b"),
        ("instance", "x" * 65),
        ("instance", 'a"b'),
        ("namespace", "a/b"),
        ("namespace", "ü"),
        ("namespace", "x" * 241),
        ("host", "127.0.0.1 "),
        ("host", "0.0.0.0\n"),
        ("host", "0.0.0.0:8000"),
        ("host", "[::1]"),
        ("host", " "),
        ("management_host", "::1 "),
        ("kafka_oauth_token_url", "https://login.example/token "),
        ("kafka_oauth_token_url", " https://login.example/token"),
        ("registry", "http://r:8081/a "),
        ("registry", "http://r:8081\n"),
        ("registry", " http://r:8081"),
        ("port", "0"),
        ("port", "65536"),
        ("port", "http"),
        ("port", "8_000"),
        ("port", "+8000"),
        ("port", "٣"),
        ("port", "9" * 5000),
        ("slots", "0"),
        ("slots", "4097"),
        ("slots", "-1"),
        ("slots", "1.5"),
        ("slots_max", "0"),
        ("key_ttl_s", "0"),
        ("transaction_timeout_ms", "999"),
        ("transaction_timeout_ms", "900001"),
        ("request_timeout_ms", "99"),
        ("lease_ttl_ms", "299"),
        ("lease_ttl_ms", "60001"),
        ("queue_events_max", "0"),
        ("queue_bytes_max", "-5"),
        ("queue_bytes_max", "1001999"),  # an event of a megabyte must fit
        ("body_bytes_max", "10"),
    ],
)
def test_each_mistake_has_a_line_that_says_what_to_set(name: str, text: str) -> None:
    (line,) = lines(**{name: text})
    assert line.startswith(f"FENCEPOST_{name.upper()}={text!r} is wrong: set ")
    assert len(line) > len(f"FENCEPOST_{name.upper()}={text!r} is wrong: set ") + 5


@pytest.mark.parametrize("text", ["localhost:6379", "http://:hush@localhost", "redis://", "unix://", "unix://hush"])
def test_a_secret_that_is_wrong_is_not_shown(text: str) -> None:
    assert lines(redis=text) == ["FENCEPOST_REDIS is wrong: set redis://host:port/db, rediss://… or unix://…"]


@pytest.mark.parametrize(
    "text", ["redis://:hush@h:6379/0\n", "redis://:hush@h/0 ", " rediss://:hush@h", "redis+sentinel://h:1/name\n"]
)
def test_a_redis_url_with_blanks_around_it_is_refused(text: str) -> None:
    """As of a file with two line feeds at its end, or where an address with TLS would be taken for one without."""
    assert lines(redis=text) == ["FENCEPOST_REDIS is wrong: set a URL without blanks around it and without line breaks"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "localhost", "service-1.b_c", "fe80::1%eth0"])
def test_an_address_to_listen_on_is_a_name_or_an_address(host: str) -> None:
    settings = read(host=host, management_host=host, management_port="1", instance="a")
    assert (settings.host, settings.management_host) == (host, host)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("redis://h:notaport/0", "port from 1 to 65535"),
        ("redis://h:0/0", "port from 1 to 65535"),
        ("redis://h:65536/0", "port from 1 to 65535"),
        ("rediss://h:-1", "port from 1 to 65535"),
        ("redis://:hu/sh@h:6379/0", "%2F for /"),
        ("redis://[::1/0", "port from 1 to 65535"),
        ("redis://h:6379/abc", "db a number"),
        ("redis://h:6379/-1", "db a number"),
        ("redis://h/1/2", "db a number"),
        ("redis:6379", "db a number"),
        ("redis:///abc", "db a number"),
    ],
)
def test_a_redis_url_is_one_as_a_whole(text: str, what: str) -> None:
    """URLs that redis-py would refuse late in the start, or misread."""
    (line,) = lines(redis=text)
    assert line.startswith("FENCEPOST_REDIS is wrong: set redis://host:port/db, rediss://… or unix://…, ")
    assert what in line
    assert "hu" not in line


@pytest.mark.parametrize(
    "text",
    [
        "redis://h",
        "redis://h/",
        "redis://h:6379",
        "redis://h:6379/15",
        "redis://[::1]:6379/0",
        "redis://:hush@h:6379/0",
        "redis://me:h%2Fu%3Ash@h/2?client_name=me&socket_keepalive=yes&health_check_interval=30",
        "redis://h?db=3&protocol=3&decode_responses=true",
        "redis:///1",
        "rediss://me:hush@h:6380/0?ssl_cert_reqs=none",
        "unix:///run/redis.sock",
        "unix://me@/run/redis.sock?db=1&password=hush",
    ],
)
def test_redis_urls_that_redis_py_takes(text: str) -> None:
    assert read(redis=text).redis == text
    check_url(text)


@pytest.mark.parametrize(
    "more", ["db=abc", "socket_timeout=soon", "nonsense=1", "protocol=9", "retry=3", "ssl_keyfile=x"]
)
def test_a_redis_url_option_that_redis_py_does_not_take_is_reported(more: str) -> None:
    text = read(redis=f"redis://:hush@h/0?{more}").redis
    with pytest.raises(SettingsError) as caught:
        check_url(text)
    assert str(caught.value) == (
        "FENCEPOST_REDIS is wrong: set after its ? only what redis-py takes in a URL, with values of its kind"
    )


@pytest.mark.parametrize("namespace", ["x" * 240, ".", "..", "-"])
def test_a_namespace_makes_names_that_kafka_takes(namespace: str) -> None:
    """Kafka refuses only the names "." and ".."."""
    assert all(map(TOPIC.fullmatch, internal_topics(read(namespace=namespace).namespace)))


def test_a_too_long_namespace_is_reported_with_its_bound() -> None:
    (line,) = lines(namespace="x" * 241)
    assert line.endswith(" is wrong: set 1 to 240 of letters, digits, '.', '_' and '-'")


def test_no_secret_is_shown_by_the_settings_themselves() -> None:
    settings = read(**SASL, redis="redis://:hush@localhost")
    assert settings.kafka_sasl_password == "hush"
    assert "hush" not in repr(settings)


SASL: Final = {
    "kafka_security_protocol": "SASL_PLAINTEXT",
    "kafka_sasl_mechanism": "PLAIN",
    "kafka_sasl_username": "me",
    "kafka_sasl_password": "hush",
}


def without(name: str) -> dict[str, str]:
    return {given: text for given, text in SASL.items() if given != name}


@pytest.mark.parametrize("name", ["kafka_sasl_mechanism", "kafka_sasl_username", "kafka_sasl_password"])
def test_sasl_needs_a_mechanism_a_name_and_a_password(name: str) -> None:
    variable = f"FENCEPOST_{name.upper()}"
    expected = f"FENCEPOST_KAFKA_SECURITY_PROTOCOL=SASL_PLAINTEXT needs {variable}: set it"
    assert lines(**without(name)) == [expected]
    (line,) = lines(**{name: SASL[name]})
    assert line.startswith(f"{variable} means nothing with FENCEPOST_KAFKA_SECURITY_PROTOCOL=PLAINTEXT: set SASL_SSL")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kafka_security_protocol", "TLS"),
        ("kafka_sasl_mechanism", "GSSAPI"),
        ("kafka_sasl_username", "a\nb"),
        ("kafka_ssl_check_hostname", "no"),
    ],
)
def test_a_wrong_choice_is_reported_with_the_choices(name: str, text: str) -> None:
    (line,) = lines(**{name: text})
    assert line.startswith(f"FENCEPOST_{name.upper()}={text!r} is wrong: set ")


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush \n")
    given = without("kafka_sasl_password")
    assert read(**given, kafka_sasl_password_file=str(file)).kafka_sasl_password == "hush "
    (line,) = lines(**SASL, kafka_sasl_password_file=str(file))
    assert line == (
        "FENCEPOST_KAFKA_SASL_PASSWORD and FENCEPOST_KAFKA_SASL_PASSWORD_FILE are both set: set one of them"
    )
    file.write_text("\n")
    (line,) = lines(**given, kafka_sasl_password_file=str(file))
    assert line.endswith("is empty: put the secret into it")
    (line,) = lines(**given, kafka_sasl_password_file=str(tmp_path / "none"))
    assert line.endswith("/none' cannot be read (No such file or directory): set a file that has it")
    file.write_text("rediss://:hush@localhost\n")
    assert read(redis_file=str(file)).redis == "rediss://:hush@localhost"


def test_a_secret_in_a_file_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    settings = read(**without("kafka_sasl_password"), kafka_sasl_password_file=str(file))
    file.write_text("second\n")
    assert (settings.kafka_sasl_password, settings.secret("kafka_sasl_password")) == ("first", "second")
    file.write_text("a\nb\n")
    with pytest.raises(SettingsError, match=r"FENCEPOST_KAFKA_SASL_PASSWORD_FILE=.* is wrong: set printable"):
        settings.secret("kafka_sasl_password")
    assert read(**SASL).secret("kafka_sasl_password") == "hush"


OAUTH: Final = {"kafka_security_protocol": "SASL_PLAINTEXT", "kafka_sasl_mechanism": "OAUTHBEARER"}
CLIENT: Final = {
    "kafka_oauth_token_url": "https://login.example/token?api=2",
    "kafka_oauth_client_id": "me",
    "kafka_oauth_client_secret": "hush",
}


def test_oauthbearer_needs_one_source_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a.b.c")
    by_file = {"kafka_oauth_token_file": str(file)}
    by_region = {"kafka_oauth_aws_region": "eu-central-1"}
    for source in (CLIENT, by_file, by_region):
        assert read(**OAUTH, **source).kafka_oauth
    needs = "FENCEPOST_KAFKA_SASL_MECHANISM=OAUTHBEARER needs one source of tokens"
    choice = "set one of FENCEPOST_KAFKA_OAUTH_TOKEN_URL, FENCEPOST_KAFKA_OAUTH_TOKEN_FILE, FENCEPOST_KAFKA_OAUTH_AWS"
    (line,) = lines(**OAUTH)
    assert line.startswith(f"{needs}: {choice}")
    (line,) = lines(**OAUTH, **by_file, **by_region)
    assert line.startswith(f"{needs} and has several: {choice}")
    file.unlink()
    (line,) = lines(**OAUTH, **by_file)
    assert line.endswith("cannot be read (No such file or directory): set a file that has the token")


def test_a_token_endpoint_needs_a_client_and_means_nothing_for_other_mechanisms() -> None:
    url = "FENCEPOST_KAFKA_OAUTH_TOKEN_URL"
    assert lines(**OAUTH, kafka_oauth_token_url=CLIENT["kafka_oauth_token_url"]) == [
        f"{url} needs FENCEPOST_KAFKA_OAUTH_CLIENT_ID: set it",
        f"{url} needs FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET: set it",
    ]
    (line,) = lines(**OAUTH, kafka_oauth_aws_region="eu-central-1", kafka_oauth_scope="kafka")
    assert line == f"FENCEPOST_KAFKA_OAUTH_SCOPE means nothing without {url}: leave FENCEPOST_KAFKA_OAUTH_SCOPE empty"
    (line,) = lines(**SASL, kafka_oauth_client_id="me")
    assert line.startswith("FENCEPOST_KAFKA_OAUTH_CLIENT_ID means nothing without FENCEPOST_KAFKA_SASL_MECHANISM=OAUTH")
    (line,) = lines(**OAUTH, **CLIENT, kafka_sasl_password="hush")
    assert line.startswith(
        "FENCEPOST_KAFKA_SASL_PASSWORD means nothing with FENCEPOST_KAFKA_SASL_MECHANISM=OAUTHBEARER"
    )
    (line,) = lines(**OAUTH, **CLIENT | {"kafka_oauth_token_url": "http://h/t"}, kafka_oauth_cafile="/none")
    assert line.startswith("FENCEPOST_KAFKA_OAUTH_CAFILE means nothing without TLS")
    (line,) = lines(**OAUTH, **CLIENT, kafka_oauth_cafile="/none")
    assert line.startswith("FENCEPOST_KAFKA_OAUTH_CAFILE='/none' cannot be used")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kafka_oauth_token_url", "login.example/token"),
        ("kafka_oauth_token_url", "ftp://login.example/token"),
        ("kafka_oauth_token_url", "https://me:hush@login.example/token"),
        ("kafka_oauth_token_url", "https://login.example/token#part"),
        ("kafka_oauth_aws_region", "Frankfurt!"),
        ("kafka_oauth_extensions", "logicalCluster"),
        ("kafka_oauth_extensions", "auth=x"),
        ("kafka_oauth_extensions", "a=b,"),
        ("kafka_oauth_extensions", "a1=b"),
        ("kafka_oauth_extensions", "a=b\x01"),
    ],
)
def test_a_wrong_part_of_oauthbearer_is_reported(name: str, text: str) -> None:
    (line,) = lines(**{name: text})
    assert line.startswith(f"FENCEPOST_{name.upper()}={text!r} is wrong: set ")


def test_extensions_are_pairs() -> None:
    given = read(**OAUTH, **CLIENT, kafka_oauth_extensions="logicalCluster=lkc-1,identityPoolId=pool-1=x")
    assert given.kafka_oauth_extensions_by_name == {"logicalCluster": "lkc-1", "identityPoolId": "pool-1=x"}
    assert read().kafka_oauth_extensions_by_name == {}


def test_files_for_tls_need_tls() -> None:
    for name in ("kafka_ssl_cafile", "kafka_ssl_certfile", "kafka_ssl_keyfile"):
        (line,) = lines(**{name: "/a/file"})
        assert line.startswith(f"FENCEPOST_{name.upper()} means nothing with FENCEPOST_KAFKA_SECURITY_PROTOCOL=PLAIN")
    for name in ("redis_cafile", "redis_certfile", "redis_keyfile"):
        (line,) = lines(**{name: "/a/file"})
        assert line.startswith(f"FENCEPOST_{name.upper()} means nothing without TLS: set FENCEPOST_REDIS=rediss://")


@pytest.mark.parametrize(
    ("prefix", "tls"), [("kafka_ssl", {"kafka_security_protocol": "SSL"}), ("redis", {"redis": "rediss://localhost"})]
)
def test_tls_files_that_do_not_match_are_reported(
    tmp_path: Path, authority: Authority, prefix: str, tls: dict[str, str]
) -> None:
    mine, other = authority.issue(f"{prefix}-mine"), authority.issue(f"{prefix}-other")
    cert, key, old = str(mine.certfile), str(mine.keyfile), str(tmp_path / "old.key")
    subprocess.run(["openssl", "ec", "-in", key, "-out", old], check=True, capture_output=True)

    def faults(cafile: str = "", certfile: str = "", keyfile: str = "") -> str:
        (line,) = lines(
            **tls, **{f"{prefix}_cafile": cafile, f"{prefix}_certfile": certfile, f"{prefix}_keyfile": keyfile}
        )
        return line.replace(f"FENCEPOST_{prefix.upper()}", "")

    read(**tls, **{f"{prefix}_cafile": str(authority.cafile), f"{prefix}_certfile": cert, f"{prefix}_keyfile": key})
    assert faults(cafile="/none") == (
        "_CAFILE='/none' cannot be used (No such file or directory): set a PEM file of certificates"
    )
    assert faults(cafile=key).startswith("_CAFILE=")
    assert faults(certfile=cert) == "_CERTFILE needs _KEYFILE: set both, or neither"
    assert faults(keyfile=key) == "_KEYFILE needs _CERTFILE: set both, or neither"
    assert "key values mismatch" in faults(certfile=cert, keyfile=str(other.keyfile))
    assert "is not PKCS #8: set what `openssl pkcs8 -topk8 -nocrypt` makes of it" in faults(certfile=cert, keyfile=old)


def test_the_files_of_https_are_checked_together(authority: Authority) -> None:
    mine, other = authority.issue("https-mine"), authority.issue("https-other")
    cert, key = str(mine.certfile), str(mine.keyfile)
    made = read(http_tls_certfile=cert, http_tls_keyfile=key, http_tls_client_cafile=str(authority.cafile)).http_tls
    assert made is not None
    assert (made.files, made.client_required) == ([cert, key, str(authority.cafile)], True)
    assert read().http_tls is None
    assert lines(http_tls_certfile=cert) == [
        "FENCEPOST_HTTP_TLS_CERTFILE needs FENCEPOST_HTTP_TLS_KEYFILE: set both, or neither"
    ]
    (line,) = lines(http_tls_certfile=cert, http_tls_keyfile=str(other.keyfile))
    assert "key values mismatch" in line
    (line,) = lines(http_tls_client_cafile=str(authority.cafile))
    assert line.startswith(
        "FENCEPOST_HTTP_TLS_CLIENT_CAFILE means nothing without TLS: set FENCEPOST_HTTP_TLS_CERTFILE"
    )
    (line,) = lines(http_tls_certfile=cert, http_tls_keyfile=key, http_tls_client_cafile="/none")
    assert line.startswith("FENCEPOST_HTTP_TLS_CLIENT_CAFILE='/none' cannot be used (No such file or directory)")


def test_a_management_port_is_another_one() -> None:
    assert lines(port="9000", management_port="9000") == [
        "FENCEPOST_MANAGEMENT_PORT=9000 is FENCEPOST_PORT too: set another, or 0 for one port"
    ]
    (line,) = lines(management_host="127.0.0.1")
    assert line.startswith("FENCEPOST_MANAGEMENT_HOST means nothing without a port: set FENCEPOST_MANAGEMENT_PORT")


def test_a_wrong_setting_hides_no_conflict_of_others_whose_names_begin_with_its_name() -> None:
    wrong = lines(kafka="h", kafka_sasl_username="a", redis="h", redis_cafile="ca.crt")
    assert [line.split("=")[0].split(" ")[0] for line in wrong] == [
        "FENCEPOST_KAFKA",
        "FENCEPOST_REDIS",
        "FENCEPOST_KAFKA_SASL_USERNAME",
    ]  # that the file means nothing without TLS depends on REDIS


def test_all_wrong_settings_are_reported_at_once() -> None:
    assert len(lines(port="x", slots="x", kafka="x")) == 3
    port, slots = lines(port="x", slots="9", slots_max="4")
    assert port.startswith("FENCEPOST_PORT=")
    assert slots.startswith("FENCEPOST_SLOTS=9 is more than")
    (wrong,) = lines(slots="9", slots_max="x")
    assert wrong.startswith("FENCEPOST_SLOTS_MAX='x' is wrong")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("SLOT", "SLOTS"), ("KEY_TTL", "KEY_TTL_S"), ("RULE", "RULES"), ("REDIS_FLE", "REDIS_FILE")],
)
def test_a_variable_that_was_meant_to_be_a_setting_is_not_passed_over(name: str, meant: str) -> None:
    """A misspelt setting would have no effect, and no message."""
    assert lines(**{name.lower(): "7"}) == [f"FENCEPOST_{name} is no setting: set FENCEPOST_{meant} instead"]
    read(**{name.lower(): ""})


def test_variables_of_others_are_left_alone() -> None:
    others = {"FENCEPOST_SERVICE_HOST": "10.0.0.1", "FENCEPOST_PORT_8000_TCP": "x", "FENCEPOST_LOCAL_DIR": "x"}
    assert Settings.from_env({**others, "SLOT": "x"}) == Settings()
    everything = dict.fromkeys(Settings.variables(), "x")
    with pytest.raises(SettingsError) as raised:  # "x" is not a number
        SharedSettings.from_env(everything)
    assert "is no setting" not in str(raised.value), "the job would take a setting of the service for its own"


def test_a_key_must_outlive_its_write() -> None:
    (line,) = lines(key_ttl_s="199")
    assert line.startswith("FENCEPOST_KEY_TTL_S=199 is too short")
    assert "set 200 or more" in line
    assert read(key_ttl_s="200").key_ttl_s == 200
    assert read(key_ttl_s="315360000").key_ttl_s == 315_360_000
    (line,) = lines(key_ttl_s="315360001")
    assert line == "FENCEPOST_KEY_TTL_S='315360001' is wrong: set an integer from 1 to 315360000"
    assert read(key_ttl_s="61", request_timeout_ms="5000", transaction_timeout_ms="1000").key_ttl_s == 61


def test_more_slots_than_slots_max_are_reported() -> None:
    (line,) = lines(slots="5", slots_max="4")
    assert line == "FENCEPOST_SLOTS=5 is more than FENCEPOST_SLOTS_MAX=4: set FENCEPOST_SLOTS to 4 or less"


def test_a_host_that_makes_no_name_needs_an_instance() -> None:
    (line,) = lines(host="fe80::1%eth0")
    assert line.startswith("FENCEPOST_INSTANCE is needed")
    assert read(host="fe80::1%eth0", instance="a").name == "a"


def test_traces_without_their_packages_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tracing="otlp").tracing == "otlp"
    assert lines(tracing="on") == ["FENCEPOST_TRACING='on' is wrong: set one of off, otlp"]

    def lacking(name: str) -> None:
        raise ModuleNotFoundError(name)

    for find in (lacking, lambda name: None):
        monkeypatch.setattr("service.core.settings.find_spec", find)
        assert lines(tracing="otlp") == [
            "FENCEPOST_TRACING=otlp needs packages that are not here: install fencepost[tracing]"
        ]
        assert read().tracing == "off"


def test_the_words_of_the_log() -> None:
    settings = read(log_format="json", log_keys="plain")
    assert (settings.log_format, settings.log_keys) == ("json", "plain")
    assert lines(log_keys="none") == ["FENCEPOST_LOG_KEYS='none' is wrong: set one of hashed, plain"]


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"registry": "http://127.0.0.1:8081/apis/ccompat/v7/"}, []),
        ({"registry": "https://r", "registry_username": "a", "registry_password": "b"}, []),
        ({"registry": "https://r", "registry_token": "a.b-c=="}, []),
        ({"registry": "r:8081"}, ["FENCEPOST_REGISTRY='r:8081' is wrong: set http://host:port/path or https://…"]),
        ({"registry": "ftp://r"}, ["FENCEPOST_REGISTRY='ftp://r' is wrong: set http://host:port/path"]),
        ({"registry": "http://a:b@r"}, ["FENCEPOST_REGISTRY='http://a:b@r' is wrong: set http://host:port/path"]),
        ({"registry": "http://r:0"}, ["FENCEPOST_REGISTRY='http://r:0' is wrong"]),
        ({"registry": "http://r?a=b"}, ["FENCEPOST_REGISTRY='http://r?a=b' is wrong"]),
        (
            {"registry_username": "a"},
            ["FENCEPOST_REGISTRY_USERNAME means nothing without FENCEPOST_REGISTRY: set", "F"],
        ),
        (
            {"registry": "http://r", "registry_username": "a"},
            ["FENCEPOST_REGISTRY_USERNAME and FENCEPOST_REG"],
        ),
        (
            {"registry": "http://r", "registry_username": "a", "registry_password": "b", "registry_token": "c"},
            ["FENCEPOST_REGISTRY_TOKEN and FENCEPOST_REGISTRY_PASSWORD are both set"],
        ),
        ({"registry": "http://r", "registry_token": "a b"}, ["FENCEPOST_REGISTRY_TOKEN is wrong: set letters"]),
        (
            {"registry": "http://r", "registry_cafile": "x"},
            ["FENCEPOST_REGISTRY_CAFILE means nothing without TLS: set FENCEPOST_REGISTRY=https://…"],
        ),
        ({"registry": "https://r", "registry_cafile": "none"}, ["FENCEPOST_REGISTRY_CAFILE='none' cannot be used"]),
        ({"registry_register": "no"}, ["FENCEPOST_REGISTRY_REGISTER='no' is wrong: set true or false"]),
    ],
)
def test_settings_of_the_schema_registry(settings: dict[str, str], wrong: list[str]) -> None:
    if not wrong:
        assert not read(**settings).registry.endswith("/")
        return
    found = lines(**settings)
    assert len(found) == len(wrong)
    assert all(line.startswith(start) for line, start in zip(found, wrong, strict=True))


def test_the_schema_registry_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.core.settings.find_spec", lambda name: None)
    assert lines(registry="http://r") == [
        "FENCEPOST_REGISTRY needs packages that are not here: install fencepost[registry]"
    ]
    assert read().registry == ""
