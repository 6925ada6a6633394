"""One or three real brokers, with access to each part at which a fault is aimed."""

import functools
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from deploy.stack import Kafka, StackError, free_port
from service.kafka.group_offsets import OFFSETS_TOPIC, partition_of_group
from tests.faults.proxy import Proxy

THREE: Final = 3
# Further settings of a cluster of three, beside those of the local stack for one.
_REPLICATED: Final = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "unclean.leader.election.enable": "false",
    # A paused follower must leave the ISR before producers give up.
    "replica.lag.time.max.ms": "3000",
    # A coordinator has one request of markers to a broker in flight. If replicas go away after such a request was
    # appended, it waits for this long (30 s by default), and with it the markers of all other transactions of this
    # coordinator.
    "request.timeout.ms": "10000",
}
# Transactions past their timeout are aborted at the next scan.
TRANSACTION_SCAN_S: Final = 2
_SCAN: Final = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": str(TRANSACTION_SCAN_S * 1000)}
_TRANSACTION_LOG: Final = "__transaction_state"
_HEAL_S: Final = 180.0
_ANSWER_S: Final = 5.0


class Cluster:
    """Brokers 1..count with their data in `folder`; with three, replication 3 and min ISR 2.

    `proxy` is between them and the clients of `proxy.bootstrap`.
    """

    def __init__(self, folder: Path, count: int = 1, settings: Mapping[str, str] | None = None) -> None:
        ports = {node: free_port() for node in range(1, count + 1)}
        shared = {
            **_SCAN,
            **(_REPLICATED if count == THREE else {}),
            "controller.quorum.voters": ",".join(f"{node}@127.0.0.1:{port}" for node, port in ports.items()),
            **(settings or {}),
        }
        self.proxy = Proxy(count)
        self.brokers = [
            Kafka(
                folder / f"kafka-{node}",
                node_id=node,
                controller_port=port,
                settings=shared,
                listeners=[self.proxy.listener(node - 1)],
                name=f"kafka-{node}",
            )
            for node, port in ports.items()
        ]
        for broker in self.brokers:
            broker.cluster_id = self.brokers[0].cluster_id

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.bootstrap for broker in self.brokers)

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        try:
            self.start()
            for broker in self.brokers:
                broker.wait_until(functools.partial(self._knows_all, broker), _HEAL_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()  # their data are not needed any more
        self.proxy.__exit__(None, None, None)

    def start(self) -> None:
        """Start the stopped brokers, all at once, and wait until all answer."""
        down = [broker for broker in self.brokers if not broker.running]
        with ThreadPoolExecutor(len(self.brokers)) as starters:
            list(starters.map(Kafka.begin, down))
            list(starters.map(Kafka.wait_ready, down))

    def _knows_all(self, broker: Kafka) -> bool:
        """Check whether a broker knows all brokers; one that answers may not know the others yet."""
        return len(broker.admin().list_topics(timeout=_ANSWER_S).brokers) == len(self.brokers)

    def kill(self) -> None:
        for broker in self.brokers:
            broker.kill()

    def heal(self) -> None:
        """Resume and start every broker, and wait until all replicas of each partition are in sync.

        Raises:
            StackError: that took too long.
        """
        for broker in self.brokers:
            broker.resume() if broker.running else None
        self.start()
        deadline = time.monotonic() + _HEAL_S
        while lacking := self._lacking():
            if time.monotonic() > deadline:
                raise StackError(f"not in sync after {_HEAL_S:.0f} s: {lacking}")
            time.sleep(0.2)

    def _lacking(self) -> list[str]:
        """List the partitions without a leader or with a replica out of sync."""
        try:
            topics = self.admin().list_topics(timeout=_ANSWER_S).topics
        except KafkaException as error:
            return [str(error)]
        return [
            f"{name}/{number}"
            for name, topic in topics.items()
            for number, partition in topic.partitions.items()
            if partition.leader < 0 or len(partition.isrs) < len(partition.replicas)
        ]

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 100})

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        self.brokers[0].create_topic(name, partitions, config)

    def leader(self, topic: str, partition: int = 0) -> Kafka:
        """Find the leader of a partition."""
        found = self.admin().list_topics(topic, timeout=_ANSWER_S).topics[topic].partitions[partition].leader
        return next(broker for broker in self.brokers if broker.node_id == found)

    def coordinator(self, transactional_id: str) -> Kafka:
        """Find the transaction coordinator of an id: the leader of its partition of the transaction log (KIP-98)."""
        partitions = len(
            self.admin().list_topics(_TRANSACTION_LOG, timeout=_ANSWER_S).topics[_TRANSACTION_LOG].partitions
        )
        return self.leader(_TRANSACTION_LOG, (_java_hash(transactional_id) & 0x7FFFFFFF) % partitions)

    def group_coordinator(self, group: str) -> Kafka:
        """Find the coordinator of a consumer group: the leader of its partition of the topic of offsets.

        Raises:
            KeyError: the topic is not there yet.
        """
        partitions = len(self.admin().list_topics(OFFSETS_TOPIC, timeout=_ANSWER_S).topics[OFFSETS_TOPIC].partitions)
        if not partitions:
            raise KeyError(OFFSETS_TOPIC)
        return self.leader(OFFSETS_TOPIC, partition_of_group(group, partitions))


def _java_hash(text: str) -> int:
    """Compute `String.hashCode` of ASCII text."""
    code = 0
    for each in text.encode("ascii"):
        code = (31 * code + each) & 0xFFFFFFFF
    return code
