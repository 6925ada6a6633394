"""Tests which partitions have a hanging transaction, and how it has to end."""

import pytest

from service.kafka.hanging import (
    ActiveProducer,
    Marker,
    RecordCoordinates,
    Transaction,
    Verdict,
    hanging,
    markers_to_read,
    verdict,
    verdicts,
)

LEDGER, ORDERS, BILLS = ("fencepost.ledger", 0), ("orders", 3), ("bills", 1)


def test_a_partition_hangs_where_the_producer_id_has_a_transaction_open() -> None:
    producers = {
        LEDGER: [ActiveProducer(7, 2, -1)],
        ORDERS: [ActiveProducer(8, 0, 5), ActiveProducer(7, 1, 691)],
        BILLS: [ActiveProducer(8, 0, 5)],
    }
    assert hanging(producers, {7}) == {ORDERS: 691}
    assert hanging(producers, {7, 8}) == {ORDERS: 5, BILLS: 5}


@pytest.mark.parametrize(
    ("has_record", "markers", "expected"),
    [
        (True, [Marker.COMMIT, None], Verdict.COMMIT),
        (True, [Marker.ABORT, None], Verdict.ABORT),
        (False, [Marker.ABORT], Verdict.ABORT),
        (True, [], Verdict.COMMIT),
        (False, [], Verdict.ABORT),
        (False, [None], Verdict.ABORT),
        (True, [None], Verdict.UNKNOWN),
    ],
)
def test_a_hanging_transaction_ends_by_its_record_and_its_markers(
    has_record: bool, markers: list[Marker | None], expected: Verdict
) -> None:
    assert verdict(has_record, markers) is expected


@pytest.mark.parametrize("marker", Marker)
def test_a_transaction_that_hangs_in_a_data_partition_ends_as_in_the_ledger(marker: Marker) -> None:
    open_from = {ORDERS: 691}
    transactions = [Transaction({LEDGER: 4, ORDERS: 690}), Transaction({LEDGER: 6, ORDERS: 693, BILLS: 9})]
    assert markers_to_read(open_from, transactions) == {RecordCoordinates(LEDGER, 6), RecordCoordinates(BILLS, 9)}
    assert verdicts(open_from, transactions, {RecordCoordinates(LEDGER, 6): marker}) == {ORDERS: Verdict(marker.value)}


@pytest.mark.parametrize("marker", Marker)
def test_a_transaction_that_hangs_in_the_ledger_ends_as_in_a_data_partition(marker: Marker) -> None:
    open_from = {LEDGER: 6}
    transactions = [Transaction({LEDGER: 4, ORDERS: 690}), Transaction({LEDGER: 6, ORDERS: 693, BILLS: 9})]
    assert verdicts(open_from, transactions, {RecordCoordinates(BILLS, 9): marker}) == {LEDGER: Verdict(marker.value)}
    assert verdicts(open_from, transactions, {}) == {LEDGER: Verdict.UNKNOWN}


def test_a_transaction_that_hangs_everywhere_is_committed_if_it_has_a_ledger_record() -> None:
    transactions = [Transaction({LEDGER: 6, ORDERS: 693})]
    assert verdicts({LEDGER: 6, ORDERS: 691}, transactions, {}) == {LEDGER: Verdict.COMMIT, ORDERS: Verdict.COMMIT}
    assert verdicts({ORDERS: 691, BILLS: 9}, [], {}) == {ORDERS: Verdict.ABORT, BILLS: Verdict.ABORT}


def test_each_partition_ends_by_its_own_transaction() -> None:
    transactions = [Transaction({LEDGER: 4, ORDERS: 691}), Transaction({LEDGER: 6, BILLS: 9})]
    markers = {RecordCoordinates(LEDGER, 4): Marker.COMMIT, RecordCoordinates(LEDGER, 6): Marker.ABORT}
    assert verdicts({ORDERS: 691, BILLS: 9}, transactions, markers) == {
        ORDERS: Verdict.COMMIT,
        BILLS: Verdict.ABORT,
    }


def test_a_commit_decides_where_several_transactions_share_an_open_range() -> None:
    transactions = [Transaction({LEDGER: 4, ORDERS: 691}), Transaction({LEDGER: 6, ORDERS: 693})]
    markers = {RecordCoordinates(LEDGER, 4): Marker.COMMIT, RecordCoordinates(LEDGER, 6): Marker.ABORT}
    assert verdicts({ORDERS: 691}, transactions, markers) == {ORDERS: Verdict.COMMIT}
