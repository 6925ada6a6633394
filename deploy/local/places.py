"""Where things are: the project, and the cache outside of it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cache() -> Path:
    """The folder for what is fetched once: FENCEPOST_CACHE, else the user's own cache."""
    if chosen := os.environ.get("FENCEPOST_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "fencepost"


def jars(kind: str) -> Path:
    """The folder of the broker's jars ("kafka") or of Spark's ("spark")."""
    return cache() / "jars" / kind


def hermetic_environment() -> dict[str, str]:
    """The caller's environment without any setting of Fencepost's.

    What a stack starts gets its settings from the stack alone: a FENCEPOST_KAFKA that points at another Kafka must
    never be touched by a test or a demo.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
