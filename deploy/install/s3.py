"""`python -m deploy.install.s3`: what the audit needs for a lake on S3, into the cache beside its other jars.

These are hadoop-aws with the modules of the AWS SDK that it uses, by `spark/engine/s3.lock`, and the log store for
Delta. The compiler in Spark makes it of its source: no JDK is needed.
"""

import tempfile
import zipfile
from pathlib import Path
from typing import Final

from deploy import places
from deploy.console import StackError, call, progress, run
from deploy.install import fetchers, jars, java
from spark.engine.jars import LOG_STORE_SOURCE, S3_LOCK, log_store

_COMPILER: Final = "org.codehaus.commons.compiler.samples.CompilerDemo"
_TIMEOUT_S: Final = 120.0
# The oldest time that a zip file can have: the jar of one source is the same, whenever and wherever it is built.
_ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


def ensure() -> None:
    """Fetch the jars that are missing, and build the log store unless that of this source is there.

    Raises:
        StackError: a jar cannot be fetched, or the source is not compiled.
    """
    jars.ensure([*jars.read_lock("spark", jars.LOCKS["spark"]), *jars.read_lock("spark", S3_LOCK)])
    folder = places.jars("spark")
    built = folder / log_store()
    if built.is_file():
        return
    with progress("building the log store for S3"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        _compile(folder, Path(scratch))
        whole = Path(scratch) / "whole.jar"
        _pack(Path(scratch), whole)
        for other in folder.glob(log_store("*")):
            other.unlink()
        whole.replace(built)


def _compile(folder: Path, target: Path) -> None:
    """Compile the source with Janino, against the jars in `folder` and those of PySpark."""
    ivy = fetchers.ivy_jar()
    if ivy is None:
        raise StackError("PySpark is not installed, and has the compiler: install the extra spark")
    classpath = ":".join(map(str, [*sorted(ivy.parent.glob("*.jar")), *sorted(folder.glob("*.jar"))]))
    command: list[str | Path] = [
        java.home() / "bin" / "java",
        "-cp",
        classpath,
        _COMPILER,
        "-classpath",
        classpath,
        "-encoding",
        "UTF-8",
    ]
    command += ["-g", "-d", target, LOG_STORE_SOURCE]
    call(command, timeout_s=_TIMEOUT_S)


def _pack(classes: Path, jar: Path) -> None:
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(classes.rglob("*.class")):
            packed.writestr(zipfile.ZipInfo(str(path.relative_to(classes)), _ZIP_EPOCH), path.read_bytes())


def main() -> int:
    java.home()
    ensure()
    return 0


if __name__ == "__main__":
    run(main)
