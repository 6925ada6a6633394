"""Whether the inner loops are compiled."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from service import native


@pytest.mark.skipif("WITHOUT_NATIVE" in os.environ, reason="this run is without them")
def test_they_are_compiled_where_they_can_be() -> None:
    """They are left out in silence where that fails, so that a mistake in them would go unseen."""
    compiler, headers = shutil.which("cc"), Path(sysconfig.get_path("include"), "Python.h")
    assert native.COMPILED or compiler is None or not headers.exists()
