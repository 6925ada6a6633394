"""The idempotent producer, for records that tolerate duplicates. It replaces its session after a failure."""

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog

from service.core.logs import Incident
from service.core.problems import KafkaAway
from service.core.supervision import failure_of
from service.kafka import outcomes
from service.kafka.admin import KafkaAdmin
from service.kafka.metadata import Partition
from service.kafka.outcomes import OwnRecordFailed, PartitionUnknown, RecordError
from service.kafka.records import (
    NOT_SENT,
    NotSent,
    Record,
    RecordBatch,
    RecordMetadata,
    RecordResult,
    own_record,
)
from service.kafka.session import ACKS_TIMEOUT_SHARE, SENDS_SHARE, ProducerSession
from service.kafka.throttle import Throttle

log = structlog.get_logger(__name__)


class IdempotentProducer:
    """An idempotent producer (acks=all, no transactions) that replaces its session after a failure.

    A new session has a new producer id, at epoch 0, so records that were in flight may be written twice. Used for
    records that tolerate duplicates: barriers, the journal, and events whose guarantee is `idempotent`.
    """

    def __init__(self, admin: KafkaAdmin, name: str) -> None:
        self._admin = admin
        self._name = name
        self._timeout_s = admin.timeout_s / SENDS_SHARE
        self._session: ProducerSession | None = None
        self.throttle = Throttle()
        self._trouble = Incident(log, "not every record was written")
        self._starting = asyncio.Lock()
        self._sending = asyncio.Lock()  # keeps the order of sequence numbers

    async def identity(self) -> tuple[int, int]:
        """Return the producer id and epoch, starting a session where there is none. Raises KafkaAway."""
        session = await self._current_session()
        return session.producer_id, session.epoch

    async def unthrottled_identity(self) -> tuple[int, int] | None:
        """Return the identity when the throttle time of a quota is over; None if that takes longer than a write may."""
        return await self.identity() if await self.throttle.wait_until_over(self._timeout_s) else None

    @property
    def throttled_s(self) -> float:
        """The longest throttle time in a response of the last write, in seconds (KIP-219)."""
        return self.throttle.longest_s

    async def send(self, topic: str, partition: int, key: bytes | None, value: bytes) -> int:
        """Write one record and await its offset. Raises KafkaAway: the record may be in Kafka nevertheless."""
        (metadata,) = await self.send_all(topic, [(partition, key, value)])
        return metadata.offset

    async def send_all(self, topic: str, contents: Sequence[tuple[int, bytes | None, bytes]]) -> list[RecordMetadata]:
        """Write records of (partition, key, value) and await their metadata. Raises KafkaAway as `send` does.

        Raises OwnRecordFailed where the broker permanently refuses a record.
        """
        records = [own_record(topic, *content) for content in contents]
        metadata: list[RecordMetadata] = []
        for result in await self.write(records):
            if not isinstance(result, RecordMetadata):
                failed = KafkaAway(f"{topic}: {result.why if result else 'no clean answer'}")
                if isinstance(result, RecordError):  # permanent, and logged nowhere else
                    failed = OwnRecordFailed(str(failed), result)
                    self._trouble.add(failed, producer=self._name)
                raise failed
            metadata.append(result)
        return metadata

    async def write(self, records: Sequence[Record]) -> list[RecordResult]:
        """Write records and await the result of each, in their order. Raises KafkaAway: nothing was sent.

        Nothing is sent before the throttle time of a quota is over: a request that waits unread may be read when it was
        given up. Any failure ends the session: a gap in its sequence numbers would make the broker refuse every later
        batch.
        """
        async with self._sending:
            if not await self.throttle.wait_until_over(self._timeout_s):
                why = self._admin.failed("produce", "the throttle time is longer than a write may take")
                self._trouble.add(why, producer=self._name, quota=self.throttle.quota)
                return [NOT_SENT] * len(records)
            session = await self._current_session()
            self.throttle.longest_s = 0.0
            results: list[RecordResult] = [NOT_SENT] * len(records)  # of records that reach no batch
            batches: list[RecordBatch] = []
            try:
                async with asyncio.timeout(self._timeout_s):
                    leaders = await self._leaders(session, records, results)
                    batches = session.batches(records, leaders)
                    await session.send(batches, leaders, int(1000 * ACKS_TIMEOUT_SHARE * self._timeout_s))
            except (Exception, asyncio.CancelledError) as error:  # the results come from the batches' answers
                failure = failure_of(error)
                quota: dict[str, Any] = {"quota": quota_text} if (quota_text := self.throttle.quota) else {}
                self._trouble.add(failure, bug=outcomes.is_bug(failure), producer=self._name, **quota)
            for batch in batches:
                result = batch.result(records)
                for n, member in enumerate(batch.members):
                    results[member] = result[n] if isinstance(result, list) else result
            if not all(isinstance(result, RecordMetadata) for result in results):
                self._admin.count_failure("produce")
                await self._end(session)
            elif failures := self._trouble.end():
                log.info("records are written again", producer=self._name, **failures)
            return results

    async def _leaders(
        self, session: ProducerSession, records: Sequence[Record], results: list[RecordResult]
    ) -> dict[Partition, int]:
        """Find the leaders of the records' partitions; a partition without one gets its result in `results`."""
        leaders: dict[Partition, int] = {}
        partitions = dict.fromkeys((record.topic, record.partition) for record in records)
        session.request_metadata(partitions)
        for partition in partitions:
            node = session.leader(partition)
            if node is None:
                result: RecordResult = NotSent(partition_failed=True)
                try:
                    node = await session.find_leader(partition)
                except TimeoutError:
                    pass
                except PartitionUnknown as unknown:
                    result = unknown.error
                if node is None:
                    for index, record in enumerate(records):
                        if (record.topic, record.partition) == partition:
                            results[index] = result
                    continue
            leaders[partition] = node
        return leaders

    async def _current_session(self) -> ProducerSession:
        """Return the session, started if there was none. Raises KafkaAway."""
        async with self._starting:
            if self._session is None:
                session = ProducerSession(self._admin, self._name, throttle=self.throttle)
                await session.start(self._admin.timeout_s)
                self._session = session
            return self._session

    async def _end(self, session: ProducerSession) -> None:
        if self._session is session:
            self._session = None
        await session.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._end(self._session)
