"""The command `rates`: surplus copies and latencies by topic, process and caller."""

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract.wire.ids import event_id, member_id
from spark.cli.command_line import parse_rates
from spark.queries.rates import rates, row_of
from spark.reading import decode
from spark.rules.findings import HOUR
from spark.settings import RatesOptions
from spark.tables import schemas
from spark.tables.lake import Lake
from tests.spark.rows import NOW_MS, copy, entry, ids, reduced


@pytest.fixture(scope="module")
def root(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A lake with ten events of a topic by two processes, one of them written twice, and a record of another writer."""
    folder = str(tmp_path_factory.mktemp("rates") / "lake")
    lake = Lake(spark, folder)
    events = {
        f"e{nth}": [
            copy(nth, writer=(0, 10, 0, "a:1" if nth < 8 else "b:1")),
            entry(nth, timestamp_ms=NOW_MS + 10 * (nth + 1)),
        ]
        for nth in range(10)
    }
    events["e0"].append(copy(10, writer=(0, 11, 0, "b:1")))
    events["other"] = [copy(0, topic="u", writer=None)]
    shop, member = event_id("k", "shop"), member_id("k", 0, "batches")
    of_callers = [
        *(copy(nth, topic="v", id=shop, writer=writer) for nth, writer in ((0, (0, 1, 0, "a:1")), (1, None))),
        copy(2, topic="v", id=event_id("k")),
        copy(3, topic="v", id=member),
        entry(3, topic="v", id=member),
    ]
    batch = F.lit(bytearray(event_id("k", "batches")))
    of_member = F.when(F.col("id") == F.lit(bytearray(member)), decode.hash_of(batch))
    rows = reduced(spark, [*ids(events), *of_callers]).withColumn("batch_hash", of_member)
    lake.append_once("deliveries", rows, 1)
    copies = [
        {"topic": "t", "partition": 0, "offset": 0, "instance": "a:1"},
        {"topic": "t", "partition": 0, "offset": 10, "instance": "b:1", "cause": "dual_producer"},
    ]
    found = {"scope": HOUR, "kind": "duplicate", "id": b"e0".ljust(16), "topic": "t", "count": 2, "last_ms": NOW_MS}
    foreign = [{"topic": "v", "partition": 0, "offset": 1, "cause": "foreign_writer"}]
    made = [
        {**found, "run": 1, "coordinates": copies},
        {**found, "run": 1, "coordinates": foreign, "id": shop, "topic": "v"},
    ]
    lake.append_once("findings", spark.createDataFrame(made, schemas.of("findings")), 1)
    report = json.dumps({"run": {"window_from": "2023-11-14T17:00:00.000Z"}})
    row = {"run": 1, "frozen_ms": NOW_MS, "verdict": "findings", "summary": "{}", "report": report}
    lake.append_once("runs", spark.createDataFrame([row], schemas.of("runs")), 1)
    return folder


def test_copies_and_latencies_are_counted_by_topic(spark: SparkSession, root: str) -> None:
    found = [json.loads(line) for line in rates(spark, RatesOptions(lake=root))]
    assert [tuple(row.values()) for row in found] == [
        ("t", None, None, 11, 1, 90909.091, 50, 100, 100),
        ("u", None, None, 1, 0, 0.0, None, None, None),
        ("v", None, None, 4, 1, 250000.0, 5, 5, 5),
    ]


def test_copies_are_counted_by_the_callers_that_the_rules_name(spark: SparkSession, root: str) -> None:
    options = RatesOptions(lake=root, topics=("t", "v"), by_caller=True)
    found = [json.loads(line) for line in rates(spark, options, ("", "shop", "batches", "other"))]
    assert [tuple(row.values())[:6] for row in found] == [
        ("t", None, None, 11, 1, 90909.091),
        ("v", None, "", 1, 0, 0.0),
        ("v", None, "batches", 1, 0, 0.0),
        ("v", None, "shop", 2, 1, 500000.0),
    ]


def test_copies_and_latencies_are_counted_by_process(spark: SparkSession, root: str) -> None:
    options = RatesOptions(lake=root, topics=("t*",), by_instance=True, format="csv")
    text = "".join(rates(spark, options))
    assert text.splitlines()[1:] == ["t,a:1,,8,0,0.0,40,80,80", "t,b:1,,3,1,333333.333,90,100,100"]
    assert list(rates(spark, RatesOptions(lake=root, since_ms=NOW_MS + 1))) == []


def test_a_topic_with_copies_and_no_records_has_no_rate() -> None:
    assert tuple(row_of(("t", None, None), None, 3).values()) == ("t", None, None, 0, 3, None, None, None, None)


def test_the_command_line_is_parsed() -> None:
    given: Any = parse_rates(
        ["--lake", "l/", "--topic", "a,b*", "--since", "1h", "--by-instance", "--by-caller"], 3_600_005
    )
    assert given == RatesOptions(lake="l", topics=("a", "b*"), since_ms=5, by_instance=True, by_caller=True)
