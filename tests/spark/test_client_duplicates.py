"""Which records of a record key are a client's retry under another idempotency key."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession

from service.contract import Rules
from service.contract.wire.ids import event_id, member_id
from spark.reading import decode
from spark.rules import cross_hour
from spark.rules.classify import gather_evidence
from spark.tables import deliveries
from tests.spark.rows import NOW_MS, TTL_MS, copy, entry, reduced
from tests.spark.test_classify import plan, settings
from tests.spark.times import HOUR_MS

OTHER = b"o" * 8
HALF_TTL_S = TTL_MS // 2000
RULES = "\n".join(
    [
        '[[topics]]\npattern = "u"\nclient_duplicates = false',
        *(f'[[callers]]\nname = "{name}"\ntoken_sha256 = "{digit * 64}"' for name, digit in (("a", "1"), ("b", "2"))),
    ]
)


class Sequenced:
    """The records of one record key, in order; `nth` numbers the record keys."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.rows: list[Any] = []
        # A fingerprint covers the record key.
        self.fp = b"f%07d" % nth

    def write(
        self,
        after_ms: int,
        *,
        key: str | None = None,
        scope: str = "",
        batch: int | None = None,
        entered: bool = True,
        key_ttl_s: int | None = None,
        **more: Any,
    ) -> "Sequenced":
        offset = 1000 * self.nth + len(self.rows)
        key = f"{self.nth}-{offset}" if key is None else key
        named: dict[str, Any] = {
            "id": event_id(key, scope),
            "at": NOW_MS + after_ms,
            "topic": more.get("topic", "t"),
        }
        values: dict[str, Any] = {"key": key, "record_key_hash": self.nth, "fingerprint": self.fp} | named | more
        self.rows.append(copy(offset, **values))
        if entered:
            self.rows.append(entry(offset, **named, batch_hash=batch, key_ttl_s=key_ttl_s))
        return self


def _retried() -> list[Sequenced]:
    """Sequences with one finding each."""
    made = iter(range(1, 100))

    def new() -> Sequenced:
        return Sequenced(next(made))

    twice = new()
    return [
        new().write(0).write(1000),
        new().write(0).write(TTL_MS - 1),
        # The retention is that of the earlier record's key, by its ledger entry.
        new().write(0, key_ttl_s=HALF_TTL_S).write(1000 * HALF_TTL_S - 1, key_ttl_s=1),
        new().write(0, scope="a").write(1000, scope="a"),
        new().write(0, timestamp_ms=NOW_MS - 9).write(1000, timestamp_ms=NOW_MS - 9),
        new().write(0, batch=1).write(1000, batch=2),
        new().write(0, fingerprint=OTHER).write(1).write(1000),
        # Several retries in a row: one finding, by the common fingerprint.
        twice.write(0).write(10).write(20, fingerprint=OTHER).write(30).write(40),
    ]


def _not_retried() -> list[Sequenced]:
    made = iter(range(100, 200))

    def new() -> Sequenced:
        return Sequenced(next(made))

    return [
        new().write(0).write(TTL_MS),
        new().write(0, key_ttl_s=HALF_TTL_S).write(1000 * HALF_TTL_S),
        new().write(0).write(10, fingerprint=OTHER).write(20),
        new().write(0).write(10, entered=False, writer=None).write(20),
        new().write(0, scope="a").write(10, scope="b"),
        new().write(0, scope="gone").write(10, scope="gone"),
        new().write(0, timestamp_ms=NOW_MS - 9).write(1000, timestamp_ms=NOW_MS - 8),
        new().write(0, timestamp_ms=NOW_MS + 20_001).write(1000, timestamp_ms=NOW_MS + 20_002),
        new().write(0, timestamp_ms=NOW_MS - 9).write(1000),
        new().write(0, batch=7).write(1, batch=7),
        new().write(0, key="same").write(1, key="same"),
        new().write(0, topic="u").write(10, topic="u"),
        new().write(0, record_key_hash=None).write(10, record_key_hash=None),
        new().write(0, entered=False).write(10, entered=False),
    ]


