"""The journal of answers, `{ns}.requests`, against which the audit checks the ledger."""

import asyncio
import contextlib
import random
from typing import Final

import msgspec
import structlog

from service.contract.wire.journal import encode_answers
from service.core.metrics import Telemetry
from service.core.problems import TOO_LARGE, KafkaAway
from service.core.supervision import supervise
from service.core.time_of_day import now_ms
from service.kafka.admin import KafkaAdmin
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.outcomes import OwnRecordFailed
from service.kafka.topics import REQUESTS_PARTITIONS
from service.pipeline.request import Committed, Quarantined, WriteRequest, WriteResult

log = structlog.get_logger(__name__)

# The longest time between two flushes, and so the most by which the journal lags.
FLUSH_S: Final = 0.1
FLUSH_ANSWERS: Final = 2_000
# Answers of about 250 bytes that may wait while Kafka is away; further ones are dropped and counted.
WAITING_MAX: Final = 100_000
PAUSE_S: Final = 0.5


class _Answer(msgspec.Struct, gc=False):
    """One answer, in the JSON format of wire.journal.encode_answer."""

    id: str
    fp: str
    at: int
    status: int
    code: str | None
    replayed: bool
    latency_ms: msgspec.Raw
    topic: str
    partition: int | None
    offset: int | None


_encode: Final = msgspec.json.Encoder().encode


class Journal:
    """Writes answers to the journal's topic by an idempotent producer, without delaying an answer."""

    def __init__(self, admin: KafkaAdmin, topic: str, instance: str, telemetry: Telemetry) -> None:
        self._topic = topic
        self._instance = instance
        self._telemetry = telemetry
        self._producer = IdempotentProducer(admin, "journal")
        self._waiting: list[_Answer] = []
        self._answers_max = FLUSH_ANSWERS  # answers in one record, fewer if the topic refused a larger record
        self._record_bytes_max = 0
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that writes the answers."""
        self._task = supervise("journal", self._run, self._telemetry)

    @property
    def waiting(self) -> int:
        """How many answers are still to be written."""
        return len(self._waiting)

    def resize(self, record_bytes_max: int) -> None:
        """Try full records again if the topic's max.message.bytes has changed."""
        if record_bytes_max != self._record_bytes_max:
            self._record_bytes_max, self._answers_max = record_bytes_max, FLUSH_ANSWERS

    def record(self, request: WriteRequest, status: int, answer: WriteResult | None, latency_s: float) -> None:
        """Add an answer, or a 202 (`answer` is None: the claim stands). Drops it if too many wait."""
        if len(self._waiting) >= WAITING_MAX:
            self._telemetry.journal_dropped.inc(len(request.events))
            return
        latency_ms = msgspec.Raw(b"%.3f" % (1000 * latency_s))
        if isinstance(answer, Committed):
            more = status, None, answer.replayed, latency_ms
            self._waiting += [
                _Answer(id.hex(), state.fp.hex(), state.at, *more, state.topic, state.partition, state.offset)
                for id, state in answer.deliveries
            ]
            return
        at = request.accepted_at or now_ms()
        code, replayed = None if answer is None else answer.kind.code, False
        if isinstance(answer, Quarantined):  # the ledger names its dead letter
            at, replayed = answer.at, answer.replayed
        self._waiting += [
            _Answer(event.id.hex(), event.fp.hex(), at, status, code, replayed, latency_ms, event.topic, None, None)
            for event in request.events
        ]

    async def _run(self) -> None:
        while not self._stopping:
            await asyncio.sleep(FLUSH_S)
            if not await self._flush():
                await asyncio.sleep(PAUSE_S)

    async def _flush(self) -> bool:
        """Write the waiting answers; False if that failed, and then they wait on.

        A record that is too large for the topic is split in halves. A single answer that is too large is dropped and
        counted.
        """
        while self._waiting:
            answers = self._waiting[: self._answers_max]
            try:
                record = encode_answers(self._instance, [_encode(answers)[1:-1].decode()])
                await self._producer.send(self._topic, random.randrange(REQUESTS_PARTITIONS), None, record)  # noqa: S311
            except OwnRecordFailed as failed:
                if failed.error.kind is not TOO_LARGE:
                    return False
                self._answers_max = max(1, len(answers) // 2)
                if len(answers) > 1:
                    continue
                self._drop(1, failed.error.why)
            except KafkaAway:
                return False
            except Exception:  # a bug must not end the journal, or keep the service from stopping
                log.exception("journal")
                return False
            del self._waiting[: len(answers)]
        return True

    async def close(self, timeout_s: float) -> None:
        """Write the waiting answers for at most `timeout_s`; the rest is dropped, counted and logged."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._task is not None:
                    await self._task
                await self._flush()
        if self._task is not None:
            self._task.cancel()
        if left := len(self._waiting):
            self._drop(left, "the process ends")
        await self._producer.close()

    def _drop(self, answers: int, why: str) -> None:
        """Count and log answers that are not written."""
        self._telemetry.journal_dropped.inc(answers)
        log.warning("answers dropped from the journal", answers=answers, why=why)
