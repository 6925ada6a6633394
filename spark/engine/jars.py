"""Finds the jars that Spark needs for Kafka and Delta, and for a lake or a report on S3."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pyspark.find_spark_home import _find_spark_home

from spark.errors import CannotRun

LOCK: Final = Path(__file__).with_name("jars.lock")
S3_LOCK: Final = Path(__file__).with_name("s3.lock")
"""What Spark needs besides to open `s3a:` URLs."""

LOG_STORE_SOURCE: Final = Path(__file__).parents[1] / "tables" / "ConditionalPutLogStore.java"
LOG_STORE_CLASS: Final = "fencepost.ConditionalPutLogStore"
"""The log store by which Delta commits to tables on S3."""
LOG_STORE_SETTING: Final = "spark.delta.logStore.s3a.impl"


def locked(lock: Path = LOCK) -> list[str]:
    """Read the file names of the jars from the lock, which has one `sha256 group:artifact:version` a line."""
    lines = (line.split() for line in lock.read_text(encoding="utf-8").splitlines())
    coordinates = [fields[1].split(":") for fields in lines if len(fields) == 2 and not fields[0].startswith("#")]
    return [f"{artifact}-{version}.jar" for _, artifact, version in coordinates]


def log_store(source: str | None = None) -> str:
    """Return the file name of the jar that is built of the log store's source; `source` replaces the source's hash."""
    return f"fencepost-log-store-{source or hashlib.sha256(LOG_STORE_SOURCE.read_bytes()).hexdigest()[:12]}.jar"


def needs_s3(urls: Sequence[str]) -> bool:
    """Check whether one of the URLs is on S3."""
    return any(url.lower().startswith("s3a:") for url in urls)


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
    return _present(folder(environ), locked(lock), "run ./deploy/local/up once, which fetches them")


def of_spark() -> list[Path]:
    """Return the jars of Spark itself."""
    return sorted((Path(_find_spark_home()) / "jars").glob("*.jar"))


def find_s3(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the paths of the jars for S3; CannotRun if some are missing."""
    return _present(
        folder(environ), [*locked(S3_LOCK), log_store()], "run python -m deploy.install.s3 once, which fetches them"
    )


def _present(jars: Path, names: Sequence[str], remedy: str) -> list[Path]:
    paths = [jars / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CannotRun(
            f"jars for Spark are missing in {jars}: {', '.join(missing)}; "
            f"{remedy}, or set FENCEPOST_JARS to a folder that has them"
        )
    return paths
