"""Tests `fencepost` as a person or a script runs it, beside a running service."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import places
from deploy.stack import Kafka, Redis, Service
from service.cli import main
from service.contract.wire.ids import event_id
from tests.conftest import MakeTopic
from tests.integration.client import Asked, Client
from tests.integration.conftest import SETTINGS


def fencepost(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        env={**places.hermetic_environment(), **environment},
        cwd=places.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def printed(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Run a command with --json; returns its document."""
    done = fencepost(environment, *arguments, "--json")
    assert done.stderr == ""
    return json.loads(done.stdout)  # type: ignore[no-any-return]


async def test_a_key_is_found_in_redis_and_in_the_ledger(served: Service, make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    async with Client() as client:
        attempt = await client.settle([served.url], Asked("order 1", topic, b"1"))
        batch = {"atomic": True, "events": [{"topic": topic, "value": n} for n in range(2)]}
        answer = await client.http.post(f"{served.url}/events/batch", json=batch, headers={"Idempotency-Key": "whole"})
        assert answer.status_code == 201, answer.text
    found = printed(served.env, "key", '"order 1"')
    assert (found["key"], found["id"]) == ("order 1", event_id("order 1").hex())
    (entry,) = found["ledger"]
    assert attempt.place == (topic, 0, entry["record_offset"])
    assert found["redis"]["state"] == "delivered"
    assert (entry["topic"], entry["timestamp"]) == (topic, found["redis"]["timestamp"])

    whole = printed(served.env, "key", "whole")
    assert whole["redis"]["members"] == 2
    assert [one["member"] for one in whole["ledger"]] == [0, 1]
    assert printed(served.env, "key", "whole", "--member", "1")["ledger"] == whole["ledger"][1:]

    text = fencepost(served.env, "key", "order 1")
    assert text.returncode == 0
    assert f"delivered: {topic}[0] offset {entry['record_offset']}" in text.stdout


async def test_an_unknown_key_exits_with_1_and_proves_nothing(served: Service) -> None:
    done = fencepost(served.env, "key", "never sent")
    assert done.returncode == 1
    assert "Only a POST with this key proves" in done.stdout
    found = printed(served.env, "key", "never sent", "--scope", "somebody")
    assert found["id"] == event_id("never sent", "somebody").hex()
    assert (found["redis"], found["ledger"]) == (None, [])
    assert fencepost(served.env, "key", "ü").returncode == 2


async def test_slots_are_shown_with_their_owners(served: Service, redis: Redis) -> None:
    found = printed(served.env, "slots")
    assert len(found["slots"]) == int(SETTINGS["FENCEPOST_SLOTS_MAX"])
    held = [slot for slot in found["slots"] if slot["state"] == "held"]
    assert len(held) == int(SETTINGS["FENCEPOST_SLOTS"])
    with redis.client() as store:
        freed = store.hgetall(f"{{{served.env['FENCEPOST_NAMESPACE']}:0}}f")
    for slot in held:
        assert slot["owner"] == slot["begun_by"] == f"127.0.0.1:{served.port}"
        assert slot["term"] == slot["freed"] == int(freed[str(slot["slot"]).encode()])
        assert 0 < slot["lease_ms"] <= int(SETTINGS["FENCEPOST_LEASE_TTL_MS"])
        assert slot["term"] <= slot["applied"] < slot["ledger_end"]
        assert slot["producer_id"] >= 0
    first, _, *rows, last = fencepost(served.env, "slots").stdout.splitlines()
    assert first.startswith(f"generation {found['generation']}, store ")
    assert [row.split()[0] for row in rows] == [str(slot["slot"]) for slot in held]
    assert last == f"{len(found['slots']) - len(held)} of {len(found['slots'])} slots are free"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_slots_command_without_a_ledger_exits_with_2(
    kafka: Kafka, redis: Redis, namespace: str, form: list[str]
) -> None:
    environment = {"FENCEPOST_KAFKA": kafka.bootstrap, "FENCEPOST_REDIS": redis.url, "FENCEPOST_NAMESPACE": namespace}
    done = fencepost(environment, "slots", *form)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"there is no topic {namespace}.ledger: the first start of the service makes it\n"


class Served(Service):
    """Runs `fencepost serve` instead of `python -m service`."""

    def start(self, wait_ready: bool = True, timeout_s: float = 60.0) -> None:
        environment = {**places.hermetic_environment(), **self.env}
        self.spawn([sys.executable, "-m", "service.cli", "serve"], env=environment, cwd=places.ROOT)
        self.wait_ready(timeout_s)


def test_serve_serves_and_stops_as_the_service_does(kafka: Kafka, redis: Redis, namespace: str, tmp_path: Path) -> None:
    environment = {**SETTINGS, "FENCEPOST_NAMESPACE": namespace}
    with Served(tmp_path, kafka=kafka.bootstrap, redis=redis.url, env=environment) as service:
        assert service.ready()
    assert service.exit_code == 0


def status_of(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *arguments: str) -> object:
    """Run a command that ends at its settings or arguments, in this process; returns its exit status."""
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["fencepost", *arguments])
        try:
            return main()
        except SystemExit as ended:
            return ended.code


