"""Tests how much of a slot's ledger the recovery of a hanging transaction reads, and what it decides by that."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import errors
from structlog.testing import capture_logs

from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ledger import Begin, LedgerRecord
from service.contract.wire.ledger_entries import CommittedOffset, Entry, LedgerOffsets
from service.core.metrics import Telemetry
from service.kafka.admin import KafkaAdmin
from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.hanging import ActiveProducer, Marker
from service.kafka.hanging_transactions import HangingTransactions
from service.kafka.inspection import LogEntry
from service.kafka.metadata import Partition
from service.slots import hanging_recovery as module
from service.slots.hanging_recovery import CLOCKS_APART_MS, LOOK_BACK, HangingRecovery
from tests.unit.fakes import NOW_MS

LEDGER: Partition = ("ledger", 3)
X: Partition = ("orders", 0)
Y: Partition = ("orders", 1)
OFFSETS: Partition = (OFFSETS_TOPIC, 13)
PRODUCER_ID, EPOCH = 7, 5
FORMER_ID, FORMER_EPOCH = 6, 32_766
MINUTE_MS = 60_000
TERM_MINUTES = 5_000  # a term that began three days ago, with a record each minute
HANGS_AT = 1_000  # the first offset of the open transaction
FETCHED = 10  # entries in one response
TIMEOUT_S = 10.0


class Log:
    """The partitions of a broker, of which it counts the entries that are read, and a producer after its fence."""

    producer_id = PRODUCER_ID
    client = None
    without_marker: Collection[Partition] = frozenset()
    former_ids: Collection[int] = frozenset()

    def __init__(self) -> None:
        self.entries: dict[Partition, list[tuple[int, LogEntry]]] = {LEDGER: [], X: [], Y: []}  # with their times, ms
        self.starts = {LEDGER: 0, X: 0, Y: 0}
        self.open_from: dict[Partition, int] = {}
        self.ended: dict[Partition, str] = {}
        self.read: list[int] = []  # offsets of the ledger
        self.forbidden: set[Partition] = set()  # may not be read, or ended
        self.fetch_s = 0.0
        self.deleted_while_read = 0  # retention deletes up to this offset before the first fetch of a lower one
        self.open_of_others: dict[int, dict[Partition, ActiveProducer]] = {}
        self.markers: list[tuple[Partition, int, str]] = []  # written for other producer ids
        self.refusal = ""  # of those markers

    def append(self, value: bytes | None, at_ms: int, epoch: int = EPOCH, producer_id: int = PRODUCER_ID) -> int:
        """Append a record and its commit marker to the ledger; returns the record's offset."""
        offset = len(self.entries[LEDGER])
        for each, marker in ((value, None), (None, Marker.COMMIT)):
            entry = LogEntry(len(self.entries[LEDGER]), producer_id, epoch, each, (), marker)
            self.entries[LEDGER].append((at_ms, entry))
        return offset

    def hang(self, partition: Partition, accepted_at_ms: int) -> None:
        """Leave a transaction open whose first record in the partition was accepted then."""
        self._write(partition, accepted_at_ms, PRODUCER_ID, EPOCH, LEDGER[1])
        self.open_from[partition] = HANGS_AT

    def hang_under(self, producer_id: int, partition: Partition, accepted_at_ms: int, slot: int = LEDGER[1]) -> None:
        """Leave a transaction of another producer id open."""
        if partition != LEDGER:
            self._write(partition, accepted_at_ms, producer_id, FORMER_EPOCH, slot)
        start = HANGS_AT if partition != LEDGER else self.entries[LEDGER][-1][1].offset
        active = ActiveProducer(producer_id, FORMER_EPOCH, start)
        self.open_of_others.setdefault(producer_id, {})[partition] = active

    def _write(self, partition: Partition, accepted_at_ms: int, producer_id: int, epoch: int, slot: int) -> None:
        stamp = Stamp(b"i" * 16, b"f" * 8, accepted_at_ms, slot, producer_id, epoch, "me")
        first = LogEntry(HANGS_AT, producer_id, epoch, b"{}", ((STAMP_HEADER, stamp.encode()),), None)
        self.starts[partition], self.entries[partition] = HANGS_AT, [(accepted_at_ms, first)]

    def delete_before(self, offset: int) -> None:
        """Delete the ledger's older records, as retention does."""
        self.entries[LEDGER] = [each for each in self.entries[LEDGER] if each[1].offset >= offset]
        self.starts[LEDGER] = offset

    async def fetch(self, client: object, partition: Partition, offset: int) -> tuple[list[LogEntry], int, int]:
        await asyncio.sleep(self.fetch_s)
        if partition in self.forbidden:
            raise errors.TopicAuthorizationFailedError
        if partition == LEDGER and self.deleted_while_read > self.starts[LEDGER]:
            self.delete_before(self.deleted_while_read)
        if offset < self.starts[partition]:
            raise errors.OffsetOutOfRangeError
        present = [entry for _, entry in self.entries[partition] if entry.offset >= offset][:FETCHED]
        if partition == LEDGER:
            self.read += [entry.offset for entry in present]
        end = self.starts[partition] + len(self.entries[partition])
        return present, present[-1].offset + 1 if present else end, end

    async def offsets_since(
        self, cluster: object, topic: str, partitions: Sequence[int], since_ms: int
    ) -> dict[int, int | None]:
        found = [entry.offset for at_ms, entry in self.entries[topic, partitions[0]] if at_ms >= since_ms]
        return {partitions[0]: found[0] if found else None}

    async def find_own(self, partitions: Collection[Partition]) -> tuple[Mapping[Partition, int], set[Partition]]:
        assert set(self.open_from) <= set(partitions)
        return self.open_from, set()

    async def find_of_others(self, partitions: Collection[Partition]) -> dict[int, dict[Partition, ActiveProducer]]:
        return {
            producer_id: found
            for producer_id, hanging in self.open_of_others.items()
            if (found := {partition: each for partition, each in hanging.items() if partition in partitions})
        }

    async def end_former(self, partition: Partition, former: ActiveProducer, *, commit: bool) -> str:
        assert self.ended == {LEDGER: "abort"}, "the coordinator has not confirmed that the other ids were replaced"
        if not self.refusal:
            self.markers.append((partition, former.producer_id, "commit" if commit else "abort"))
        return self.refusal

    async def end_own(self, partitions: Collection[Partition], *, commit: bool) -> list[Partition]:
        ended = [partition for partition in partitions if partition not in self.forbidden]
        self.ended |= dict.fromkeys(ended, "commit" if commit else "abort")
        return ended

    def failed(self, label: str, why: str) -> Exception:
        return AssertionError(why)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A ledger with a begin record, and since then a record each minute, all of other partitions."""
    log = Log()
    monkeypatch.setattr(module, "fetch", log.fetch)
    monkeypatch.setattr(module, "offsets_since", log.offsets_since)
    began_ms = NOW_MS - TERM_MINUTES * MINUTE_MS
    log.append(Begin(LEDGER[1], PRODUCER_ID, EPOCH, "me", 1, began_ms).encode(), began_ms)
    for minute in range(1, TERM_MINUTES):
        log.append(ledger_record(("payments", 0), minute), began_ms + minute * MINUTE_MS)
    return log


def ledger_record(partition: Partition, offset: int, producer_id: int = PRODUCER_ID, *more: Partition) -> bytes:
    entries = [Entry(b"i" * 16, b"f" * 8, NOW_MS, *each, offset, NOW_MS) for each in (partition, *more)]
    return LedgerRecord(LEDGER[1], producer_id, EPOCH, "me", entries).encode()


async def recover(
    log: Log, timeout_s: float = TIMEOUT_S, hints: Collection[Partition] = (), *, knows_applied: bool = True
) -> tuple[dict[Partition, str], dict[str, float]]:
    """Run the recovery; returns how each partition's transaction was ended, and the number of each verdict."""
    telemetry = Telemetry()
    hanging, cluster = cast(HangingTransactions, log), cast(KafkaAdmin, log)
    recovery = HangingRecovery(cluster, LEDGER, hanging, timeout_s, telemetry.recovery.hanging_ended)
    applied = log.entries[LEDGER][-1][1].offset + 1 if knows_applied else None
    assert await recovery.run(applied, {*log.open_from, *hints}) == set()
    (family,) = telemetry.recovery.hanging_ended.collect()
    return log.ended, {each.labels["verdict"]: each.value for each in family.samples if each.value}


