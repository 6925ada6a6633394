"""Tests the log: its formats, one line for each incident, and hashed keys."""

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Final
from unittest.mock import Mock

import pytest
import structlog

from deploy.places import ROOT
from service.core.logs import (
    CHANGED_PAUSE_S,
    Incident,
    ThreadedHandler,
    dropped_lines,
    hash_key,
    last_line,
    stderr_handler,
)
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, StoreAway
from tests.integration.plan import until
from tests.unit.scrape import sample

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


# Logs 10 MB, reports that on its standard output, and logs a last line after the next line of its standard input.
FLOOD: Final = """
import sys, structlog
from service.core import logs
logs.configure_logging("json", "hashed")
logs.LAST_LINES_S = float(sys.argv[1])
log = structlog.get_logger("service.test")
for n in range(1_000):
    log.info("flood", n=n, of="x" * 10_000)
print("not blocked", flush=True)
sys.stdin.readline()
log.info("last")
"""
FORK: Final = """
import os, sys, structlog
from service.core import logs
logs.configure_logging("json", "hashed")
log = structlog.get_logger("service.test")
log.info("before")
if os.fork() == 0:
    log.info("in the fork")
    sys.exit()
os.wait()
log.info("after")
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


# ------------------------------------------------------------------------------------ a log that nobody reads


def flooding(last_lines_s: float) -> "subprocess.Popen[bytes]":
    """Start a process that floods its log; return when it has, which it must whether or not its log is read."""
    command = [sys.executable, "-c", FLOOD, f"{last_lines_s}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT)
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], 20)[0]:
        process.kill()
    assert process.stdout.readline() == b"not blocked\n"
    return process


def test_who_logs_does_not_wait_for_a_log_that_is_not_read_and_dropped_lines_are_told() -> None:
    with flooding(20) as process:
        _, read = process.communicate(b"\n", timeout=30)
    *flood, notice, last = (json.loads(line) for line in read.splitlines())
    assert [line["n"] for line in flood] == list(range(len(flood)))  # the oldest, in their order
    assert 300 < len(flood) < 500  # 4 MiB, and what the pipe has
    assert (notice["event"], notice["lines"]) == (
        "lines of this log were dropped: nobody read it in time",
        1_000 - len(flood),
    )
    assert (notice["level"], notice["logger"], last["event"]) == ("warning", "service.core.logs", "last")


def test_a_process_ends_although_its_log_is_not_read() -> None:
    with flooding(0.05) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        process.stderr.close()


def test_a_forked_process_logs_on_and_repeats_no_line_of_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert sorted(json.loads(line)["event"] for line in done.stderr.splitlines()) == ["after", "before", "in the fork"]


class Piped:
    """A handler of the root logger, and its pipe."""

    def __init__(self) -> None:
        reading, self.descriptor = os.pipe()
        self.reader = os.fdopen(reading, "rb", buffering=0)
        self.handler = ThreadedHandler(self.descriptor)
        self.handler.setFormatter(logging.Formatter("%(message)s"))

    def read(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            found += self.reader.read(length - len(found))
        return found


@pytest.fixture
def piped() -> Iterator[Piped]:
    found = Piped()
    logging.getLogger().addHandler(found.handler)
    yield found
    logging.getLogger().removeHandler(found.handler)
    found.reader.close()
    found.handler.close()
    os.close(found.descriptor)


def test_lines_whose_reader_is_gone_are_counted(piped: Piped) -> None:
    piped.reader.close()
    for _ in range(3):
        last_line("lost")
    until(lambda: dropped_lines() == 3)
    assert sample(Telemetry(), "fencepost_log_lines_dropped_total") == 3


def test_a_descriptor_that_does_not_block_gets_the_whole_line(piped: Piped) -> None:
    """As a supervisor in Node.js may have made the pipe."""
    os.set_blocking(piped.descriptor, False)
    last_line("x" * 1_000_000)
    assert piped.read(1_000_001) == b"x" * 1_000_000 + b"\n"
    assert dropped_lines() == 0


def test_closing_writes_what_waits_and_a_later_line_is_written_too(piped: Piped) -> None:
    for text in ("first", "second"):
        logging.getLogger().warning("%s", text)
        piped.handler.close()
        assert piped.read(len(text) + 1).decode() == f"{text}\n"


def test_a_line_at_the_end_of_the_interpreter_needs_no_thread_and_does_not_wait(
    piped: Piped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a finalizer: "Task was destroyed but it is pending"."""
    with monkeypatch.context() as ending:
        ending.setattr(sys, "is_finalizing", lambda: True)
        last_line("x" * 10_000)
        assert piped.read(10_001) == b"x" * 10_000 + b"\n"
    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't create new thread")))
        last_line("first")
        assert piped.read(6) == b"first\n"
        last_line("y" * 1_000_000)  # more than a pipe has room for
    assert set(piped.read(65_536)) == set(b"y")
    last_line("written")
    notice = "lines of this log were dropped: nobody read it in time\n"
    assert piped.read(len(notice) + 8).decode() == f"{notice}written\n"


def test_a_standard_error_without_a_descriptor_is_written_to_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last_line("no settings")
    assert capsys.readouterr().err == "no settings\n"
    assert not isinstance(stderr_handler(), ThreadedHandler)
    monkeypatch.setattr(sys, "stderr", None)  # closed when the process began
    assert not isinstance(stderr_handler(), ThreadedHandler)


@pytest.fixture(autouse=True)
def _logging() -> Any:
    """Keep the tests from configuring this process's log."""
    before = list(logging.getLogger().handlers)
    yield
    assert logging.getLogger().handlers == before
