"""Class-data sharing (JEP 350): a JVM maps the classes that an earlier one had loaded from an archive.

The first small run on a machine records the archive at its end, beside the jars of the lock, if it may write there. An
archive is of one Java and its jars: by its name, and by a check of the JVM, which does without one that it cannot use.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from spark.engine import jars
from spark.engine.jvm import Py4JError, dump_classes

_RECORDING: Final = "-XX:+RecordDynamicDumpInfo"
# How long other archives are kept: two installations with one folder of jars would delete each other's archive, and
# record it again in each run.
OTHERS_KEPT_S: Final = 30 * 24 * 3600.0
# The JVM would write on standard output why it does not accept an archive, and which classes cannot be in one.
_SILENT: Final = "-Xlog:cds*=off"


def class_path(environ: Mapping[str, str]) -> list[Path]:
    """Return the jars of the lock and of Spark; CannotRun if one of the lock is missing.

    The archive is of the classes in these jars, in this order. Spark itself adds its jars by a wildcard, in the order
    of their folder on the disk.
    """
    return [*jars.find(environ), *jars.of_spark()]


def archive(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the archive of this Java and these jars, which need not exist; None if Java is not found."""
    java = environ["JAVA_HOME"] + "/bin/java" if environ.get("JAVA_HOME") else shutil.which("java")
    if java is None:
        return None
    home = Path(java).resolve().parents[1]
    try:
        parts = [str(home), (home / "release").read_text(encoding="utf-8")]
    except OSError:
        return None
    for path in class_path(environ):
        status = path.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return jars.folder(environ) / f"classes-{name}.jsa"


def options(environ: Mapping[str, str]) -> str:
    """Return the options of a JVM that takes its classes from the archive; "" if there is none."""
    kept = archive(environ)
    return "" if kept is None or not kept.is_file() else f'"-XX:SharedArchiveFile={kept}" {_SILENT}'


def options_or_recording(environ: Mapping[str, str]) -> str:
    """Return `options`; without an archive those of a JVM that can `record` it, if its folder can be written."""
    kept = archive(environ)
    if kept is None or kept.is_file() or not os.access(kept.parent, os.W_OK):
        return options(environ)
    return f"{_RECORDING} {_SILENT}"


def record(spark: SparkSession, environ: Mapping[str, str]) -> None:
    """Write the archive, if the JVM has the options for that, and delete archives that are older than OTHERS_KEPT_S.

    Without the archive, as on a full disk, the next JVM is as slow as this one.
    """
    kept = archive(environ)
    if kept is None or _RECORDING not in (spark.conf.get("spark.driver.extraJavaOptions", "") or ""):
        return
    # An archive that is not whole would end each JVM that uses it.
    written = kept.with_name(f"{kept.name}.{os.getpid()}")
    with suppress(OSError, Py4JError):
        dump_classes(spark, str(written))
        written.replace(kept)
        for other in kept.parent.glob("classes-*"):
            if other.stat().st_mtime < time.time() - OTHERS_KEPT_S:
                other.unlink()
    with suppress(OSError):
        written.unlink(missing_ok=True)
