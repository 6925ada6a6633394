"""Tests whether the compiled modules are used."""

import os
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from service import native


@pytest.mark.skipif("WITHOUT_NATIVE" in os.environ, reason="this run is without them")
def test_they_are_compiled_where_they_can_be() -> None:
    """A failed build leaves them out silently, so that nobody would notice a mistake in them."""
    compiler, headers = shutil.which("cc"), Path(sysconfig.get_path("include"), "Python.h")
    assert native.COMPILED or compiler is None or not headers.exists()


def test_a_compiled_module_older_than_its_source_is_not_used(tmp_path: Path) -> None:
    """As after a pull, or if the new source could not be compiled: otherwise the old code would run silently."""
    module = ModuleType("fast")
    module.__file__ = str(tmp_path / "fast.cpython-311-x86_64-linux-gnu.so")
    Path(module.__file__).touch()
    assert native.is_current([module])  # as installed: without its source
    made_s = Path(module.__file__).stat().st_mtime
    for source in (tmp_path / "fast.pyx", tmp_path / "included.pxi"):
        source.touch()
        for age_s, current in ((1, False), (0, True), (-1, True)):
            os.utime(source, (made_s + age_s, made_s + age_s))
            assert native.is_current([module]) is current
    (tmp_path / "other.pyx").touch()
    os.utime(tmp_path / "other.pyx", (made_s + 1, made_s + 1))
    assert native.is_current([module])
