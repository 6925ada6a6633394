"""What applications import: `from fencepost import Reader`, which reads events, each id once.

An installation has this folder as the package `fencepost`, so its modules import each other relatively, and nothing of
the service. Each name is loaded at its first use, and needs only the packages of its own extra:
`pip install 'fencepost[reader]'`.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .reader import BOUNDS, Bounds, Overtaken, Reader, ReaderPosition, ReaderStore, Record, Saved, id_of

__all__ = ["BOUNDS", "Bounds", "Overtaken", "Reader", "ReaderPosition", "ReaderStore", "Record", "Saved", "id_of"]

# The module of each name. A module's name is also that of the extra with the packages that it needs.
_MODULES: Final = dict.fromkeys(__all__, "reader")


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'fencepost[{module}]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
