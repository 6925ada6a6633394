"""The journal of answers, `{ns}.requests`: what was told to whom, so that it can testify against the ledger."""

import asyncio
import contextlib
import random
import time
from typing import Any, Final

import msgspec
import structlog

from service.contract.wire import encode_answers
from service.core.metrics import Telemetry
from service.core.problems import TOO_LARGE, KafkaAway
from service.core.supervision import supervise
from service.kafka.admin import KafkaAdmin
from service.kafka.outcomes import RecordRefused
from service.kafka.producer import IdempotentProducer
from service.kafka.topics import REQUESTS_PARTITIONS
from service.pipeline.request import Committed, WriteRequest, WriteResult

log = structlog.get_logger(__name__)

# A flush comes at the latest after this time, so that the audit lags by no more than it.
FLUSH_S: Final = 0.1
FLUSH_ANSWERS: Final = 2_000
# Answers that may wait while Kafka is away; the next ones are dropped and counted. About 250 bytes each.
WAITING_MAX: Final = 100_000
PAUSE_S: Final = 0.5


class _Answer(msgspec.Struct, gc=False):
    """One answer as wire.encode_answer has it."""

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


def _text(id: bytes, fp: bytes, *more: Any) -> str:
    return _encode(_Answer(id.hex(), fp.hex(), *more)).decode()


class Journal:
    """Written by a plain idempotent producer, apart from the transactions, and never in the way of an answer."""

    def __init__(self, cluster: KafkaAdmin, topic: str, instance: str, telemetry: Telemetry) -> None:
        self._topic = topic
        self._instance = instance
        self._telemetry = telemetry
        self._producer = IdempotentProducer(cluster, "journal")
        self._waiting: list[str] = []
        self._most = FLUSH_ANSWERS  # in one record, as its topic was seen to take them
        self._record_bytes_max = 0
        self._stopping = False
        self._task = supervise("journal", self._run, telemetry)

    @property
    def waiting(self) -> int:
        """How many answers wait to be written."""
        return len(self._waiting)

    def resize(self, record_bytes_max: int) -> None:
        """Try whole flushes again where its topic takes other records than it did."""
        if record_bytes_max != self._record_bytes_max:
            self._record_bytes_max, self._most = record_bytes_max, FLUSH_ANSWERS

    def record(self, request: WriteRequest, status: int, answer: WriteResult | None, latency_s: float) -> None:
        """Note an answer, or (None) that its claim stands, which a 202 says; drop it where too many wait."""
        if len(self._waiting) >= WAITING_MAX:
            self._telemetry.journal_dropped.inc(len(request.events))
            return
        latency_ms = msgspec.Raw(b"%.3f" % (1000 * latency_s))
        if isinstance(answer, Committed):
            self._waiting += [
                _text(id, it.fp, it.at, status, None, answer.replayed, latency_ms, it.topic, it.partition, it.offset)
                for id, it in answer.deliveries
            ]
            return
        at = request.accepted_at or _now_ms()
        code = None if answer is None else answer.kind.code
        self._waiting += [
            _text(event.id, event.fp, at, status, code, False, latency_ms, event.topic, None, None)
            for event in request.events
        ]

    async def _run(self) -> None:
        while not self._stopping:
            await asyncio.sleep(FLUSH_S)
            if not await self._flush():
                await asyncio.sleep(PAUSE_S)

    async def _flush(self) -> bool:
        """Write what waits; False where that failed, and then it waits on.

        A record that its topic finds too large is split in halves; an answer that it does not even take alone is
        dropped, and counted.
        """
        while self._waiting:
            answers = self._waiting[: self._most]
            try:
                record = encode_answers(self._instance, answers)
                await self._producer.send(self._topic, random.randrange(REQUESTS_PARTITIONS), None, record)  # noqa: S311
            except RecordRefused as refused:
                if refused.refusal.kind is not TOO_LARGE:
                    return False
                self._most = max(1, len(answers) // 2)
                if len(answers) > 1:
                    continue
                self._drop(1, refused.refusal.why)
            except KafkaAway:
                return False
            except Exception:  # a bug must not end the journal, nor the service's stop
                log.exception("journal")
                return False
            del self._waiting[: len(answers)]
        return True

    async def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s`; what is left then is dropped, counted and told."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._task
                await self._flush()
        self._task.cancel()
        if left := len(self._waiting):
            self._drop(left, "the process ends")  # no scrape comes any more
        await self._producer.close()

    def _drop(self, answers: int, why: str) -> None:
        self._telemetry.journal_dropped.inc(answers)
        log.warning("answers dropped from the journal", answers=answers, why=why)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
