"""The path's inner loops in C (Cython), where a compiler was at hand when this was installed; else Python does it all.

Each takes what is plain and common, and leaves the rest to the Python code that it stands beside: that one has the
rules and the words for what is refused, and tests hold the two to each other. Nothing else depends on which one runs.
"""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def is_current(modules: Iterable[ModuleType]) -> bool:
    """Is none older than its sources? Those are beside it where it is worked on, and say what is meant.

    A wheel has none of them: pip and uv give each file the time of its installation, which tells nothing.
    """
    for module in modules:
        made = Path(str(module.__file__))
        sources = [made.with_name(made.name.partition(".")[0] + ".pyx"), *made.parent.glob("*.pxi")]
        if any(source.exists() and source.stat().st_mtime > made.stat().st_mtime for source in sources):
            return False
    return True


_ANEW = "install fencepost anew (uv sync --reinstall-package fencepost)"
# What makes them be used; empty where they are.
REMEDY = ""
try:
    from service.native import bodies, heads, records
except ImportError:  # installed without a compiler: half as much CPU again, and otherwise the same
    REMEDY = f"install a C compiler and Python's headers, then {_ANEW}"
else:
    if not is_current((bodies, heads, records)):
        REMEDY = f"they are older than their sources: {_ANEW}"
COMPILED = not REMEDY
