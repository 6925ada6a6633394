"""Why an id was delivered more than once: the cause of each copy after the first."""

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark import state

FOREIGN_WRITER: Final = "foreign_writer"
REWRITE: Final = "rewrite"
EXPIRED_KEY: Final = "expired_key"
PRODUCER_RESTART: Final = "producer_restart"
DUAL_PRODUCER: Final = "dual_producer"
CAUSES: Final = (FOREIGN_WRITER, REWRITE, EXPIRED_KEY, PRODUCER_RESTART, DUAL_PRODUCER)

_KEPT: Final = ("timestamp", "topic", "partition", "offset", "slot", "pid", "epoch", "instance")


def ordered() -> Column:
    """The copies of a row (state.ROW) in the order in which they count: those in the ledger first, then by
    timestamp, topic, partition and offset. Each has `late` (0 in the ledger, 1 not) besides what it had."""
    entered = F.transform(
        "coordinates",
        lambda copy: F.struct(
            F.exists("entries", lambda entry: state.same_place(entry, copy)).alias("entered"),
            copy.alias("copy"),
        ),
    )
    return F.array_sort(
        F.transform(
            entered,
            lambda pair: F.struct(
                F.when(pair["entered"], 0).otherwise(1).alias("late"),
                *(pair["copy"][name].alias(name) for name in (*_KEPT, "accepted_at", "stamped")),
            ),
        )
    )


def explained(copies: Column, key_ttl_ms: int) -> Column:
    """Copies as `ordered` gives them → the coordinates of a finding, each after the first with its cause."""
    return F.transform(
        copies,
        lambda copy, nth: F.struct(
            *(copy[name].alias(name) for name in ("topic", "partition", "offset", "timestamp")),
            *(copy[name].alias(name) for name in ("slot", "pid", "epoch", "instance")),
            F.when(nth > 0, _cause(copy, F.slice(copies, F.lit(1), nth), key_ttl_ms)).alias("cause"),
        ),
    )


def _cause(copy: Column, earlier: Column, key_ttl_ms: int) -> Column:
    """The first rule that fits a copy that comes after these.

    An expired key is judged by the nearest of the earlier acceptances: a copy that follows a second delivery by
    seconds is not made by the first one's age.
    """
    ours = F.filter(earlier, lambda other: other["stamped"])

    def same(other: Column, *names: str) -> Column:
        alike = F.lit(True)
        for name in names:
            alike = alike & (other[name] == copy[name])
        return alike

    same_producer = F.exists(ours, lambda other: same(other, "slot", "pid", "epoch", "instance"))
    apart = F.forall(ours, lambda other: F.abs(other["accepted_at"] - copy["accepted_at"]) >= key_ttl_ms)
    related = F.exists(
        ours, lambda other: (same(other, "slot") | same(other, "instance")) & ~same(other, "pid", "epoch")
    )
    return (
        F.when(~copy["stamped"] | (same_producer & (copy["late"] == 1)), FOREIGN_WRITER)
        .when(same_producer, REWRITE)
        .when((F.size(ours) > 0) & apart, EXPIRED_KEY)
        .when(related, PRODUCER_RESTART)
        .otherwise(DUAL_PRODUCER)
    )
