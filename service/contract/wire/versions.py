"""Versions of the wire contract, and the errors for bytes that do not follow the known ones."""

from collections.abc import Collection
from typing import Final

VERSION: Final = 1
LEDGER_VERSIONS: Final = frozenset({VERSION, 2})
"""Versions of a ledger record that are read. Version 2, of some releases, is version 1 with `topic_ids`.

The service writes version 1 with that field: a process of release 0.1.0 skips records of an unknown version, and would
write their events a second time.
"""
VERSION_MOST: Final = 9_999
"""Of a later version. A greater number is no version, but garbage."""


class WireError(ValueError):
    """Bytes that do not follow this version of the wire contract; the text says why."""


class NewerVersion(WireError):
    """Data of a version that only a newer release writes. A program that skipped the data would miss evidence."""


def is_newer(version: object, known: Collection[int]) -> bool:
    """Whether a version is one that a newer release may have introduced; no other value is a version."""
    return type(version) is int and max(known) < version <= VERSION_MOST


def newer_version(what: str, version: object, known: Collection[int]) -> NewerVersion:
    """Make the error that names the data, e.g. "a ledger record", its version, and the remedy."""
    return NewerVersion(
        f"{what} of version {version}, which a newer release has written: this one reads version {max(known)} at most; "
        "run the newer release"
    )


def check_version(version: object, known: Collection[int], what: str) -> None:
    """Raise NewerVersion for a version that only a newer release writes, WireError for another unknown one."""
    if is_newer(version, known):
        raise newer_version(what, version, known)
    if version not in known:
        raise WireError(f"{what} of version {version!r}; this release reads {sorted(known)}")
