"""Checks that a partition holds no open transaction of a producer id, before the first write into the partition."""

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import structlog
from aiokafka import errors

from service.kafka.hanging import hanging
from service.kafka.inspection import FINAL, UNSUPPORTED, UNSUPPORTED_VERSION, active_producers
from service.kafka.metadata import Partition
from service.kafka.records import Write
from service.kafka.session import METADATA_TIMEOUT_S, ProducerSession

log = structlog.get_logger(__name__)

# Topics for which the warning "hanging transactions are not looked for" has been logged.
_logged: Final[set[str]] = set()
LOGGED_MAX: Final = 1_000


class OpenCheck:
    """Asks each partition's leader once per connection: after a reconnect, the leader may have missed markers.

    A coordinator skips the markers of a partition without a leader (KAFKA-20734).
    """

    def __init__(self, session: ProducerSession) -> None:
        self._session = session
        self._clear: dict[Partition, object] = {}  # the connection over which the leader reported nothing open

    def is_clear(self, partition: Partition, node: int) -> bool:
        """Check whether the node has reported nothing open in a partition on its current connection."""
        connection = self._session.client.connection(node)
        return connection is not None and self._clear.get(partition) is connection

    def note(self, partitions: Iterable[Partition]) -> None:
        """Note that the leaders of these partitions have just reported nothing open."""
        for partition in partitions:
            node = self._session.leader(partition)
            if node is not None and (connection := self._session.client.connection(node)) is not None:
                self._clear[partition] = connection

    def forget(self, partition: Partition) -> None:
        """Have the leader of a partition asked again before the next write into the partition."""
        self._clear.pop(partition, None)

    def forget_all(self) -> None:
        """Have the leader of each partition asked again before the next write into it."""
        self._clear.clear()

    async def check(self, write: Write, leaders: Mapping[Partition, int]) -> None:
        """Raise where a partition holds an older open transaction, which this transaction's marker would end.

        The marker of a transaction that this session has ended may only be late: a transaction hangs if it is still
        open after the coordinator has written its markers, or when the caller's time is over.
        """
        unclear = [partition for partition, node in leaders.items() if not self.is_clear(partition, node)]
        if not unclear:
            return
        write.waiting_for = unclear[0][0]
        write.hanging, unanswered = await self.ask(unclear)
        if write.hanging and self._session.has_ended:
            write.waiting_for = ""
            with contextlib.suppress(*UNSUPPORTED):
                await self._session.await_markers()
            write.waiting_for = min(write.hanging)[0]
            write.hanging, unanswered = await self.ask(unclear)
        if write.hanging:
            write.waiting_for = ""
            raise errors.KafkaError(f"a transaction of this producer id hangs in {sorted(write.hanging)}")
        if unanswered:
            write.waiting_for = min(unanswered)[0]
            raise TimeoutError(f"no leader answered whether a transaction is open in {sorted(unanswered)}")
        write.waiting_for = ""

    async def ask(
        self,
        partitions: Collection[Partition],
        timeout_s: float = METADATA_TIMEOUT_S,
        producer_id: int | None = None,
    ) -> tuple[dict[Partition, int], set[Partition]]:
        """Find the open transactions of a producer id: the session's, or one that it has had.

        Returns their first offset, by partition, and the partitions whose leader gave no answer. Partitions that the
        service may not inspect, or whose broker is older than 2.8, count as clear.
        """
        found = await active_producers(self._session.client, partitions, timeout_s)
        open_from = hanging(found.active, {self._session.producer_id if producer_id is None else producer_id})
        unasked = {partition for partition, code in found.failed.items() if code in FINAL}
        for topic, _ in unasked:
            _log_once(topic, found.failed)
        self.note((found.active.keys() | unasked) - open_from.keys())
        return open_from, set(partitions) - found.active.keys() - unasked


def _log_once(topic: str, failed: dict[Partition, int]) -> None:
    """Log once per topic that its producers cannot be inspected."""
    if topic in _logged or len(_logged) >= LOGGED_MAX:
        return
    _logged.add(topic)
    old = any(code == UNSUPPORTED_VERSION for (name, _), code in failed.items() if name == topic)
    log.warning(
        "hanging transactions are not looked for",
        topic=topic,
        why="the brokers are older than Kafka 2.8" if old else "the service has no permission to Read the topic",
    )
