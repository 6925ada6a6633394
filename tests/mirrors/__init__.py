"""A real MirrorMaker 2 from Kafka's own jars: `python -m tests.mirrors` fetches and tests on it.

`./tests/run` leaves it out, because its JVM takes most of a minute; a `long` test of tests/spark/test_mirrors.py
fills a real topic in its place.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deploy import places
from deploy.install import jars, java
from deploy.stack.kafka import BRIEF
from deploy.stack.process import Process

LOCK: Final = Path(__file__).with_name("mirror_maker.lock")
KIND: Final = "mirror_maker"
PRIMARY: Final = "primary"
AWAY: Final = "away"
"""Aliases of the two clusters. A copy of a topic is named `ALIAS.TOPIC`, by the DefaultReplicationPolicy."""

_LOGGING: Final = Path(places.ROOT) / "deploy" / "stack" / "kafka-log4j2.properties"


class MirrorMaker(Process):
    """MirrorMaker 2 between two brokers, in both directions; where it was killed, it copies records again.

    `topics` are a regular expression for each direction, of the topics in the primary and in the other cluster. A
    tombstone is dropped: such a filter is what a mirror may be set to by mistake.
    """

    def __init__(self, folder: Path, primary: str, away: str, topics: Sequence[str]) -> None:
        super().__init__("mirror-maker", folder.absolute())
        self._properties = self.folder / "mirror-maker.properties"
        self._settings = {
            "clusters": f"{PRIMARY}, {AWAY}",
            f"{PRIMARY}.bootstrap.servers": primary,
            f"{AWAY}.bootstrap.servers": away,
            **self._direction(PRIMARY, AWAY, topics[0]),
            **self._direction(AWAY, PRIMARY, topics[1]),
            **dict.fromkeys(
                (
                    "replication.factor",
                    "heartbeats.topic.replication.factor",
                    "offset-syncs.topic.replication.factor",
                    "offset.storage.replication.factor",
                    "status.storage.replication.factor",
                    "config.storage.replication.factor",
                ),
                "1",
            ),
            "tasks.max": "1",
            "refresh.topics.interval.seconds": "1",
            "sync.topic.acls.enabled": "false",
            "emit.heartbeats.enabled": "false",
            "emit.checkpoints.enabled": "false",
            # Offsets are not stored before it is killed.
            "offset.flush.interval.ms": "600000",
        }

    def _direction(self, source: str, target: str, topics: str) -> dict[str, str]:
        way = f"{source}->{target}"
        return {
            f"{way}.enabled": "true",
            f"{way}.topics": topics,
            f"{source}.consumer.isolation.level": "read_committed",
            f"{way}.transforms": "drop",
            f"{way}.transforms.drop.type": "org.apache.kafka.connect.transforms.Filter",
            f"{way}.transforms.drop.predicate": "tombstone",
            f"{way}.predicates": "tombstone",
            f"{way}.predicates.tombstone.type": "org.apache.kafka.connect.transforms.predicates.RecordIsTombstone",
        }

    def start(self) -> None:
        """Start it, and wait for nothing: what it has copied is seen in the brokers. Raises StackError."""
        own = jars.read_lock(KIND, LOCK)
        jars.ensure(own)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._properties.write_text("".join(f"{name} = {value}\n" for name, value in self._settings.items()))
        paths = ":".join(str(jar.path) for jar in own)
        logging = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        program: list[str | Path] = [java.home() / "bin" / "java", *BRIEF, logging, "-cp", paths]
        environment = {**places.hermetic_environment(), **java.environment()}
        self.spawn([*program, "org.apache.kafka.connect.mirror.MirrorMaker", self._properties], env=environment)
