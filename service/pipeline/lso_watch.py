"""Finds partitions whose last stable offset (LSO) stands still, and recovers the slots whose transactions hang there.

A transaction may stay open in a partition although its coordinator has completed it (KAFKA-20734). A read_committed
consumer then gets no record behind it, while no request fails: only the LSO shows the fault.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import structlog

from service.contract.wire.names import transactional_id
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway
from service.core.settings import Settings
from service.kafka.hanging import ActiveProducer, RecordCoordinates
from service.kafka.metadata import Partition
from service.kafka.transaction_admin import LastOffsets

log = structlog.get_logger(__name__)

# Brokers abort a transaction at their first scan after its timeout; they scan every 10 s
# (transaction.abort.timed.out.transaction.cleanup.interval.ms).
ABORT_SCAN_S: Final = 10.0
# Looks in a transaction timeout: each costs some requests for each broker (TransactionAdmin.last_offsets).
LOOKS_A_TIMEOUT: Final = 2
# The pause after a recovery that has not moved the LSO, doubled each time.
PAUSE_LEAST_S: Final = 60.0
PAUSE_MOST_S: Final = 3600.0
# The owner of an open transaction: a slot, a slot under a producer id that Kafka has replaced, another program or
# namespace, or unknown, if the leader names no producer.
SLOT, FORMER, OTHER, UNKNOWN = "slot", "former", "other", "unknown"
OWNERS: Final = (SLOT, FORMER, OTHER, UNKNOWN)


class Offsets(Protocol):
    """The requests of the watch to Kafka; each raises KafkaAway."""

    async def last_offsets(self, topics: Sequence[str]) -> LastOffsets:
        """Find the last stable offset and the high watermark of the topics' partitions."""
        ...

    async def open_transactions(
        self, partitions: Collection[Partition]
    ) -> Mapping[Partition, Sequence[ActiveProducer]]:
        """List the producers of each partition (DescribeProducers), except partitions that may not be described."""
        ...

    async def producer_ids(self, transactional_ids: Iterable[str]) -> Mapping[str, int]:
        """Find the producer ids of transactional ids, as far as Kafka knows them."""
        ...

    async def transactional_ids(self, producer_ids: Collection[int]) -> Mapping[int, str]:
        """Find the transactional ids that have these producer ids, of any program, as far as brokers tell them."""
        ...


class FormerIds(Protocol):
    """The producer ids that the slots had."""

    async def slots_of(self, firsts: Mapping[RecordCoordinates, int]) -> Mapping[RecordCoordinates, int]:
        """Find the slots that began transactions, by the first record of each, which `firsts` has the producer id of.

        Transactions of other programs and namespaces are left out.
        """
        ...


class Topics(Protocol):
    """The topics that this process was asked to write to."""

    @property
    def names(self) -> Collection[str]: ...

    def forget_absent(self, absent: Collection[str]) -> None:
        """Forget topics that have long been absent; `absent`: those that Kafka does not have now."""
        ...


class Slots(Protocol):
    """The slots of the namespace, as this process knows them."""

    def held_producers(self) -> Mapping[int, int]:
        """Return the slots that this process holds, by producer id."""
        ...

    def recover(self, n: int, partitions: Collection[Partition]) -> None:
        """Recover slot `n`, which has a transaction open in these partitions."""
        ...


class Stalled(NamedTuple):
    """A partition's LSO below the high watermark, since when it is there, and when to recover its slot again."""

    last_stable: int
    since: float  # time.monotonic, as all times here
    owner: str = UNKNOWN
    again: float = 0.0
    pause_s: float = PAUSE_LEAST_S


def observe(known: Mapping[Partition, Stalled], found: LastOffsets, now: float) -> dict[Partition, Stalled]:
    """Update the known partitions whose LSO is below the high watermark by what another look has found.

    A partition without new ends keeps its state, unless it is gone: its topic was deleted, or created again with fewer
    partitions.
    """
    seen = {
        partition: stalled
        for partition, stalled in known.items()
        if partition not in found.ends and not _is_gone(partition, found)
    }
    for partition, (last_stable, high_watermark) in found.ends.items():
        if last_stable < high_watermark:
            before = known.get(partition)
            same = before is not None and before.last_stable == last_stable
            seen[partition] = before if before is not None and same else Stalled(last_stable, now)
    return seen


def _is_gone(partition: Partition, found: LastOffsets) -> bool:
    """Whether the topic was deleted, or has fewer partitions now; not gone if their number is unknown."""
    topic, number = partition
    partitions = found.partitions.get(topic)
    return topic in found.absent or (partitions is not None and number >= partitions)


def holders(stalled: Stalled, producers: Iterable[ActiveProducer]) -> dict[int, int]:
    """Find the producers whose transactions hold the LSO where it is: the first offset of each, by producer id."""
    return {each.producer_id: each.start for each in producers if 0 <= each.start <= stalled.last_stable}


