"""Why an id was delivered more than once: the cause of each copy after the first."""

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark import rules, state
from spark.rules import DUAL_PRODUCER, EXPIRED_KEY, FOREIGN_WRITER, PRODUCER_RESTART, REWRITE

CAUSES: Final = (FOREIGN_WRITER, REWRITE, EXPIRED_KEY, PRODUCER_RESTART, DUAL_PRODUCER)

_WRITER: Final = ("slot", "pid", "epoch", "instance")


def ordered() -> Column:
    """The copies of a row (state.GATHERED) in the order in which they count: those in the ledger first, then by
    timestamp, topic, partition and offset. Each has `late` (0 in the ledger, 1 not) besides what it had. Derived copies
    are none of these."""
    entered = F.transform(
        F.filter("coordinates", lambda copy: ~copy["derived"]),
        lambda copy: F.struct(
            F.exists("entries", lambda entry: state.same_place(entry, copy)).alias("entered"),
            copy.alias("copy"),
        ),
    )
    return F.array_sort(
        F.transform(
            entered,
            lambda pair: F.struct(
                rules.rank(pair["entered"]).alias("late"),
                *(pair["copy"][name].alias(name) for name in (*rules.order(), *_WRITER, "accepted_at", "stamped")),
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
            F.when(rules.has_cause(nth), _cause(copy, F.slice(copies, F.lit(1), nth), key_ttl_ms)).alias("cause"),
        ),
    )


def _cause(copy: Column, earlier: Column, key_ttl_ms: int) -> Column:
    """The first rule that fits a copy that comes after these."""
    ours = F.filter(earlier, lambda other: other["stamped"])

    def same(other: Column, *names: str) -> Column:
        alike = F.lit(True)
        for name in names:
            alike = alike & (other[name] == copy[name])
        return alike

    same_producer = F.exists(ours, lambda other: same(other, *rules.producer()))
    apart = F.forall(ours, lambda other: rules.is_apart(copy["accepted_at"], other["accepted_at"], key_ttl_ms))
    restart = F.exists(
        ours,
        lambda other: rules.is_restart(same(other, "slot"), same(other, "instance"), same(other, "pid", "epoch")),
    )
    foreign = rules.is_foreign(copy["stamped"], same_producer, copy["late"])
    return rules.cause(foreign, same_producer, rules.is_expired(ours, apart), restart)
