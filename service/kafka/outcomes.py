"""What an error of aiokafka means for a transaction: one table, three outcomes and the fence."""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final, NamedTuple

from aiokafka import errors

from service.core.problems import FORBIDDEN_TOPIC, RECORD_REFUSED, TOO_LARGE, UNKNOWN_TOPIC, KafkaAway, Kind

# Not among aiokafka's numbers, which turn them into UnknownError (KIP-360, KIP-890).
INVALID_RECORD: Final = 87
PRODUCER_FENCED: Final = 90
TRANSACTION_ABORTABLE: Final = 120


class TransactionOutcome(Enum):
    """The fate of a transaction, as far as its own producer can tell."""

    COMMITTED = "committed"  # a clean commit, every send awaited
    ABORTED = "aborted"  # its ledger record is not in Kafka: recovery will abort it
    UNKNOWN = "unknown"  # its ledger record was sent, or a commit asked for, and no clean answer came
    FENCED = "fenced"  # another producer has the transactional id; whether we committed first is unknown too


class RecordError(NamedTuple):
    """A broker's refusal for good: what the caller is answered, and why in plain words."""

    kind: Kind
    why: str


class Refused(Exception):
    """There is no such partition, or none for the service; its argument is the Refusal."""

    @property
    def refusal(self) -> RecordError:
        refusal = self.args[0]
        assert isinstance(refusal, RecordError)
        return refusal


class RecordRefused(KafkaAway):
    """The broker refuses a record of Fencepost's own for good: nothing of its batch was written."""

    def __init__(self, why: str, refusal: RecordError) -> None:
        super().__init__(why)
        self.refusal = refusal


class TransactionFailed(Exception):
    """Anything else than a clean commit: the producer's life ends here.

    `refusals` names the topics that the broker refused a record for, and `stuck` those that it gave no answer for in
    time: what may have poisoned the group. Everything else in it is innocent. `hanging` names partitions in which an
    older transaction is open: the slot's recovery is to end it.
    """

    def __init__(
        self,
        verdict: TransactionOutcome,
        cause: str,
        refusals: Mapping[str, RecordError] | None = None,
        stuck: Collection[str] = (),
        hanging: Collection[tuple[str, int]] = (),
    ) -> None:
        super().__init__(f"{verdict.value}: {cause}")
        self.verdict = verdict
        self.refusals = refusals or {}
        self.stuck = stuck
        self.hanging = hanging

    @property
    def is_bug(self) -> bool:
        """Was it raised for something that Kafka and the network have no part in?"""
        return self.__cause__ is not None and is_bug(self.__cause__)


OUTSIDE_BOUNDS: Final = RecordError(RECORD_REFUSED, "the timestamp is outside of the topic's bounds")
# Codes by which a broker refuses a record or a topic for good: nothing of that batch was written.
REFUSALS: Final = {
    errors.UnknownTopicOrPartitionError.errno: RecordError(
        UNKNOWN_TOPIC, "the topic or partition is not there (any more)"
    ),
    errors.InvalidTopicError.errno: RecordError(UNKNOWN_TOPIC, "the topic's name is not one that Kafka takes"),
    errors.TopicAuthorizationFailedError.errno: RecordError(FORBIDDEN_TOPIC, "the service has no leave to write to it"),
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


# All that a request to Kafka may meet, and what our own code makes of an answer that refuses it.
MET: Final = (errors.KafkaError, KafkaAway, Refused, OSError, TimeoutError)


def is_bug(error: BaseException) -> bool:
    """Is it none of what a request to Kafka may meet? Then it is told with its traceback, and not as Kafka's."""
    return not isinstance(error, MET)


def of(error: BaseException, may_commit: bool) -> TransactionOutcome:
    """The verdict on an exception that ended a transaction; `may_commit`: its ledger record may be in Kafka.

    ProducerFenced is no clean answer either: the fence may have come after our own commit.
    """
    if isinstance(error, FENCES):
        return TransactionOutcome.FENCED
    return TransactionOutcome.UNKNOWN if may_commit else TransactionOutcome.ABORTED