def found(spark: SparkSession, some: Sequence[Sequenced]) -> dict[bytes, list[int]]:
    """The offsets of each finding, by its fingerprint."""
    seen = gather_evidence(plan(), settings_with_rules())
    rows = reduced(spark, [row for one in some for row in one.rows])
    retried = cross_hour.retried(rows, seen)
    found = cross_hour.client_duplicates(rows, retried, cross_hour.hour_spans(retried), seen).collect()
    assert all(row["count"] == len(row["coordinates"]) for row in found)
    return {bytes(row["fingerprint"]): [copy["offset"] for copy in row["coordinates"]] for row in found}


def settings_with_rules() -> Any:
    return dataclasses.replace(settings(), rules=Rules.parse(RULES))


def expected(some: Sequence[Sequenced]) -> dict[bytes, list[int]]:
    return {
        one.fp: [row["offset"] for row in one.rows if "kind" in row and row["fingerprint"] == one.fp] for one in some
    }


def test_only_a_client_s_retry_is_reported_as_a_retry(spark: SparkSession) -> None:
    assert found(spark, [*_retried(), *_not_retried()]) == expected(_retried())


def test_a_copy_without_our_header_gets_the_id_of_the_event_with_its_fingerprint(spark: SparkSession) -> None:
    """With the key of any caller, and any member of a batch; the event of the key in the empty scope comes first."""
    key = "whole"
    members = [member_id(key, nth, "a") for nth in range(2)]
    bare: dict[str, Any] = {"writer": None, "key": key, "id": event_id(key)}
    own: dict[str, Any] = {"writer": None, "key": "own", "id": event_id("own")}
    rows = [
        *(copy(nth, id=id, key=key, fingerprint=b"%d" % nth * 8) for nth, id in enumerate(members)),
        copy(10, **bare, fingerprint=b"0" * 8, alternative_fingerprints=b"x" * 8),
        copy(11, **bare, fingerprint=b"y" * 8, alternative_fingerprints=b"z" * 8 + b"1" * 8),
        copy(12, **bare, fingerprint=b"2" * 8, alternative_fingerprints=b"3" * 8),
        copy(13, **bare | {"key": "other"}, fingerprint=b"0" * 8),
        copy(14, **bare, fingerprint=b"0" * 8, topic="u"),
        *(
            copy(20 + nth, id=id, key="own", fingerprint=b"o" * 8)
            for nth, id in enumerate((event_id("own"), b"j" * 16))
        ),
        copy(22, **own, fingerprint=b"o" * 8),
    ]
    found = cross_hour.copies_of_other_ids(reduced(spark, rows, 5), 4)
    assert found is not None
    assert {row["offset"]: bytes(row["event_id"]) for row in found.collect()} == {10: members[0], 11: members[1]}
    assert cross_hour.copies_of_other_ids(reduced(spark, rows, 5), 5) is None
    strangers = [row for row in rows if not row["has_fencepost_header"]]
    assert cross_hour.copies_of_other_ids(reduced(spark, strangers, 5), 4) is None


@pytest.mark.parametrize(("ms", "hour"), [(0, "exact"), (-1, "month"), (1_000_001, "last")])
def test_the_timestamp_of_a_foreign_record_adds_few_hours_outside_the_known_time_span(
    spark: SparkSession, ms: int, hour: str
) -> None:
    first, last = NOW_MS - 1_000_000_000, NOW_MS
    at = first + ms if ms <= 0 else NOW_MS + ms * 10_000
    rows = [copy(1, at=at, writer=None), copy(2, at=at)]
    found = deliveries.reduce(
        spark.createDataFrame(rows, decode.COPIES),
        deliveries.summarize(spark.createDataFrame([], decode.CLAIMS)),
        1,
        deliveries.LogFacts(exact=(first, last)),
    )
    hours = {row["offset"]: row["ms"] for row in found.selectExpr("offset", "unix_millis(accepted_hour) ms").collect()}
    assert hours[2] == at // HOUR_MS * HOUR_MS
    month = 1_698_796_800_000  # 2023-11-01
    assert hours[1] == {"exact": hours[2], "month": month, "last": NOW_MS // HOUR_MS * HOUR_MS}[hour]
