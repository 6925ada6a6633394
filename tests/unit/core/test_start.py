"""Tests errors that stop the service at its start: a line for each, which says what to set."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import service.__main__
from deploy import places


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("REDIS", "redis://h:notaport/0"),
        ("REDIS", "redis://h/0?nonsense=1"),
        ("NAMESPACE", "x" * 249),
        ("RULES", "rules.toml"),
        ("RULES", "x" * 300),
    ],
)
def test_a_wrong_setting_ends_the_start_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "rules.toml").write_text("topics = [1]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"FENCEPOST_{name}", text)
    monkeypatch.setattr(service.__main__, "build_router", Mock(side_effect=AssertionError("it was started")))
    assert service.__main__.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rules.toml:1: topics: write [[topics]]" if text == "rules.toml" else f"FENCEPOST_{name}")


def test_each_schema_and_secret_that_cannot_be_used_ends_the_start_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    of = 'topic = "t"\nidempotency_key = { pointer = "/id" }\nsignature = { scheme = "stripe", secret_files = ["s"] }\n'
    schema = '[[topics]]\npattern = "t"\nschema = "none.json"\n'
    (tmp_path / "rules.toml").write_text(schema + "".join(f'[[sources]]\nname = "{name}"\n{of}' for name in ("a", "b")))
    (tmp_path / "s").write_text("\n")
    monkeypatch.setenv("FENCEPOST_RULES", str(tmp_path / "rules.toml"))
    monkeypatch.setattr(service.__main__, "build_router", Mock(side_effect=AssertionError("it was started")))
    assert service.__main__.main() == 2
    about_schema, *about_secrets = capsys.readouterr().err.splitlines()
    assert about_schema.startswith(f"FENCEPOST_RULES: schema {tmp_path / 'none.json'} cannot be used: ")
    assert about_secrets == [
        f"FENCEPOST_RULES: source {name}: {tmp_path / 's'} is empty: put the secret into it" for name in ("a", "b")
    ]


def test_an_address_in_use_is_reported_with_its_settings_whatever_signal_comes_before() -> None:
    """A `kill -HUP` for changed rules, or a SIGUSR1, must not end a process whose imports are not done."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nobody = {"FENCEPOST_KAFKA": "127.0.0.1:1", "FENCEPOST_REDIS": "redis://127.0.0.1:1/0"}
        with subprocess.Popen(
            [sys.executable, "-m", "service"],
            env={**os.environ, **nobody, "FENCEPOST_PORT": str(port)},
            cwd=places.ROOT,
            stderr=subprocess.PIPE,
            text=True,
        ) as starting:
            try:
                until_it_ignores(starting.pid, signal.SIGHUP, signal.SIGUSR1)
                starting.send_signal(signal.SIGHUP)
                starting.send_signal(signal.SIGUSR1)
                _, errors = starting.communicate(timeout=30)
            finally:
                starting.kill()
    assert starting.returncode == 3
    message = f"FENCEPOST_HOST='127.0.0.1', FENCEPOST_PORT={port}: it cannot listen there; set"
    assert [line for line in errors.splitlines() if line.startswith(message)], errors


def until_it_ignores(pid: int, *signals: signal.Signals) -> None:
    """Wait until a process that has just been started ignores these signals (proc(5)), for 5 s at most."""
    wanted = sum(1 << (number - 1) for number in signals)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
        if int(ignored.split()[1], 16) & wanted == wanted:
            return
        time.sleep(0.002)


def test_mistakes_of_the_rules_are_reported_with_those_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[topics]]\npattern = ""\nguarantee = "twice"\n')
    for name, text in (("PORT", "x"), ("RULES", str(rules))):
        monkeypatch.setenv(f"FENCEPOST_{name}", text)
    assert service.__main__.main() == 2
    assert [line.partition(" ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "FENCEPOST_PORT='x'",
        f"{rules}:2:",
        f"{rules}:3:",
    ]


def test_rules_with_schemas_of_a_registry_need_its_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rules.toml").write_text('[[topics]]\npattern = "orders"\nregistry = { value = {} }\n')
    monkeypatch.setenv("FENCEPOST_RULES", str(tmp_path / "rules.toml"))
    monkeypatch.setattr(service.__main__, "build_router", Mock(side_effect=AssertionError("it was started")))
    assert service.__main__.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"{tmp_path / 'rules.toml'}: the topics 'orders' have schemas of a registry, and FENCEPOST_REGISTRY is not "
        "set: set the registry's URL"
    )