WRONG: list[tuple[dict[str, str], str]] = [
    ({"FENCEPOST_PORT": "http"}, r"FENCEPOST_PORT='http' is wrong: set an integer from 1 to 65535\n"),
    (
        {"FENCEPOST_REDIS": "redis://:hush@127.0.0.1/0?nonsense=1"},
        r"FENCEPOST_REDIS is wrong: set after its \? only .*\n",
    ),
]


@pytest.mark.parametrize(("environment", "line"), WRONG, ids=["port", "redis"])
@pytest.mark.parametrize("command", ["serve", "slots", "doctor"])
def test_a_wrong_setting_is_one_line(
    command: str,
    environment: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of(monkeypatch, environment, command) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(line, output.err)


def test_a_process_with_a_wrong_setting_ends_with_one_line() -> None:
    environment, line = WRONG[0]
    done = fencepost(environment, "serve")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(line, done.stderr)


@pytest.mark.parametrize("rate", ["-1", "inf", "nan"])
def test_a_rate_is_a_number_of_events(
    rate: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, {}, "doctor", "--rate", rate) == 2
    assert "--rate" in capsys.readouterr().err


def test_an_unreachable_kafka_and_redis_are_reported_in_one_line() -> None:
    away = {
        "FENCEPOST_KAFKA": "127.0.0.1:1",
        "FENCEPOST_REDIS": "redis://127.0.0.1:1",
        "FENCEPOST_REQUEST_TIMEOUT_MS": "500",
    }
    done = fencepost(away, "slots")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "run `fencepost doctor` for details" in done.stderr


def test_the_command_reconcile_runs_the_job() -> None:
    done = fencepost({}, "reconcile", "--help")
    assert done.returncode == 0
    assert "usage: python -m spark" in done.stdout
    done = fencepost({}, "reconcile", "--lake", "x")
    assert done.returncode == 2
    assert "--report" in done.stderr


def test_the_command_audit_has_the_commands_of_the_job() -> None:
    done = fencepost({}, "audit", "findings", "--lake", "x", "--format", "parquet")
    assert done.returncode == 2
    assert "argument --output: give it with --format parquet" in done.stderr


@pytest.mark.parametrize(
    ("missing", "arguments", "remedy"),
    [
        ("pyspark", ["audit", "run"], "pip install 'fencepost[spark]'"),
        ("rich", ["slots"], "pip install 'fencepost[service]'"),
    ],
)
def test_a_missing_optional_dependency_is_named_with_its_remedy(
    missing: str, arguments: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert status_of(monkeypatch, {}, *arguments) == 2
    assert remedy in capsys.readouterr().err
