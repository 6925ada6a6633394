"""Inner loops in C (Cython), built if a C compiler is there when the package is installed; else Python does all.

Each handles the common case, and leaves every other case to its Python twin, which has the rules and the error texts.
Fuzz tests hold each pair to the same results; no behaviour depends on which of the two runs.
"""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def is_current(modules: Iterable[ModuleType]) -> bool:
    """Whether no compiled module is older than its sources, which lie beside it in a working copy.

    An installed wheel has no sources: pip and uv give each file its time of installation, so times say nothing there.
    """
    for module in modules:
        made = Path(str(module.__file__))
        sources = [made.with_name(made.name.partition(".")[0] + ".pyx"), *made.parent.glob("*.pxi")]
        if any(source.exists() and source.stat().st_mtime > made.stat().st_mtime for source in sources):
            return False
    return True


_REINSTALL = "install fencepost again (uv sync --reinstall-package fencepost)"
# How to have the compiled modules used; empty if they are.
REMEDY = ""
try:
    from service.native import bodies, heads, records
except ImportError:  # installed without a compiler
    REMEDY = f"install a C compiler and Python's headers, then {_REINSTALL}"
else:
    if not is_current((bodies, heads, records)):
        REMEDY = f"they are older than their sources: {_REINSTALL}"
COMPILED = not REMEDY
