"""Notices changes of files without reading them."""

import os
from collections.abc import Iterable

Stamp = tuple[object, ...]
"""The real paths, inodes, sizes and times of some files; equal stamps are of the same contents."""


def stamp_of(files: Iterable[str]) -> Stamp:
    """Look where the files are (a mounted ConfigMap is a link, which is replaced) and when they were written."""
    return tuple(_stamp(file) for file in files)


def _stamp(file: str) -> tuple[object, ...]:
    try:
        found = os.stat(file)  # noqa: PTH116 - of many files, each second or so
        return os.path.realpath(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    except OSError as error:
        return file, error.errno
