"""Runs a real Apache Kafka broker (KRaft: broker and controller in one process) from its own jars."""

import base64
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from deploy import places
from deploy.console import StackError
from deploy.install import jars, java
from deploy.stack.ports import free_port
from deploy.stack.process import Process

_HEAP = ("-Xms256m", "-Xmx512m", "-Djava.awt.headless=true")
# A small heap. The just-in-time compiler is not limited, because benchmarks use this broker.
LASTING = (*_HEAP, "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
# For a broker that runs for minutes at most: it would spend half of its CPU on compiling rarely used code.
BRIEF = (*_HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

_START_S = 120.0  # 3 s on an idle machine, 20 s on a very busy one
_ANSWER_S = 10.0
_LOGGING = Path(__file__).with_name("kafka-log4j2.properties")

# Settings that differ from Kafka's defaults, for one node on one machine.
_SETTINGS = {
    "auto.create.topics.enable": "false",  # as in production: a misspelt topic must be a 404
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "8",  # the default, 50, delays the first transaction by 10 ms each
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "log.cleaner.dedupe.buffer.size": "8388608",  # the default, 128 MiB, takes a quarter of the heap and 0.4 s at start
    "group.initial.rebalance.delay.ms": "0",  # a test's consumer is alone in its group
    "group.min.session.timeout.ms": "1000",  # a killed consumer's partitions move as soon as the consumer asks for
    # A killed broker can register again only after its old session has expired: 9 s by default.
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
}


class Listener(NamedTuple):
    """A further listener of a broker: the address it listens on, and the advertised address; both are host:port."""

    name: str  # upper case, unique in the broker
    listens: str
    advertised: str


class Kafka(Process):
    """One broker with its data in `folder`. Folder and port stay the same over stops, kills and starts."""

    java_options: Sequence[str] = LASTING
    archive_options: Sequence[str] = ()  # options for the class data archive (CDS) that the tests have recorded

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        node_id: int = 1,
        controller_port: int | None = None,
        cluster_id: str | None = None,
        listeners: Sequence[Listener] = (),
        name: str = "kafka",
    ) -> None:
        """Prepare a broker.

        Args:
            folder: for data, configuration and log.
            port: the port to listen on; default: a free one.
            settings: broker settings, which override the defaults for one node.
            node_id: the number of the node in a cluster.
            controller_port: the port of its controller; default: a free one.
            cluster_id: the same for all nodes of a cluster; default: a new one.
            listeners: further listeners, beside the one at `port`.
            name: the name of the log.
        """
        super().__init__(name, folder.absolute())
        self.port = port or free_port()
        self.node_id = node_id
        self.controller_port = controller_port or free_port()
        self.cluster_id = cluster_id or base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self.listeners = list(listeners)
        self.settings = dict(settings or {})

    @property
    def bootstrap(self) -> str:
        """The bootstrap servers."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the broker and wait until it answers; the first start formats its storage.

        Raises:
            StackError: the broker did not start; the text has the end of its log.
        """
        self.begin()
        self.wait_ready()

    def begin(self) -> None:
        """Start the broker without waiting (the nodes of a cluster wait for each other).

        Raises:
            StackError: the storage could not be formatted.
        """
        jars.ensure()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in self._configuration().items()))
        if not (self._data / "meta.properties").exists():
            self._format()
        self._run(self.java_options, "kafka.Kafka", self._properties)

    def wait_ready(self) -> None:
        """Wait until the broker answers.

        Raises:
            StackError: the broker ended, or took too long.
        """
        admin = self.admin()
        self.wait_until(lambda: self._answers(admin), _START_S)

    def admin(self) -> AdminClient:
        """Make an admin client, for requests that have no method here."""
        # The library would print each refused connection while the broker starts; errors are raised anyway.
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 100})

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic and wait until it can be written to.

        Raises:
            StackError: the broker refused (it may exist already).
        """
        admin = self.admin()
        replication = int(self._configuration()["default.replication.factor"])
        topic = NewTopic(name, num_partitions=partitions, replication_factor=replication, config=dict(config or {}))
        try:
            admin.create_topics([topic], operation_timeout=_ANSWER_S)[name].result(_ANSWER_S)
        except KafkaException as error:
            raise StackError(f"topic {name} was not made: {error}") from error
        self.wait_until(lambda: _has_leaders(admin, name, partitions), _ANSWER_S)

    def topics(self) -> set[str]:
        """List the names of all topics.

        Raises:
            confluent_kafka.KafkaException: the broker did not answer.
        """
        return set(self.admin().list_topics(timeout=_ANSWER_S).topics)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def _properties(self) -> Path:
        return self.folder / f"{self.name}.properties"

    def _configuration(self) -> dict[str, str]:
        ways = [Listener("PLAINTEXT", self.bootstrap, self.bootstrap), *self.listeners]
        listens = {each.name: each.listens for each in ways}
        listens["CONTROLLER"] = f"127.0.0.1:{self.controller_port}"
        return {
            "process.roles": "broker,controller",
            "node.id": str(self.node_id),
            "controller.quorum.voters": f"{self.node_id}@127.0.0.1:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": ",".join(f"{name}://{address}" for name, address in listens.items()),
            "advertised.listeners": ",".join(f"{each.name}://{each.advertised}" for each in ways),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listens),
            "log.dirs": str(self._data),
            **_SETTINGS,
            **self.settings,
        }

    def _formatted_id(self) -> str | None:
        """Return the cluster id of the storage, which an earlier run may have formatted."""
        lines = (self._data / "meta.properties").read_text().splitlines()
        return next((line.partition("=")[2] for line in lines if line.startswith("cluster.id=")), None)

    def _format(self) -> None:
        # With "=", because an id may begin with "-" and would be taken for an option.
        tool = ("kafka.tools.StorageTool", "format", f"--cluster-id={self.cluster_id}", "-c", self._properties)
        self._run(BRIEF, *tool)
        if self.wait_while_working(_START_S) != 0:
            raise StackError(f"the storage of {self.name} could not be formatted\n{self.tail()}")

    def _run(self, options: Sequence[str], main_class: str, *arguments: str | Path) -> None:
        logging = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        program: list[str | Path] = [java.home() / "bin" / "java", *options, *self.archive_options, logging]
        program += ["-cp", jars.classpath("kafka")]
        self.spawn([*program, main_class, *arguments], env={**places.hermetic_environment(), **java.environment()})

    def _answers(self, admin: AdminClient) -> bool:
        """Check whether this broker answers, and no other at its port, by the cluster id."""
        try:
            found = admin.list_topics(timeout=0.5)
            return found.cluster_id == self._formatted_id() and self.node_id in found.brokers
        except KafkaException as error:
            if error.args[0].code() in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN):
                return False
            raise


def _has_leaders(admin: AdminClient, topic: str, partitions: int) -> bool:
    """Check whether every partition of the topic has a leader; CreateTopics returns before that."""
    found = admin.list_topics(topic, timeout=_ANSWER_S).topics[topic]
    return len(found.partitions) == partitions and all(each.leader >= 0 for each in found.partitions.values())
