"""Tests the log: its formats, one line for each incident, and hashed keys."""

import json
import logging
import os
import subprocess
import sys
from functools import cache
from typing import Any, Final

import pytest
import structlog

from deploy.places import ROOT
from service.core.logs import CHANGED_PAUSE_S, Incident, hash_key
from service.core.problems import KafkaAway, StoreAway

SAY: Final = """
import logging, sys, structlog
from service.core.logs import configure_logging
configure_logging(*sys.argv[1:])
log = structlog.get_logger("service.test")
log.warning("request failed", key="order-7", id="0a1b", status=500)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a bug")
    logging.getLogger("asyncio").error("a library's", exc_info=True)
"""


@cache
def said(form: str, keys: str) -> str:
    """Run a process with these settings; returns its log."""
    command = [sys.executable, "-c", SAY, form, keys]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment, timeout=60)
    assert done.stdout == ""
    return done.stderr


def test_json_logs_are_one_object_a_line_and_the_default_without_a_terminal() -> None:
    for form in ("json", "auto"):
        first, second, third = (json.loads(line) for line in said(form, "hashed").splitlines())
        assert first["event"] == "request failed"
        assert first["level"] == "warning"
        assert first["logger"] == "service.test"
        assert first["timestamp"].endswith("Z")
        assert first["status"] == 500
        for line in (second, third):
            assert line["exception"].startswith("Traceback")
            assert line["exception"].endswith("ZeroDivisionError: division by zero")
        assert (third["event"], third["logger"]) == ("a library's", "asyncio")


def test_a_console_gets_text_and_no_json() -> None:
    text = said("console", "hashed")
    assert "request failed" in text
    assert text.count("ZeroDivisionError: division by zero") == 2
    with pytest.raises(json.JSONDecodeError):
        json.loads(text.splitlines()[0])


def test_keys_are_hashed_to_the_events_id_unless_the_setting_says_plain() -> None:
    assert "order-7" not in said("json", "hashed")
    assert json.loads(said("json", "hashed").splitlines()[0])["key"] == "id:0a1b"
    assert json.loads(said("json", "plain").splitlines()[0])["key"] == "order-7"
    assert hash_key(None, "", {"event": "no key"}) == {"event": "no key"}
    assert hash_key(None, "", {"key": "order-7"}) == {"key": "id:None"}


def test_an_incident_logs_one_line_for_each_cause() -> None:
    with structlog.testing.capture_logs() as lines:
        incident = Incident(structlog.get_logger(), "not up yet")
        assert incident.end() == {}
        for _ in range(5):
            incident.add(KafkaAway("no broker"), slot=3)
        incident.add(StoreAway("no Redis"))
        incident.add(KafkaAway("no broker"))
        summary = incident.end()
        incident.add(StoreAway("again"))
    assert [(line["event"], line["why"], line.get("slot")) for line in lines] == [
        ("not up yet", "no broker", 3),
        ("not up yet", "no Redis", None),
        ("not up yet", "again", None),
    ]
    assert summary["failures"] == 7
    assert summary["failing_s"] >= 0


def test_a_new_cause_of_an_incident_is_logged_and_a_changing_one_only_now_and_then() -> None:
    """ "no permission", and then "wrong password": the second cause must be logged before the first incident ends."""
    now = 100.0
    with structlog.testing.capture_logs() as lines:
        incident = Incident(structlog.get_logger(), "not up yet", lambda: now)
        for why, after_s in (("no leave", 0.0), ("no leave", 60.0), ("wrong password", 1.0), ("wrong password", 60.0)):
            now += after_s
            incident.add(KafkaAway(why))
        assert [line["why"] for line in lines] == ["no leave", "wrong password"]
        for attempt in range(100):
            now += CHANGED_PAUSE_S / 10
            incident.add(KafkaAway(f"attempt {attempt}"))
        assert 10 <= len(lines) - 2 <= 11
        assert incident.end()["failures"] == 104


def test_an_unforeseen_error_is_logged_with_its_traceback() -> None:
    with structlog.testing.capture_logs() as lines:
        Incident(structlog.get_logger(), "no heartbeat").add(KeyError("x"), bug=True)
    (line,) = lines
    assert isinstance(line["exc_info"], KeyError)


def test_no_module_logs_a_key_itself() -> None:
    """A key is logged only in the field `key`, which is hashed, together with its id."""
    for path in (ROOT / "service").rglob("*.py"):
        for line in path.read_text().splitlines():
            if "log." in line:
                assert "key=" not in line, f"{path.name}: {line.strip()}"
                assert ".key" not in line, f"{path.name}: {line.strip()}"


@pytest.fixture(autouse=True)
def _logging() -> Any:
    """Keep the tests from configuring this process's log."""
    before = list(logging.getLogger().handlers)
    yield
    assert logging.getLogger().handlers == before
