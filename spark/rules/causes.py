"""The cause of each copy of an id after the first."""

from collections.abc import Callable
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.rule_table import DUAL_PRODUCER, EXPIRED_KEY, FOREIGN_WRITER, PRODUCER_RESTART, REWRITE
from spark.tables import deliveries

CAUSES: Final = (FOREIGN_WRITER, REWRITE, EXPIRED_KEY, PRODUCER_RESTART, DUAL_PRODUCER)


def ordered() -> Column:
    """Return the copies of a row (deliveries.GATHERED) in order, without derived copies.

    Copies in the ledger come first, then by timestamp, topic, partition and offset. Each copy gets `ledger_rank`
    (rule_table.rank), and `key_ttl_s` of its ledger entry, null without one.
    """
    entered = F.transform(
        F.filter("coordinates", lambda copy: ~copy["is_derived_copy"]),
        lambda copy: F.struct(
            F.filter("entries", lambda entry: deliveries.same_coordinates(entry, copy)).alias("entries"),
            copy.alias("copy"),
        ),
    )
    return F.array_sort(
        F.transform(
            entered,
            lambda pair: F.struct(
                rule_table.rank(F.size(pair["entries"]) > 0).alias("ledger_rank"),
                *(
                    pair["copy"][name].alias(name)
                    for name in (*rule_table.ORDER, *rule_table.PRODUCER, "accepted_at", "has_fencepost_header")
                ),
                F.get(pair["entries"], F.lit(0))["key_ttl_s"].alias("key_ttl_s"),
            ),
        )
    )


def explained(copies: Column, key_ttl_ms: Callable[[Column, Column], Column]) -> Column:
    """Convert copies (from `ordered`) into the coordinates of a finding; each after the first has its cause.

    `key_ttl_ms` gives the retention of a copy's key, ms, by its topic and `key_ttl_s`.
    """
    return F.transform(
        copies,
        lambda copy, nth: F.struct(
            *(copy[name].alias(name) for name in ("topic", "partition", "offset", "timestamp", *rule_table.PRODUCER)),
            F.when(rule_table.has_cause(nth), _cause(copy, F.slice(copies, F.lit(1), nth), key_ttl_ms)).alias("cause"),
        ),
    )


def _cause(copy: Column, earlier: Column, key_ttl_ms: Callable[[Column, Column], Column]) -> Column:
    """Return the cause of a copy, by comparison with the `earlier` copies that have Fencepost's header."""
    with_header = F.filter(earlier, lambda other: other["has_fencepost_header"])

    def same(other: Column, *names: str) -> Column:
        equal = F.lit(True)
        for name in names:
            equal = equal & (other[name] == copy[name])
        return equal

    same_producer = F.exists(with_header, lambda other: same(other, *rule_table.PRODUCER_IDENTITY))

    def is_past_retention(other: Column) -> Column:
        accepted_first = F.when(other["accepted_at"] <= copy["accepted_at"], other).otherwise(copy)
        ttl_ms = key_ttl_ms(accepted_first["topic"], accepted_first["key_ttl_s"])
        return rule_table.is_past_retention(copy["accepted_at"], other["accepted_at"], ttl_ms)

    past_retention = F.forall(with_header, is_past_retention)
    restart = F.exists(
        with_header,
        lambda other: rule_table.is_restart(same(other, "slot"), same(other, "instance"), same(other, "pid", "epoch")),
    )
    foreign = rule_table.is_foreign(copy["has_fencepost_header"], same_producer, copy["ledger_rank"])
    return rule_table.cause(foreign, same_producer, rule_table.is_expired(with_header, past_retention), restart)
