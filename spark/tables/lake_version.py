"""The version of a lake's layout, in the file FILE of the lake.

A release reads lakes of its own version. `spark.steps.migrations` upgrades an earlier one in place.
"""

import json
from typing import Final

from spark.errors import CannotRun
from spark.tables import files
from spark.tables.lake import Lake

VERSION: Final = 2
"""The version of the lakes that this release writes."""

FILE: Final = "_version.json"


def stored(lake: Lake) -> int | None:
    """Read the version of a lake; None for a new lake, and for one of a release that stored no version."""
    text = files.read(lake.spark, lake.root, FILE)
    if text is None:
        return None
    try:
        return int(json.loads(text)["version"])
    except (ValueError, TypeError, KeyError):
        raise CannotRun(f"{lake.root}/{FILE} has no version: restore this file of --lake from a backup") from None


def store(lake: Lake, version: int) -> None:
    """Write the version of a lake."""
    lake.check_held()
    files.write(lake.spark, lake.root, FILE, [text_of(version)])


def text_of(version: int) -> str:
    """Return the content of the file."""
    return json.dumps({"version": version})


def refuse_newer(lake: Lake) -> int:
    """Return the version of a lake: VERSION for a new one, 0 for one of a release that stored no version.

    CannotRun if a newer release has written the lake.
    """
    version = stored(lake)
    if version is None:
        return 0 if lake.exists("progress") else VERSION
    if version > VERSION:
        raise CannotRun(
            f"--lake {lake.root} is of version {version}, which a newer release has written: run that release or a "
            f"newer one on it (this one reads version {VERSION})"
        )
    return version


def check(lake: Lake) -> None:
    """Check that a lake has the version of this release; CannotRun with the remedy otherwise."""
    version = refuse_newer(lake)
    if version < VERSION:
        raise CannotRun(
            f"--lake {lake.root} is of an earlier version ({version}, not {VERSION}): run python -m spark on it once, "
            "which upgrades the lake"
        )
