"""The meaning of Kafka's errors for a transaction and for a record: the exceptions, and two tables."""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final, NamedTuple

from aiokafka import errors

from service.core.problems import FORBIDDEN_TOPIC, RECORD_REFUSED, TOO_LARGE, UNKNOWN_TOPIC, KafkaAway, Kind

OK: Final = errors.NoError.errno
# Error codes that aiokafka does not know and turns into UnknownError (KIP-360, KIP-890).
INVALID_RECORD: Final = 87
PRODUCER_FENCED: Final = 90
TRANSACTION_ABORTABLE: Final = 120
CONCURRENT_TRANSACTIONS: Final = errors.ConcurrentTransactions.errno
NOT_ATTEMPTED: Final = errors.OperationNotAttempted.errno
# Codes that are about the transaction, not about the partition that answers with them.
OF_TRANSACTION: Final = (
    errors.InvalidProducerEpoch.errno,
    errors.InvalidProducerIdMapping.errno,
    errors.InvalidTxnState.errno,
    PRODUCER_FENCED,
    TRANSACTION_ABORTABLE,
    CONCURRENT_TRANSACTIONS,
)


class TransactionOutcome(Enum):
    """How a transaction without a clean commit ended, as far as its own producer can tell."""

    ABORTED = "aborted"  # its ledger record is not in Kafka: recovery will abort it
    UNKNOWN = "unknown"  # its ledger record was sent, or a commit asked for, and no clean answer came
    FENCED = "fenced"  # a newer producer has the transactional id; the commit may have come before the fence


class RecordError(NamedTuple):
    """A broker's permanent error of a record: the kind of problem for the client, and the reason."""

    kind: Kind
    why: str


class TransactionAbortable(errors.KafkaError):  # type: ignore[misc]  # aiokafka ships no types
    """A broker says that the transaction cannot be committed, and that its producer may go on after an abort."""

    errno = TRANSACTION_ABORTABLE
    message = "TRANSACTION_ABORTABLE"


class TransactionAborted(Exception):
    """A transaction was aborted because a broker answered TRANSACTION_ABORTABLE; its producer is ready for the next.

    Nothing of the transaction is committed or can be.
    """


class PartitionUnknown(Exception):
    """A partition does not exist, or the service may not see it; the argument is the RecordError."""

    @property
    def error(self) -> RecordError:
        error = self.args[0]
        assert isinstance(error, RecordError)
        return error


class OwnRecordFailed(KafkaAway):
    """The broker permanently refuses one of Fencepost's own records: nothing of its batch was written."""

    def __init__(self, why: str, error: RecordError) -> None:
        super().__init__(why)
        self.error = error


class OffsetsRefused(Exception):
    """Kafka refuses the offsets of a group, for the reason that the argument gives (RecordError)."""

    @property
    def error(self) -> RecordError:
        error = self.args[0]
        assert isinstance(error, RecordError)
        return error


class TransactionFailed(Exception):
    """A transaction did not end with a clean commit; the producer must be closed.

    `record_errors`: by topic, why the broker refused a record. `stuck`: topics that gave no answer in time. Only these
    topics can have failed the group. `hanging`: partitions that hold an older open transaction, which the slot's
    recovery has to end. `offsets_error`: why the coordinator of a consumer group failed the transaction; without it the
    transaction would not have failed.
    """

    def __init__(
        self,
        outcome: TransactionOutcome,
        cause: str,
        record_errors: Mapping[str, RecordError] | None = None,
        stuck: Collection[str] = (),
        hanging: Collection[tuple[str, int]] = (),
        offsets_error: RecordError | None = None,
    ) -> None:
        super().__init__(f"{outcome.value}: {cause}")
        self.outcome = outcome
        self.record_errors = record_errors or {}
        self.stuck = stuck
        self.hanging = hanging
        self.offsets_error = offsets_error

    @property
    def is_bug(self) -> bool:
        """Check whether the cause is an error in this program, and neither Kafka's nor the network's."""
        return self.__cause__ is not None and is_bug(self.__cause__)


OUTSIDE_BOUNDS: Final = RecordError(RECORD_REFUSED, "the timestamp is outside of the topic's bounds")
# By error code, the permanent errors of a record: nothing of its batch was written.
RECORD_ERRORS: Final = {
    errors.UnknownTopicOrPartitionError.errno: RecordError(
        UNKNOWN_TOPIC, "the topic or partition is not there (any more)"
    ),
    errors.InvalidTopicError.errno: RecordError(UNKNOWN_TOPIC, "Kafka does not allow the topic's name"),
    errors.TopicAuthorizationFailedError.errno: RecordError(
        FORBIDDEN_TOPIC, "the service has no permission to write to it"
    ),
    errors.MessageSizeTooLargeError.errno: RecordError(TOO_LARGE, "the record is larger than its max.message.bytes"),
    errors.RecordListTooLargeError.errno: RecordError(TOO_LARGE, "the record is larger than its segment.bytes"),
    errors.InvalidTimestampError.errno: OUTSIDE_BOUNDS,
    errors.InvalidRequiredAcksError.errno: RecordError(RECORD_REFUSED, "the topic does not take acks=all"),
    errors.UnsupportedForMessageFormatError.errno: RecordError(
        RECORD_REFUSED, "its message format is too old for headers"
    ),
    errors.PolicyViolationError.errno: RecordError(RECORD_REFUSED, "the record violates the broker's policy"),
    errors.CorruptRecordException.errno: RecordError(RECORD_REFUSED, "the broker finds the record corrupt"),
    INVALID_RECORD: RecordError(RECORD_REFUSED, "the broker's validation refuses it (a compacted topic needs a key)"),
}

FENCES: Final = (errors.ProducerFenced, errors.InvalidProducerEpoch)


# Exceptions that a request to Kafka may end with. Any other is a bug.
EXPECTED_ERRORS: Final = (errors.KafkaError, KafkaAway, PartitionUnknown, OSError, TimeoutError)


def is_bug(error: BaseException) -> bool:
    """Check whether an exception is none of EXPECTED_ERRORS; such a bug is logged with its traceback."""
    return not isinstance(error, EXPECTED_ERRORS)


def raise_if_error(code: int, what: str) -> None:
    """Raise the error of a code that is not OK; separately those of the codes that aiokafka calls unknown."""
    if code == OK:
        return
    if code == PRODUCER_FENCED:
        raise errors.ProducerFenced(what)
    if code == TRANSACTION_ABORTABLE:
        raise TransactionAbortable(what)
    raise errors.for_code(code)(what)


def outcome_of(error: BaseException, may_commit: bool) -> TransactionOutcome:
    """Map an exception that ended a transaction to its outcome; `may_commit`: the ledger record may be in Kafka.

    ProducerFenced does not prove an abort: the fence may have come after this producer's own commit.
    """
    if isinstance(error, FENCES):
        return TransactionOutcome.FENCED
    return TransactionOutcome.UNKNOWN if may_commit else TransactionOutcome.ABORTED
