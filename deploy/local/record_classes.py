"""Records the classes that a broker loads, once, so that each one starts in half the time.

`python -m deploy.local.record_classes` pays off where dozens of brokers are started, as the tests do.
"""

import sys
import tempfile
from pathlib import Path

from deploy import places
from deploy.console import StackError, progress, run, say
from deploy.stack import jvm
from deploy.stack.kafka import Kafka


def main() -> int:
    kept = jvm.archive()
    if not kept.exists():
        try:
            with (
                progress("recording the classes of a broker, for the next ones to start quickly"),
                tempfile.TemporaryDirectory(prefix="record-", dir=places.cache()) as folder,
            ):
                record(Path(folder)).replace(kept)
        except StackError as error:  # a Java that cannot: brokers start as ever, only more slowly
            say(f"not recorded, brokers will start more slowly: {error}", sys.stderr)
    return 0


def record(folder: Path) -> Path:
    """Run a broker, and have its JVM write down at its end what it had loaded.

    Raises:
        StackError: it did not run, or wrote nothing.
    """
    written = folder / "classes.jsa"
    broker = Kafka(folder / "kafka")
    broker.java_options = jvm.BRIEF
    with broker:
        broker.stop()  # its storage is formatted by a JVM of its own, which is not to be recorded
        broker.extra_env["JDK_JAVA_OPTIONS"] = f"-XX:ArchiveClassesAtExit={written}"
        broker.start()
        broker.create_topic("any")
    if not written.exists():
        raise StackError(f"the broker's classes were not recorded\n{broker.tail()}")
    return written


if __name__ == "__main__":
    run(main)