async def test_a_ledger_record_is_searched_for_only_since_its_event_was_accepted(log: Log) -> None:
    """A transaction without one is aborted, however long ago its term began and however long the ledger is."""
    log.hang(X, NOW_MS - 10 * MINUTE_MS)
    assert await recover(log) == ({X: "abort"}, {"abort": 1})
    minutes = 10 + CLOCKS_APART_MS // MINUTE_MS
    assert min(log.read) >= 2 * (TERM_MINUTES - minutes)
    assert len(log.read) <= 2 * minutes + LOOK_BACK + FETCHED


async def test_the_ledger_is_read_back_once_for_all_partitions_of_a_transaction(log: Log) -> None:
    log.hang(X, NOW_MS - 10 * MINUTE_MS)
    log.hang(Y, NOW_MS - 20 * MINUTE_MS)
    assert await recover(log) == ({X: "abort", Y: "abort"}, {"abort": 2})
    assert len(log.read) <= 2 * (20 + CLOCKS_APART_MS // MINUTE_MS) + LOOK_BACK + FETCHED


async def test_a_ledger_record_that_is_found_decides(log: Log) -> None:
    log.entries[LEDGER] = log.entries[LEDGER][: 2 * (TERM_MINUTES - 60)]
    log.append(ledger_record(X, HANGS_AT), NOW_MS - 60 * MINUTE_MS)
    for minute in range(59, 0, -1):
        log.append(ledger_record(("payments", 0), minute), NOW_MS - minute * MINUTE_MS)
    log.hang(X, NOW_MS - 60 * MINUTE_MS)
    assert await recover(log) == ({X: "commit"}, {"commit": 1})


@pytest.mark.parametrize("has_record", [True, False])
async def test_offsets_of_a_group_hang_as_their_ledger_record_says(log: Log, has_record: bool) -> None:
    """Their first record has no header: the time at which the broker appended it bounds the search."""
    at_ms = NOW_MS - 60 * MINUTE_MS
    log.starts[OFFSETS] = log.open_from[OFFSETS] = HANGS_AT
    first = LogEntry(HANGS_AT, PRODUCER_ID, EPOCH, b"", (), None, at_ms)
    log.entries[OFFSETS] = [(at_ms, first)]
    log.entries[LEDGER] = log.entries[LEDGER][: 2 * (TERM_MINUTES - 60)]
    if has_record:
        place = OFFSETS[1], HANGS_AT
        offsets = LedgerOffsets(b"i" * 16, b"f" * 8, at_ms, "g", "m", 7, [CommittedOffset("orders", 0, 5)], *place)
        log.append(LedgerRecord(LEDGER[1], PRODUCER_ID, EPOCH, "me", [], offsets=offsets).encode(), at_ms)
    for minute in range(59, 0, -1):
        log.append(ledger_record(("payments", 0), minute), NOW_MS - minute * MINUTE_MS)
    verdict = "commit" if has_record else "abort"
    assert await recover(log) == ({OFFSETS: verdict}, {verdict: 1})
    assert len(log.read) - LOOK_BACK - FETCHED <= 2 * (60 + CLOCKS_APART_MS // MINUTE_MS)


async def test_what_may_not_be_ended_is_not_logged_or_counted_as_ended(log: Log) -> None:
    log.hang(X, NOW_MS - 10 * MINUTE_MS)
    log.starts[OFFSETS] = log.open_from[OFFSETS] = HANGS_AT
    log.forbidden = {OFFSETS}
    with capture_logs() as lines:
        assert await recover(log) == ({X: "abort"}, {"abort": 1})
    (line,) = [line for line in lines if line["event"] == "hanging transaction ended"]
    assert (line["topic"], line["partition"]) == X


async def test_the_log_names_the_partitions_whose_evidence_could_not_be_read(log: Log) -> None:
    """A marker in the partition of a group's offsets, without the permission to Read it: the ledger record decides."""
    log.entries[LEDGER] = log.entries[LEDGER][: 2 * (TERM_MINUTES - 60)]
    at_ms = NOW_MS - 60 * MINUTE_MS
    entry = Entry(b"i" * 16, b"f" * 8, NOW_MS, *X, HANGS_AT, NOW_MS)
    offsets = LedgerOffsets(b"i" * 16, b"f" * 8, at_ms, "g", "m", 7, [CommittedOffset("orders", 0, 5)], OFFSETS[1], 4)
    log.append(LedgerRecord(LEDGER[1], PRODUCER_ID, EPOCH, "me", [entry], offsets=offsets).encode(), at_ms)
    log.entries[LEDGER].pop()  # its marker is missing too
    log.hang(X, at_ms)
    log.open_from[LEDGER] = log.entries[LEDGER][-1][1].offset
    log.forbidden = {OFFSETS}
    with capture_logs() as lines:
        ended, verdicts = await recover(log)
    assert (ended, verdicts) == ({X: "commit", LEDGER: "commit"}, {"unknown": 2})
    assert [line["not_checked"] for line in lines] == [[f"{OFFSETS_TOPIC}/{OFFSETS[1]}"]] * 2


async def test_an_abort_needs_a_ledger_that_is_complete_since_then_or_since_the_begin_record(log: Log) -> None:
    """Else retention may have deleted the ledger record."""
    log.hang(X, NOW_MS - 100 * MINUTE_MS)
    log.delete_before(2 * (TERM_MINUTES - 150))
    assert await recover(log) == ({X: "commit"}, {"unknown": 1})
    log.entries[LEDGER][0] = (log.entries[LEDGER][0][0], begin_at(log.starts[LEDGER]))
    assert await recover(log) == ({X: "abort"}, {"abort": 1})


def begin_at(offset: int) -> LogEntry:
    value = Begin(LEDGER[1], PRODUCER_ID, EPOCH, "me", 1, NOW_MS).encode()
    return LogEntry(offset, PRODUCER_ID, EPOCH, value, (), None)


async def test_records_that_retention_deletes_while_they_are_read_prove_nothing(log: Log) -> None:
    log.hang(X, NOW_MS - 100 * MINUTE_MS)
    log.deleted_while_read = 2 * (TERM_MINUTES - 50)
    assert await recover(log) == ({X: "commit"}, {"unknown": 1})


async def test_a_ledger_without_a_record_since_then_has_none_of_the_transaction(log: Log) -> None:
    log.hang(X, NOW_MS + 2 * CLOCKS_APART_MS)
    assert await recover(log) == ({X: "abort"}, {"abort": 1})


async def test_a_transaction_whose_first_record_is_gone_is_not_aborted(log: Log) -> None:
    log.hang(X, NOW_MS)
    log.starts[X] = HANGS_AT + 1
    assert await recover(log) == ({X: "commit"}, {"unknown": 1})


async def test_the_time_limit_is_of_each_response_and_not_of_a_long_ledger(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that makes progress is not cut off, as the next recovery would only begin it again."""
    loop = asyncio.get_running_loop()
    passed = 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + passed)
    fetch = log.fetch

    async def slow(*arguments: Any) -> tuple[list[LogEntry], int, int]:
        nonlocal passed
        passed += 0.4 * TIMEOUT_S
        return await fetch(*arguments)

    monkeypatch.setattr(module, "fetch", slow)
    log.hang(X, NOW_MS - 10 * MINUTE_MS)
    assert await recover(log) == ({X: "abort"}, {"abort": 1})
    assert passed > 2 * TIMEOUT_S


async def test_a_partition_that_does_not_answer_ends_the_recovery(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(*arguments: Any) -> tuple[list[LogEntry], int, int]:
        raise errors.LeaderNotAvailableError

    async def refresh() -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(module, "fetch", fetch)
    client = SimpleNamespace(tracked_topics={LEDGER[0]}, force_metadata_update=refresh)
    monkeypatch.setattr(log, "client", client)
    log.hang(X, NOW_MS)
    with pytest.raises(AssertionError, match="hanging transactions cannot be determined: TimeoutError"):
        await recover(log, timeout_s=0.05)


@pytest.mark.parametrize("has_record", [True, False])
async def test_what_hangs_under_a_former_producer_id_ends_by_its_own_evidence(log: Log, has_record: bool) -> None:
    """The watch has named the partition; the ledger since then has a record of that id."""
    log.entries[LEDGER] = log.entries[LEDGER][: 2 * (TERM_MINUTES - 60)]
    at_ms = NOW_MS - 60 * MINUTE_MS
    named = ledger_record(X if has_record else Y, HANGS_AT, FORMER_ID)
    log.append(named, at_ms, FORMER_EPOCH, FORMER_ID)
    for minute in range(59, 0, -1):
        log.append(ledger_record(X, HANGS_AT + 1), NOW_MS - minute * MINUTE_MS)
    log.hang_under(FORMER_ID, X, at_ms)
    verdict = "commit" if has_record else "abort"
    assert await recover(log, hints=[X]) == ({LEDGER: "abort"}, {verdict: 1})
    assert log.markers == [(X, FORMER_ID, verdict)]


async def test_a_former_producer_id_in_the_last_records_of_the_ledger_is_looked_for_without_a_hint(log: Log) -> None:
    """As after the last epoch of an id: also what hangs in the ledger itself, which would block each recovery."""
    log.append(ledger_record(X, HANGS_AT, FORMER_ID), NOW_MS, FORMER_EPOCH, FORMER_ID)
    log.entries[LEDGER].pop()  # its marker is missing
    log.hang_under(FORMER_ID, LEDGER, NOW_MS)
    log.hang_under(FORMER_ID, X, NOW_MS)
    assert await recover(log) == ({LEDGER: "abort"}, {"commit": 2})
    assert log.markers == [(LEDGER, FORMER_ID, "commit"), (X, FORMER_ID, "commit")]


async def test_what_hangs_in_the_ledger_under_a_former_producer_id_is_found_wherever_the_replay_begins(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `applied` the whole ledger is replayed, which what hangs before its last records would block."""

    async def high_watermarks(*_: object) -> dict[int, int]:
        return {LEDGER[1]: log.entries[LEDGER][-1][1].offset + 1}

    monkeypatch.setattr(module, "high_watermarks", high_watermarks)
    log.entries[LEDGER] = log.entries[LEDGER][: 2 * (TERM_MINUTES - 60)]
    at = log.append(ledger_record(Y, 0, FORMER_ID), NOW_MS - 60 * MINUTE_MS, FORMER_EPOCH, FORMER_ID)
    log.entries[LEDGER].pop()  # its marker is missing
    log.hang_under(FORMER_ID, LEDGER, NOW_MS)
    log.entries[Y] = [(0, LogEntry(0, FORMER_ID, FORMER_EPOCH, None, (), Marker.COMMIT))]
    for minute in range(59, 0, -1):
        log.append(ledger_record(X, HANGS_AT + 1), NOW_MS - minute * MINUTE_MS)
    assert log.open_of_others[FORMER_ID][LEDGER].start == at
    assert await recover(log, knows_applied=False) == ({LEDGER: "abort"}, {"commit": 1})
    assert log.markers == [(LEDGER, FORMER_ID, "commit")]


async def test_a_former_producer_id_that_the_coordinator_named_before_the_fence_needs_no_record(log: Log) -> None:
    """Its only transaction was aborted, and had no ledger record yet."""
    log.hang_under(FORMER_ID, X, NOW_MS - 10 * MINUTE_MS)
    log.former_ids, log.without_marker = {FORMER_ID}, {X}
    assert await recover(log) == ({LEDGER: "abort"}, {"abort": 1})
    assert log.markers == [(X, FORMER_ID, "abort")]


async def test_all_partitions_of_a_former_id_s_transaction_are_asked_for(log: Log) -> None:
    """No partition of it has a marker. One without is no evidence as long as its leader was not asked."""
    log.entries[LEDGER] = log.entries[LEDGER][: 2 * (TERM_MINUTES - 60)]
    at_ms = NOW_MS - 60 * MINUTE_MS
    log.append(ledger_record(X, HANGS_AT, FORMER_ID, Y), at_ms, FORMER_EPOCH, FORMER_ID)
    log.entries[LEDGER].pop()
    for partition in (LEDGER, X, Y):
        log.hang_under(FORMER_ID, partition, at_ms)
    for minute in range(59, 0, -1):
        log.append(ledger_record(("payments", 0), minute), NOW_MS - minute * MINUTE_MS)
    assert await recover(log, hints=[X]) == ({LEDGER: "abort"}, {"commit": 3})
    assert log.markers == [(each, FORMER_ID, "commit") for each in (LEDGER, X, Y)]


async def test_without_evidence_no_marker_of_a_former_producer_id_is_written(log: Log) -> None:
    """Nothing forces an end, as a next marker of the own producer id would: a commit may show an aborted event."""
    at_ms = NOW_MS - 10 * MINUTE_MS
    log.hang_under(FORMER_ID, X, at_ms)
    log.former_ids, log.without_marker = {FORMER_ID}, {X}
    log.delete_before(2 * (TERM_MINUTES - 20))  # less than the clocks may differ
    with capture_logs() as lines:
        assert await recover(log) == ({LEDGER: "abort"}, {})
    (line,) = lines
    assert (line["event"], line["verdict"], line["not_checked"]) == (
        "hanging transaction not ended",
        "unknown",
        ["orders/0"],
    )
    assert line["why"].startswith("its outcome is unknown")
    assert log.markers == []


async def test_one_marker_does_not_end_several_transactions_of_a_former_producer_id(log: Log) -> None:
    """The first may be aborted and the last committed: each epoch of version 2 is another transaction."""
    log.append(ledger_record(X, HANGS_AT + 1, FORMER_ID), NOW_MS, FORMER_EPOCH, FORMER_ID)
    log.hang_under(FORMER_ID, X, NOW_MS)
    log.open_of_others[FORMER_ID][X] = ActiveProducer(FORMER_ID, FORMER_EPOCH + 1, HANGS_AT)
    with capture_logs() as lines:
        assert await recover(log) == ({LEDGER: "abort"}, {})
    (line,) = lines
    assert (line["verdict"], line["why"].split(" ", 1)[0], log.markers) == ("commit", "several", [])


async def test_a_program_that_has_copied_the_slot_s_records_is_left_alone(log: Log) -> None:
    """Of the ledger too, as a mirror does: each record names the producer that wrote the original."""
    log.append(ledger_record(X, HANGS_AT, FORMER_ID), NOW_MS, 0, 99)
    log.hang_under(99, X, NOW_MS)
    log.hang_under(99, LEDGER, NOW_MS)
    assert await recover(log, hints=[X]) == ({}, {})
    assert log.markers == []


@pytest.mark.parametrize("slot", [LEDGER[1], LEDGER[1] + 1])
async def test_the_transaction_of_another_program_is_left_alone(log: Log, slot: int) -> None:
    """Its records may have a header, as those of another namespace do: the slot's ledger has no record of it."""
    log.hang_under(99, X, NOW_MS - 10 * MINUTE_MS, slot)
    assert await recover(log, hints=[X]) == ({}, {})
    assert log.markers == []


async def test_a_marker_that_may_not_be_written_is_logged_with_its_verdict(log: Log) -> None:
    log.append(ledger_record(X, HANGS_AT, FORMER_ID), NOW_MS, FORMER_EPOCH, FORMER_ID)
    log.hang_under(FORMER_ID, X, NOW_MS)
    log.refusal = "the service has no permission to Alter the cluster"
    with capture_logs() as lines:
        assert await recover(log) == ({LEDGER: "abort"}, {})
    (line,) = lines
    assert (line["event"], line["topic"], line["verdict"]) == ("hanging transaction not ended", X[0], "commit")
    assert (line["former_producer"], line["epoch"], line["why"]) == (FORMER_ID, FORMER_EPOCH, log.refusal)
