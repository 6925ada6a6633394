"""Tests `call`: the output of a program, or an error that says how it ended."""

import sys
from pathlib import Path

import pytest

from deploy.console import StackError, call


def python(code: str) -> str:
    return call([sys.executable, "-c", code], timeout_s=20, environment={})


def test_a_program_that_ends_well_gives_its_output(tmp_path: Path) -> None:
    printed = call(["sh", "-c", "pwd; echo $WHO >&2; cat"], timeout_s=20, folder=tmp_path, environment={"WHO": "here"})
    assert printed.splitlines() == [str(tmp_path), "here"]


def test_a_program_that_fails_is_named_with_its_last_lines() -> None:
    with pytest.raises(StackError, match=r"^python\S* ended with code 3:\n  6\n(  \d+\n){23}  30$"):
        python("import sys; print(*range(31), sep='\\n'); sys.exit(3)")


def test_a_program_that_is_missing_or_takes_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"^no-such-program: .*No such file"):
        call([tmp_path / "no-such-program"], timeout_s=20)
    with pytest.raises(StackError, match=r"^sleep: .*timed out"):
        call(["sleep", "20"], timeout_s=0.1)
