"""Class-data sharing (JEP 350): a broker whose classes were recorded starts in half the time.

`python -m tests.broker_classes` records the classes; with `use`, every broker of this process takes them from the
archive. Only the tests use it, because they start dozens of brokers.
"""

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Final

from deploy import places
from deploy.console import StackError, progress, run, say
from deploy.install import jars, java
from deploy.stack import Kafka
from deploy.stack.kafka import BRIEF

# The JVM writes the archive after the broker has shut down; on a busy machine that takes longer than other stops.
WRITES_S: Final = 120.0


def use() -> None:
    """Make the brokers of this process load their classes from the archive, if there is one."""
    Kafka.archive_options = options()


def options() -> list[str]:
    """Return the JVM options that name the archive; none if nothing was recorded."""
    recorded = archive()
    return [f"-XX:SharedArchiveFile={recorded}", "-Xshare:auto"] if recorded.exists() else []


def archive() -> Path:
    """Return the path of the archive for this Java and these jars, in the cache."""
    home = java.home()
    release = home / "release"  # an update in the same folder is another Java
    version = release.read_text() if release.exists() else ""
    name = hashlib.sha256(f"{home}\n{version}\n{jars.classpath('kafka')}".encode()).hexdigest()[:16]
    return places.cache() / f"kafka-classes-{name}.jsa"


def main() -> int:
    recorded = archive()
    if not recorded.exists():
        try:
            with (
                progress("recording the classes of a broker, for the next ones to start quickly"),
                tempfile.TemporaryDirectory(prefix="record-", dir=places.cache()) as folder,
            ):
                record(Path(folder)).replace(recorded)
        except StackError as error:  # this Java cannot record: brokers start more slowly
            say(f"not recorded, brokers will start more slowly: {error}", sys.stderr)
    return 0


def record(folder: Path) -> Path:
    """Run a broker whose JVM writes at its end the archive of what it had loaded, and return the archive's path.

    Raises:
        StackError: the broker did not run, or wrote no archive.
    """
    written = folder / "classes.jsa"
    broker = Kafka(folder / "kafka")
    broker.java_options = BRIEF
    with broker:
        broker.stop()  # the JVM that formatted the storage must not write the archive
        broker.extra_env["JDK_JAVA_OPTIONS"] = f"-XX:ArchiveClassesAtExit={written}"
        broker.start()
        broker.create_topic("any")
        broker.stop(WRITES_S)
    if not written.exists():
        raise StackError(f"the broker's classes were not recorded\n{broker.tail()}")
    return written


if __name__ == "__main__":
    run(main)
