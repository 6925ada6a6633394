"""Inner loops in C (Cython), built if a C compiler is found when the package is installed; otherwise Python is used.

Each handles the common case, and leaves every other case to its Python implementation, which has the rules and the
error texts. Fuzz tests check that both give the same results.
"""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def is_current(modules: Iterable[ModuleType]) -> bool:
    """Check that no compiled module is older than its sources, which lie beside it in a working copy.

    An installed wheel has no sources, because pip and uv set each file's time to that of its installation.
    """
    for module in modules:
        made = Path(str(module.__file__))
        sources = [made.with_name(made.name.partition(".")[0] + ".pyx"), *made.parent.glob("*.pxi")]
        if any(source.exists() and source.stat().st_mtime > made.stat().st_mtime for source in sources):
            return False
    return True


_REINSTALL = "install fencepost again (uv sync --reinstall-package fencepost)"
# What to do so that the compiled modules are used; empty if they are.
REMEDY = ""
try:
    from service.native import bodies, heads, records
except ImportError:  # installed without a compiler
    REMEDY = f"install a C compiler and Python's headers, then {_REINSTALL}"
else:
    if not is_current((bodies, heads, records)):
        REMEDY = f"they are older than their sources: {_REINSTALL}"
COMPILED = not REMEDY
