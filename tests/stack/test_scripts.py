"""What the scripts have in common: an error is one message, and a signal stops them wherever they are."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import places

_IN_A_LOOP = """
import asyncio
from deploy.console import run, run_loop, say
def main() -> int:
    async def busy() -> None:
        say("up")
        while True:
            await asyncio.sleep(0)
    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(busy())
            group.create_task(busy())
    try:
        run_loop(both())
    finally:
        say("cleaned")
    return 0
run(main)
"""

_IN_A_CALL = """
import time
from deploy.console import run, say
def main() -> int:
    try:
        say("up")
        time.sleep(60)
    finally:
        say("cleaned")
    return 0
run(main)
"""

_FAILS = """
from deploy.console import StackError, run
def main() -> int:
    raise StackError("no luck today")
run(main)
"""


@pytest.mark.parametrize("code", [_IN_A_LOOP, _IN_A_CALL], ids=["in an event loop", "in a call"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_a_script_and_tells_in_its_exit_code(code: str, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=places.ROOT) as script:
        try:
            assert script.stdout is not None
            assert script.stdout.readline() == b"up\n"
            script.send_signal(number)
            output, _ = script.communicate(timeout=20)
        finally:
            script.kill()
    assert output.splitlines()[-1] == b"cleaned"
    assert script.returncode == 128 + number


def test_an_error_of_the_stack_is_its_text_and_exit_code_1() -> None:
    done = subprocess.run([sys.executable, "-c", _FAILS], capture_output=True, cwd=places.ROOT, check=False)
    assert (done.returncode, done.stderr) == (1, b"failed: no luck today\n")


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("FENCEPOST_LOCAL_DIR", "mine", "{caller}/mine"),
        ("FENCEPOST_LOCAL_DIR", "../my own", "{caller}/../my own"),
        ("FENCEPOST_LOCAL_DIR", "/mine", "/mine"),
        ("FENCEPOST_LOCAL_DIR", "~/mine", "~/mine"),
        ("FENCEPOST_LOCAL_DIR", "", ""),
        ("FENCEPOST_CACHE", "mine", "{caller}/mine"),
        ("FENCEPOST_RULES", "rules.toml", "{caller}/rules.toml"),
        ("FENCEPOST_REDIS_SERVER", "build/redis-server", "{caller}/build/redis-server"),
        ("FENCEPOST_REDIS_SERVER", "valkey-server", "valkey-server"),
    ],
)
def test_a_relative_path_is_the_callers_and_not_the_projects(name: str, given: str, meant: str, tmp_path: Path) -> None:
    project, caller = tmp_path / "project", tmp_path / "caller"
    caller.mkdir()
    bootstrap = project / "deploy" / "local" / "bootstrap"
    for stub in (project / ".venv" / "bin" / "python", project / "bin" / "uv"):  # nothing is installed
        stub.parent.mkdir(parents=True)
        stub.write_text("#!/bin/sh\n")
        stub.chmod(0o755)
    bootstrap.parent.mkdir(parents=True)
    bootstrap.write_text((places.ROOT / "deploy" / "local" / "bootstrap").read_text())
    environment = {"PATH": f"{project / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), name: given}
    done = subprocess.run(
        ["bash", "-c", f'source ../project/deploy/local/bootstrap && pwd && printenv "{name}"'],
        capture_output=True,
        text=True,
        cwd=caller,
        env=environment,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [str(project), meant.format(caller=caller)]
