"""Finds the jars that Spark needs for Kafka and Delta."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spark.errors import CannotRun

LOCK: Final = Path(__file__).with_name("jars.lock")


def locked(lock: Path = LOCK) -> list[str]:
    """Read the file names of the jars from the lock, which has one `sha256 group:artifact:version` a line."""
    lines = (line.split() for line in lock.read_text(encoding="utf-8").splitlines())
    coordinates = [fields[1].split(":") for fields in lines if len(fields) == 2 and not fields[0].startswith("#")]
    return [f"{artifact}-{version}.jar" for _, artifact, version in coordinates]


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return FENCEPOST_JARS if set, else the folder of the cache into which the local stack downloads Spark's jars."""
    environ = os.environ if environ is None else environ
    if environ.get("FENCEPOST_JARS"):
        return Path(environ["FENCEPOST_JARS"])
    if environ.get("FENCEPOST_CACHE"):
        cache = Path(environ["FENCEPOST_CACHE"])
    elif environ.get("XDG_CACHE_HOME"):
        cache = Path(environ["XDG_CACHE_HOME"]) / "fencepost"
    else:
        cache = Path.home() / ".cache" / "fencepost"
    return cache / "jars" / "spark"


def find(environ: Mapping[str, str] | None = None, lock: Path = LOCK) -> list[Path]:
    """Return the paths of all locked jars; CannotRun if some are missing."""
    jars = folder(environ)
    paths = [jars / name for name in locked(lock)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CannotRun(
            f"jars for Spark are missing in {jars}: {', '.join(missing)}; "
            "run ./deploy/local/up once, which fetches them, or set FENCEPOST_JARS to a folder that has them"
        )
    return paths
