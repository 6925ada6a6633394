"""Finds the slots that began transactions under producer ids which no slot has now.

Every namespace writes the same header, and its slots have the same numbers. A slot names each of its producer ids in
its partition of its namespace's ledger.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from service.core.problems import KafkaAway
from service.core.settings import Settings
from service.kafka.admin import UNANSWERED, KafkaAdmin
from service.kafka.hanging import RecordCoordinates
from service.kafka.inspection import DELETED
from service.kafka.reader import high_watermarks, offsets_since
from service.kafka.topic_admin import TopicAdmin
from service.kafka.transaction_admin import TransactionAdmin
from service.slots.hanging_recovery import CLOCKS_APART_MS, LOOK_BACK
from service.slots.ledger_rows import names_producer

# What leaves open whether the ledger names a producer id.
UNREAD: Final = (*UNANSWERED, KafkaAway)


class FormerIds:
    """Reads one namespace's ledger for the producer ids that its slots had."""

    def __init__(
        self, admin: KafkaAdmin, topics: TopicAdmin, transactions: TransactionAdmin, ledger: str, settings: Settings
    ) -> None:
        self._admin = admin
        self._topics = topics
        self._transactions = transactions
        self._ledger = ledger
        self._timeout_s = settings.timeouts_ms / 1000  # for one search in a ledger partition

    async def slots_of(self, firsts: Mapping[RecordCoordinates, int]) -> dict[RecordCoordinates, int]:
        """Find the slots that began transactions, by the first record of each; `firsts` has its producer id.

        In its ledger partition a slot is known by the partition's number, elsewhere by the header of the record. Left
        out is what another program began, such as another namespace. Where the ledger cannot tell, the header counts.
        """
        found = {first: first.partition[1] for first in firsts if first.partition[0] == self._ledger}
        for first, stamp in (await self._transactions.stamps_of(firsts.keys() - found.keys())).items():
            if await self._may_be_of(stamp.slot, firsts[first], stamp.accepted_at):
                found[first] = stamp.slot
        return found

    async def _may_be_of(self, slot: int, producer_id: int, accepted_at: int) -> bool:
        """Whether a slot of this namespace had a producer id, under which it wrote a record accepted at this time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._is_named(slot, producer_id, accepted_at)
        except UNREAD:
            return True

    async def _is_named(self, slot: int, producer_id: int, accepted_at: int) -> bool:
        """Whether the slot's ledger partition names a producer id, or has lost records that may name it.

        A slot has written under the id before or after the transaction: the id has an epoch for each transaction or
        term, and Kafka replaces it at the last one. So the records since the transaction, and LOOK_BACK before, tell.
        """
        if slot >= (await self._topics.partitions([self._ledger])).get(self._ledger, 0):
            return False
        partition = self._ledger, slot
        end = (await high_watermarks(self._admin, self._ledger, [slot]))[slot]
        since_ms = max(0, accepted_at - CLOCKS_APART_MS)
        since = (await offsets_since(self._admin, self._ledger, [slot], since_ms))[slot]
        offset = max(0, (end if since is None else since) - LOOK_BACK)
        while offset < end:
            try:
                entries, following, _ = await self._transactions.entries(partition, offset)
            except DELETED:
                return True
            if any(each.producer_id == producer_id and names_producer(each.value, producer_id) for each in entries):
                return True
            offset = following
        return False
