"""Kafka's transactions in memory: as much of a broker as `TransactionalProducer` and the readers of its topics need."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from service.core.problems import KafkaAway
from service.kafka.group_offsets import OFFSETS_TOPIC, REFUSALS, GroupOffsets
from service.kafka.hanging import RecordCoordinates
from service.kafka.outcomes import RECORD_ERRORS, OffsetsRefused, TransactionFailed, TransactionOutcome
from service.kafka.producer import TransactionalProducer
from service.kafka.records import Record, RecordMetadata

UNKNOWN_TOPIC_CODE = 3
TOO_LARGE_CODE = 10
ILLEGAL_GENERATION_CODE = 22


@dataclass
class Log:
    """One partition: records, each with the state of its transaction; None is a marker."""

    entries: list[tuple[bytes | None, "Transaction"] | None] = field(default_factory=list)

    def committed(self) -> list[tuple[int, bytes | None]]:
        """Return what a read_committed consumer sees: up to the first record of an open transaction."""
        seen = []
        for offset, entry in enumerate(self.entries):
            if entry is None:
                continue
            value, transaction = entry
            if transaction.state == "open":
                break
            if transaction.state == "committed":
                seen.append((offset, value))
        return seen


@dataclass
class Transaction:
    """The state (`open`, `committed` or `aborted`), and the partitions of the transaction."""

    state: str = "open"
    touched: list[Log] = field(default_factory=list)

    def end(self, state: str) -> None:
        self.state = state
        for log in self.touched:
            log.entries.append(None)


class Broker:
    """Topics, and by transactional id the newest producer and its open transaction."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Log]] = {}
        self.bytes_max: dict[str, int] = {}
        self.epochs: dict[str, tuple[int, int]] = {}
        self.open: dict[str, Transaction] = {}
        self.now_ms = 1_700_000_000_000
        self.away = False
        self.generations: dict[tuple[str, str], int] = {}  # of groups, by (group, member)
        self.offsets: list[GroupOffsets] = []  # that were committed

    def create(self, topic: str, partitions: int, bytes_max: int = 1_048_588) -> None:
        self.topics[topic] = [Log() for _ in range(partitions)]
        self.bytes_max[topic] = bytes_max

    def init_producer_id(self, transactional_id: str) -> tuple[int, int]:
        """Fence the older producers, and end their transaction."""
        if self.away:
            raise KafkaAway("it is away")
        producer_id, epoch = self.epochs.get(transactional_id, (1000 + len(self.epochs), -1))
        self.epochs[transactional_id] = (producer_id, epoch + 1)
        if transaction := self.open.pop(transactional_id, None):
            transaction.end("aborted")
        return self.epochs[transactional_id]

    def append(self, transaction: Transaction, record: Record) -> int:
        log = self.topics[record.topic][record.partition]
        if all(log is not touched for touched in transaction.touched):
            transaction.touched.append(log)
        log.entries.append((record.value, transaction))
        return len(log.entries) - 1


class MemoryProducer(TransactionalProducer):
    """One session of a transactional id's producer on a `Broker`."""

    def __init__(self, broker: Broker, transactional_id: str) -> None:
        self._broker = broker
        self._transactional_id = transactional_id
        self._mine = (-1, -1)
        self._over = True
        self._wanted: list[tuple[str, int]] | None = None  # the partitions to open
        self._half: tuple[Transaction, tuple[str, int]]  # sent and not committed
        self._offsets: GroupOffsets | None = None  # of the transaction

    async def start(self) -> None:
        self._mine = self._broker.init_producer_id(self._transactional_id)
        self._over = False

    @property
    def producer_id(self) -> int:
        return self._mine[0]

    @property
    def epoch(self) -> int:
        return self._mine[1]

    @property
    def identity(self) -> tuple[int, int]:
        return self._mine

    @property
    def lost(self) -> bool:
        return False

    def begin_early(self, partitions: Sequence[tuple[str, int]]) -> None:
        self._wanted = list(partitions)

    async def abandon(self) -> None:
        if self._wanted is not None:
            self._transaction().end("aborted")
            del self._broker.open[self._transactional_id]

    def _transaction(self) -> Transaction:
        """Begin a transaction, which touches the wanted partitions if all of them exist."""
        self._check()
        wanted, self._wanted = self._wanted or [], None
        transaction = self._broker.open[self._transactional_id] = Transaction()
        logs = [self._broker.topics.get(topic, [])[partition : partition + 1] for topic, partition in wanted]
        if all(logs):
            transaction.touched = [log for (log,) in logs]
        return transaction

    def _check(self) -> None:
        if self._over or self._broker.away:
            self._over = True
            raise TransactionFailed(TransactionOutcome.ABORTED, "the producer's life is over, or nobody answers")
        if self._broker.epochs[self._transactional_id] != self._mine:
            self._over = True
            raise TransactionFailed(TransactionOutcome.FENCED, "ProducerFenced()")

    async def commit_offsets(self, offsets: GroupOffsets, *, ask_leader: bool = False) -> RecordCoordinates | None:
        self._check()
        if self._broker.generations.get((offsets.group, offsets.member)) != offsets.generation:
            self._wanted = None
            raise OffsetsRefused(REFUSALS[ILLEGAL_GENERATION_CODE])
        self._offsets = offsets
        return RecordCoordinates((OFFSETS_TOPIC, 0), len(self._broker.offsets))

    async def send(self, records: Sequence[Record], ledger: tuple[str, int]) -> list[RecordMetadata]:
        broker = self._broker
        transaction = self._transaction()
        record_errors = {record.topic: RECORD_ERRORS[code] for record in records if (code := self._error_code(record))}
        if record_errors:
            self._over = True
            raise TransactionFailed(TransactionOutcome.ABORTED, "refused", record_errors)
        self._half = transaction, ledger
        return [RecordMetadata(broker.append(transaction, record), record.timestamp) for record in records]

    async def commit(self, ledger_record: bytes) -> int:
        self._check()
        broker, (transaction, ledger) = self._broker, self._half
        offset = broker.append(transaction, Record(*ledger, None, ledger_record, [], broker.now_ms))
        del broker.open[self._transactional_id]
        transaction.end("committed")
        if self._offsets is not None:
            broker.offsets.append(self._offsets)
            self._offsets = None
        return offset

    def _error_code(self, record: Record) -> int:
        if record.partition >= len(self._broker.topics.get(record.topic, ())):
            return UNKNOWN_TOPIC_CODE
        return TOO_LARGE_CODE if len(record.value or b"") > self._broker.bytes_max[record.topic] else 0

    async def close(self) -> None:
        self._over = True
