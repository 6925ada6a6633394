"""How a broker's JVM runs: for long, or for a moment; and its classes on file, by which it starts in half the time."""

import hashlib
from pathlib import Path
from typing import Final

from deploy import places
from deploy.install import jars, java

_HEAP: Final = ("-Xms256m", "-Xmx512m", "-Djava.awt.headless=true")

# The heap is small, the just-in-time compiler is not limited: benchmarks run against such a broker.
LASTING: Final = (*_HEAP, "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")

# One that lives for seconds or minutes would spend half of its CPU on compiling what it runs a few times.
BRIEF: Final = (*_HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def archive() -> Path:
    """Where the classes of this Java and these jars are kept, once they were recorded (class data sharing, JEP 350)."""
    home = java.home()
    release = home / "release"  # an update in the same folder is another Java
    told = release.read_text() if release.exists() else ""
    name = hashlib.sha256(f"{home}\n{told}\n{jars.classpath('kafka')}".encode()).hexdigest()[:16]
    return places.cache() / f"kafka-classes-{name}.jsa"


def archived() -> list[str]:
    """The options that have a broker take its classes from the archive; none where nothing was recorded."""
    kept = archive()
    return [f"-XX:SharedArchiveFile={kept}", "-Xshare:auto"] if kept.exists() else []
