"""Tests the meaning of aiokafka's errors for a transaction, and for the caller."""

import pytest
from aiokafka import errors

from service.kafka import outcomes
from service.kafka.outcomes import RECORD_ERRORS, RecordError, TransactionFailed, TransactionOutcome


@pytest.mark.parametrize("may_commit", [False, True])
@pytest.mark.parametrize("error", [errors.ProducerFenced(), errors.InvalidProducerEpoch()])
def test_a_fence_is_no_clean_answer_to_a_commit_either(error: Exception, may_commit: bool) -> None:
    assert outcomes.outcome_of(error, may_commit) is TransactionOutcome.FENCED


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        errors.KafkaConnectionError(),
        errors.NotLeaderForPartitionError(),
        AssertionError(),
        KeyError("x"),
    ],
)
def test_the_rest_is_in_doubt_only_once_a_commit_was_asked_for(error: Exception) -> None:
    assert outcomes.outcome_of(error, may_commit=False) is TransactionOutcome.ABORTED
    assert outcomes.outcome_of(error, may_commit=True) is TransactionOutcome.UNKNOWN


def test_a_broker_error_means_aborted_only_where_no_commit_was_requested() -> None:
    every = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.BrokerResponseError)
    ]
    assert len(every) > 40
    for kind in every:
        assert outcomes.outcome_of(kind(), True) in (TransactionOutcome.UNKNOWN, TransactionOutcome.FENCED)
        assert outcomes.outcome_of(kind(), False) in (TransactionOutcome.ABORTED, TransactionOutcome.FENCED)


def test_every_refusal_has_a_4xx_status_and_a_reason() -> None:
    for code, error in RECORD_ERRORS.items():
        assert isinstance(error, RecordError)
        assert 400 <= error.kind.status < 500, code
        assert error.why


@pytest.mark.parametrize(
    "passing",
    [
        errors.NotLeaderForPartitionError,
        errors.LeaderNotAvailableError,
        errors.NotEnoughReplicasError,
        errors.NotEnoughReplicasAfterAppendError,
        errors.RequestTimedOutError,
        errors.CoordinatorNotAvailableError,
        errors.ConcurrentTransactions,
        errors.OutOfOrderSequenceNumber,
        errors.DuplicateSequenceNumber,
        errors.InvalidProducerEpoch,
    ],
)
def test_a_transient_error_is_no_refusal(passing: type[errors.BrokerResponseError]) -> None:
    assert passing.errno not in RECORD_ERRORS


def test_the_codes_that_aiokafka_does_not_know_are_still_unknown_to_it() -> None:
    """Once aiokafka knows them, its exceptions will be more precise than UnknownError, and the table should be too."""
    for code in (outcomes.INVALID_RECORD, outcomes.PRODUCER_FENCED, outcomes.TRANSACTION_ABORTABLE):
        assert errors.for_code(code) is errors.UnknownError


def test_a_transaction_failure_names_its_outcome_and_its_refusals() -> None:
    failed = TransactionFailed(TransactionOutcome.ABORTED, "the cause", {"orders": RECORD_ERRORS[3]})
    assert str(failed) == "aborted: the cause"
    assert failed.record_errors["orders"].kind.code == "unknown-topic"
    assert failed.stuck == ()


def test_each_refusing_error_code_has_its_problem() -> None:
    """By their numbers in Kafka's protocol; with any other code the event is sent again until its deadline."""
    kinds = {code: error.kind.code for code, error in RECORD_ERRORS.items()}
    too_large, unknown, refused = "too-large", "unknown-topic", "record-refused"
    wanted = {3: unknown, 17: unknown, 29: "forbidden-topic", 10: too_large, 18: too_large}
    assert kinds == wanted | dict.fromkeys((2, 21, 32, 43, 44, 87), refused)