class LsoWatch:
    """Watches the partitions of the ledger and of all topics that this process was asked to write to."""

    def __init__(
        self,
        settings: Settings,
        offsets: Offsets,
        slots: Slots,
        former_ids: FormerIds,
        ledger: str,
        topics: Topics,
        telemetry: Telemetry,
    ) -> None:
        timeout_s = settings.transaction_timeout_ms / 1000
        self.interval_s = timeout_s / LOOKS_A_TIMEOUT
        self.bound_s = timeout_s + ABORT_SCAN_S
        self._names = {n: transactional_id(settings.namespace, n) for n in range(settings.slots_max)}
        self._offsets = offsets
        self._slots = slots
        self._former_ids = former_ids
        self._ledger = ledger
        self._topics = topics
        self._telemetry = telemetry
        self._known: dict[Partition, Stalled] = {}

    async def run(self) -> None:
        """Look, for ever."""
        trouble = Incident(log, "last stable offsets cannot be read")
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.look(time.monotonic())
                if failures := trouble.end():
                    log.info("last stable offsets can be read again", **failures)
            except KafkaAway as error:
                trouble.add(error)
            except Exception as error:  # a bug must not end the watch
                trouble.add(error, bug=True)

    async def look(self, now: float) -> None:
        """Look once, and recover the slots whose transactions are open for longer than the bound."""
        found = await self._offsets.last_offsets([self._ledger, *self._topics.names])
        self._topics.forget_absent(found.absent)
        self._known = observe(self._known, found, now)
        try:
            await self._recover(now)
        finally:
            self._show(now)

    def _hanging(self, now: float) -> Iterator[tuple[Partition, Stalled]]:
        """Find the partitions whose LSO stood still past the bound, in which each healthy transaction ends."""
        for partition, stalled in self._known.items():
            if now - stalled.since >= self.bound_s:
                yield partition, stalled

    async def _recover(self, now: float) -> None:
        """Find the owners of the transactions that hold an LSO past the bound, and recover the slots among them."""
        due = {partition: stalled for partition, stalled in self._hanging(now) if stalled.again <= now}
        if not due:
            return
        producers = await self._offsets.open_transactions(due)
        held_by = {partition: holders(stalled, producers.get(partition, ())) for partition, stalled in due.items()}
        slots = await self._slots_of(set().union(*held_by.values()))
        former = await self._former(held_by, slots)
        names = await self._names_of_others(held_by, slots, former)
        for partition, stalled in due.items():
            theirs = {slots[producer] for producer in held_by[partition] if producer in slots}
            owner = SLOT if theirs else FORMER if former[partition] else OTHER if held_by[partition] else UNKNOWN
            theirs |= former[partition]
            pause_s = min(2 * stalled.pause_s, PAUSE_MOST_S)
            self._known[partition] = stalled._replace(owner=owner, again=now + stalled.pause_s, pause_s=pause_s)
            log.warning(
                "last stable offset stands still",
                topic=partition[0],
                partition=partition[1],
                offset=stalled.last_stable,
                since_s=round(now - stalled.since, 1),
                of=owner,
                slots=sorted(theirs),
                producers=sorted(held_by[partition]),
                transactional_ids=sorted(names[each] for each in held_by[partition] if each in names),
            )
            for n in theirs:
                self._slots.recover(n, [partition])

    async def _slots_of(self, producer_ids: Collection[int]) -> Mapping[int, int]:
        """Find the slots whose transactional ids have these producer ids, by producer id. Raises KafkaAway.

        Asks Kafka only for ids of slots that this process does not hold.
        """
        held = self._slots.held_producers()
        found = {producer: held[producer] for producer in producer_ids if producer in held}
        if found.keys() >= set(producer_ids):
            return found
        others = {name: n for n, name in self._names.items() if n not in held.values()}
        theirs = await self._offsets.producer_ids(others)
        return found | {producer: others[name] for name, producer in theirs.items() if producer in producer_ids}

    async def _former(
        self, held_by: Mapping[Partition, Mapping[int, int]], slots: Collection[int]
    ) -> dict[Partition, set[int]]:
        """Find the slots that began a transaction under a producer id which no transactional id of a slot has now."""
        firsts = {
            RecordCoordinates(partition, start): producer
            for partition, producers in held_by.items()
            for producer, start in producers.items()
            if producer not in slots
        }
        former: dict[Partition, set[int]] = {partition: set() for partition in held_by}
        for first, slot in (await self._former_ids.slots_of(firsts)).items():
            former[first.partition].add(slot)
        return former

    async def _names_of_others(
        self,
        held_by: Mapping[Partition, Mapping[int, int]],
        slots: Collection[int],
        former: Mapping[Partition, Collection[int]],
    ) -> Mapping[int, str]:
        """Find the transactional ids, as far as brokers tell them, of what neither a slot nor a former id holds."""
        others = {
            producer
            for partition, producers in held_by.items()
            for producer in producers
            if producer not in slots and not former[partition]
        }
        return await self._offsets.transactional_ids(others) if others else {}

    def _show(self, now: float) -> None:
        hanging = [stalled for _, stalled in self._hanging(now)]
        counts = Counter(stalled.owner for stalled in hanging)
        for owner in OWNERS:
            self._telemetry.kafka.stalled.labels(owner).set(counts[owner])
            oldest = max((now - stalled.since for stalled in hanging if stalled.owner == owner), default=0.0)
            self._telemetry.kafka.stalled_oldest.labels(owner).set(oldest)
