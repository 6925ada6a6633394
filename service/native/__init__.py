"""The path's inner loops in C (Cython), where a compiler was at hand when this was installed; else Python does it all.

Each takes what is plain and common, and leaves the rest to the Python code that it stands beside: that one has the
rules and the words for what is refused, and tests hold the two to each other. Nothing else depends on which one runs.
"""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Final

REMEDY: Final = "install a C compiler and Python's headers, then fencepost anew (uv sync --reinstall-package fencepost)"


def _current(modules: Iterable[ModuleType]) -> bool:
    """Is none older than its sources? Those are beside it where it is worked on, and say what is meant."""
    for module in modules:
        made = Path(str(module.__file__))
        sources = [made.with_name(made.name.partition(".")[0] + ".pyx"), *made.parent.glob("*.pxi")]
        if any(source.exists() and source.stat().st_mtime > made.stat().st_mtime for source in sources):
            return False
    return True


try:
    from service.native import bodies, heads, records, texts
except ImportError:  # installed without a compiler: half as much CPU again, and otherwise the same
    COMPILED = False
else:
    COMPILED = _current((bodies, heads, records, texts))
