"""What applications import: `Client` sends events, each under one key; `Reader` reads them, each id once; `GroupReader`
reads as a member of a consumer group, and commits its offsets with the results that a client sends.

An installation has this folder as the package `fencepost`, so its modules import each other relatively, and nothing of
the service. Each name is loaded at its first use, and needs only the packages of its own extra:
`pip install 'fencepost[client]'`, `pip install 'fencepost[reader]'`.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client import (
        AsyncClient,
        Client,
        Event,
        KeyExpired,
        KeyReused,
        NotAccepted,
        Offsets,
        Refused,
        Result,
        SendError,
        Spool,
        SpoolError,
        SpoolFull,
        SpoolInUse,
        StaleMember,
        Unsettled,
        Written,
        WrittenBatch,
        new_key,
    )
    from .group_reader import AtomicSender, GroupBatch, GroupReader
    from .reader import (
        BOUNDS,
        Bounds,
        NewerVersion,
        Overtaken,
        Reader,
        ReaderPosition,
        ReaderStore,
        Record,
        Saved,
        id_of,
    )

__all__ = [
    "BOUNDS",
    "AsyncClient",
    "AtomicSender",
    "Bounds",
    "Client",
    "Event",
    "GroupBatch",
    "GroupReader",
    "KeyExpired",
    "KeyReused",
    "NewerVersion",
    "NotAccepted",
    "Offsets",
    "Overtaken",
    "Reader",
    "ReaderPosition",
    "ReaderStore",
    "Record",
    "Refused",
    "Result",
    "Saved",
    "SendError",
    "Spool",
    "SpoolError",
    "SpoolFull",
    "SpoolInUse",
    "StaleMember",
    "Unsettled",
    "Written",
    "WrittenBatch",
    "id_of",
    "new_key",
]

# The extras with the packages that a module needs.
_EXTRAS: Final = {"client": "client", "reader": "reader", "group_reader": "client,reader"}
_GROUP: Final = {"AtomicSender", "GroupBatch", "GroupReader"}
_READER: Final = {
    "BOUNDS",
    "Bounds",
    "NewerVersion",
    "Overtaken",
    "Reader",
    "ReaderPosition",
    "ReaderStore",
    "Record",
    "Saved",
    "id_of",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    part = "group_reader" if name in _GROUP else "reader" if name in _READER else "client"
    try:
        return getattr(importlib.import_module(f".{part}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'fencepost[{_EXTRAS[part]}]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
