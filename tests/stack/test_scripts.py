"""Tests the scripts: an error is one message, and a signal stops them at any time."""

import signal
import subprocess
import sys
from collections.abc import Mapping
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
    caller = tmp_path / "caller"
    caller.mkdir()
    project = Project(tmp_path / "project")
    done = project.source(f'pwd && printenv "{name}"', {name: given}, cwd=caller)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [str(project.folder), meant.format(caller=caller)]


# A uv that finds the Pythons in PYTHONS; it has installed everything, unless LACKS has its error message.
_UV = """#!/bin/bash
case "$*" in
  *--check*) [[ -z $LACKS ]] ;;
  sync*) echo "$LACKS" >&2; [[ $LACKS != fails* ]] ;;
  *'find '*'<3.13') [[ $PYTHONS == *other* ]] && echo /other/python ;;
  *'find '*) [[ $PYTHONS == *tested* ]] && echo /tested/python ;;
esac
"""


class Project:
    """A project with the real bootstrap and a uv that installs nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        scripts = {".venv/bin/python": "#!/bin/sh\n", "bin/uv": _UV}
        bootstrap = Path("deploy", "local", "bootstrap")
        files = {str(bootstrap): (places.ROOT / bootstrap).read_text(), ".venv/pyvenv.cfg": ""}
        files["pyproject.toml"] = 'requires-python = ">=3.11,<3.13"\n'
        for name, text in (scripts | files).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def source(
        self, then: str, environment: Mapping[str, str], cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Source the bootstrap and then run a command, with only this environment."""
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        return subprocess.run(
            ["bash", "-c", f'source "{self.folder}/deploy/local/bootstrap" && {then}'],
            capture_output=True,
            text=True,
            cwd=cwd or self.folder,
            env={"PATH": path, "HOME": str(self.folder), **environment},
            check=False,
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_requests_to_this_machine_bypass_a_proxy_beside_the_caller_s_exceptions(name: str, project: Project) -> None:
    given = {"http_proxy": "http://127.0.0.1:1", name: "intranet.example"}
    done = project.source("printenv no_proxy NO_PROXY", given)
    assert done.stdout.splitlines() == ["intranet.example,127.0.0.1,localhost,::1"] * 2
    assert project.source("printenv no_proxy", {}).stdout.strip() == "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("pythons", "given", "taken"),
    [
        ("tested other", {}, ""),
        ("other", {}, "/other/python"),
        ("", {}, ""),  # uv fetches the tested one
        ("other", {"UV_PYTHON": "/callers/python"}, "/callers/python"),
    ],
)
def test_a_python_that_is_here_and_will_do_is_taken_where_the_tested_one_is_not(
    pythons: str, given: dict[str, str], taken: str, project: Project
) -> None:
    done = project.source('echo "$UV_PYTHON"', {"PYTHONS": pythons, "LACKS": "all", **given})
    assert done.stdout.strip() == taken


def test_a_failed_install_ends_with_one_line_that_says_what_to_do(project: Project) -> None:
    reason_given = "fails: error sending request"
    done = project.source("echo on", {"LACKS": reason_given, "https_proxy": "http://127.0.0.1:1"})
    assert (done.returncode, done.stdout) == (1, "")
    *_, reason, last = done.stderr.splitlines()
    assert reason == reason_given
    assert last == (
        "the Python packages could not be installed into .venv, for the reason above: please see to the network and "
        "the proxy that is set, http://127.0.0.1:1, and start again"
    )
    assert "and the proxy" not in project.source("echo on", {"LACKS": reason_given}).stderr


def test_a_venv_that_is_none_is_left_to_its_owner_with_one_line_that_says_so(project: Project) -> None:
    (project.folder / ".venv" / "pyvenv.cfg").unlink()
    done = project.source("echo on", {"LACKS": "all"})
    assert (done.returncode, done.stdout) == (1, "")
    why = "is no Python environment, so uv does not replace it: please remove it, and start again"
    assert done.stderr == f"{project.folder}/.venv {why}\n"
    assert (project.folder / ".venv" / "bin" / "python").exists()
