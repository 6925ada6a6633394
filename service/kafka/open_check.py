"""Which partitions are known to hold nothing open of a producer id: none is written into before it is."""

from collections.abc import Collection, Iterable
from typing import Final

import structlog

from service.kafka.hanging import Partition, hanging
from service.kafka.inspection import FINAL, UNSUPPORTED_VERSION, active_producers
from service.kafka.session import ProducerSession

log = structlog.get_logger(__name__)

# Topics, or brokers, of which it has been said that they do not let themselves be asked.
_told: Final[set[str]] = set()
TOLD_MAX: Final = 1_000


class OpenCheck:
    """Asks the leaders, once for each partition and connection: after another one, a leader may have been away.

    A coordinator skips the markers of a partition without a leader (KAFKA-20734).
    """

    def __init__(self, life: ProducerSession) -> None:
        self._life = life
        self._clear: dict[Partition, object] = {}  # the connection to the leader that said so

    def is_clear(self, partition: Partition, node: int) -> bool:
        """Whether the node has said on its present connection that nothing is open there."""
        connection = self._life.client.connection(node)
        return connection is not None and self._clear.get(partition) is connection

    def note(self, partitions: Iterable[Partition]) -> None:
        """Nothing is open in these partitions, as their leaders have just said."""
        for partition in partitions:
            node = self._life.leader(partition)
            if node is not None and (connection := self._life.client.connection(node)) is not None:
                self._clear[partition] = connection

    async def ask(
        self, partitions: Collection[Partition], patience_s: float
    ) -> tuple[dict[Partition, int], set[Partition]]:
        """Where a transaction of the producer id is open, and from which offset on; and the partitions without answer.

        Where the service may not ask, or the broker is too old, nothing counts as open.
        """
        found = await active_producers(self._life.client, partitions, patience_s)
        open_from = hanging(found.active, {self._life.producer_id})
        unasked = {partition for partition, code in found.failed.items() if code in FINAL}
        for topic, _ in unasked:
            _tell(topic, found.failed)
        self.note((found.active.keys() | unasked) - open_from.keys())
        return open_from, set(partitions) - found.active.keys() - unasked


def _tell(topic: str, failed: dict[Partition, int]) -> None:
    """Say once that a topic's producers cannot be asked for."""
    if topic in _told or len(_told) >= TOLD_MAX:
        return
    _told.add(topic)
    old = any(code == UNSUPPORTED_VERSION for (name, _), code in failed.items() if name == topic)
    log.warning(
        "hanging transactions are not looked for",
        topic=topic,
        why="the brokers are older than Kafka 2.8" if old else "the service has no leave to Read the topic",
    )
