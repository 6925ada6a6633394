"""Checks that the ledger has all records up to `applied`: one that has lost records does not tell what was written."""

from collections.abc import Mapping

from service.core.problems import KafkaAway
from service.kafka.transaction_admin import TransactionAdmin


async def check_ends(admin: TransactionAdmin, ledger: str, namespace: str, applied: Mapping[int, int]) -> None:
    """Raise KafkaAway where a ledger partition ends before the `applied` of its slot; `applied` by slot.

    For a recovery that has not written to the ledger yet: each of its attempts appends a record, and the partition
    would be past `applied` after some of them. Then claims would be freed whose records were lost.
    """
    ends = (await admin.last_offsets([ledger], {(ledger, slot) for slot in applied})).ends
    for slot, offset in applied.items():
        if (ledger, slot) not in ends:
            raise KafkaAway(f"{ledger}, partition {slot}: its leader does not tell where it ends")
        if offset > (end := ends[ledger, slot].high_watermark):
            raise lost_records(ledger, slot, namespace, offset, end)


def lost_records(ledger: str, slot: int, namespace: str, applied: int, end: int) -> KafkaAway:
    """Make the error for a ledger partition that ends before `applied`, which says what an operator has to do."""
    return KafkaAway(
        f"{ledger}, partition {slot}: Redis has applied it up to {applied}, and it ends at {end}: it was created "
        f"again, or has lost records. Stop all processes and delete the keys that begin with {{{namespace}:0}} "
        "(FLUSHDB, where there are no others)"
    )
