"""Tests the order of choice of ports, Redis servers and Java runtimes."""

import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from deploy import places
from deploy.install import debian, java
from deploy.local.up import callers_settings
from deploy.stack import StackError, free_port, port_or_free
from deploy.stack.redis import find_server
from tests import broker_classes


def _program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def _java(home: Path, version: str) -> Path:
    _program(home / "bin" / "java", f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    return home.resolve()


def test_a_wanted_port_is_taken_where_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_or_free(port) != port
    assert port_or_free(port) == port


def test_a_port_is_promised_to_one_stack_only() -> None:
    port = free_port()
    assert port_or_free(port) != port
    other = f"from deploy.stack import port_or_free; print(port_or_free({port}))"
    found = subprocess.run([sys.executable, "-c", other], stdout=subprocess.PIPE, cwd=places.ROOT, check=True)
    assert int(found.stdout) != port


def test_the_second_port_of_a_server_is_reserved_with_the_first_and_is_never_one_of_an_outgoing_connection() -> None:
    ports = [free_port(10_000) for _ in range(20)]
    assert all(port_or_free(port + 10_000) != port + 10_000 for port in ports)
    assert max(ports) + 10_000 < 32_768


def test_redis_is_the_named_one_then_the_one_on_path_then_the_one_in_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = _program(tmp_path / "named")
    on_path = _program(tmp_path / "bin" / "redis-server")
    monkeypatch.setenv("FENCEPOST_REDIS_SERVER", str(named))
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_server() == str(named)
    monkeypatch.delenv("FENCEPOST_REDIS_SERVER")
    assert find_server() == str(on_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(find_server()).name == "valkey-server"


def test_a_named_redis_that_is_not_there_is_an_error_and_no_other_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_REDIS_SERVER", "/no/such/redis-server")
    with pytest.raises(StackError, match="FENCEPOST_REDIS_SERVER=/no/such/redis-server"):
        find_server()


@pytest.mark.parametrize(
    ("text", "major"), [("1.8.0_402", 8), ("11.0.22", 11), ("17.0.15", 17), ("21", 21), ("25-ea", 25)]
)
def test_the_version_of_a_java_is_read(tmp_path: Path, text: str, major: int) -> None:
    assert java.version_of(_java(tmp_path, text)) == major


def test_a_java_home_that_is_broken_or_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = _java(tmp_path / "good", "17.0.1")
    monkeypatch.setenv("PATH", f"{good / 'bin'}:/usr/bin:/bin")
    for bad in (tmp_path / "none", _java(tmp_path / "old", "11.0.22")):
        monkeypatch.setenv("JAVA_HOME", str(bad))
        assert java.find() == good
    other = _java(tmp_path / "other", "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(other))
    assert java.find() == other


def test_a_tested_java_is_preferred_to_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = _java(tmp_path / "good", "17.0.1")
    monkeypatch.setenv("PATH", f"{good / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "newest", "99")))
    assert java.find() == good


def test_without_any_java_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # without apt-get too
    monkeypatch.setattr(java, "_USUAL", ())
    java.home.cache_clear()
    with pytest.raises(StackError, match=r"no Java 17 or newer here: please install one .* or set JAVA_HOME") as raised:
        java.home()
    assert "\n" not in str(raised.value)


def test_before_java_is_installed_a_line_says_so_and_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = _java(tmp_path, "17.0.1")
    said = []

    def install(package: str, what: str) -> None:
        said.append(capsys.readouterr().err)
        monkeypatch.setattr(java, "find", lambda: installed)

    monkeypatch.setattr(java, "find", lambda: None)
    monkeypatch.setattr(debian, "installable", lambda: True)
    monkeypatch.setattr(debian, "install", install)
    java.home.cache_clear()
    try:
        assert java.home() == installed
    finally:
        java.home.cache_clear()
    assert said == [
        "no Java 17 or newer found: installing openjdk-17-jre-headless by apt-get. "
        "To do without, stop here and set JAVA_HOME to the folder of a Java 17 or newer.\n"
    ]


def test_up_takes_the_callers_settings_but_no_address_and_no_password() -> None:
    ours = dict.fromkeys(
        (
            "FENCEPOST_KAFKA",
            "FENCEPOST_KAFKA_SECURITY_PROTOCOL",
            "FENCEPOST_KAFKA_SASL_PASSWORD_FILE",
            "FENCEPOST_REDIS",
        ),
        "another's",
    )
    assert callers_settings({**ours, "FENCEPOST_SLOTS": "2", "HOME": "/"}) == {"FENCEPOST_SLOTS": "2"}


def test_recorded_classes_are_those_of_one_java_and_its_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_CACHE", str(tmp_path))
    assert broker_classes.options() == []
    broker_classes.archive().touch()
    assert broker_classes.options() == [f"-XX:SharedArchiveFile={broker_classes.archive()}", "-Xshare:auto"]
    monkeypatch.setattr(java, "home", lambda: _java(tmp_path / "another", "21"))
    assert broker_classes.options() == []


def test_a_java_that_records_nothing_keeps_no_test_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FENCEPOST_CACHE", str(tmp_path))
    monkeypatch.setattr(broker_classes, "record", Mock(side_effect=StackError("no such option")))
    assert broker_classes.main() == 0
    assert "brokers will start more slowly: no such option" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
