"""What `--dry-run` prints of a plan."""

from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Log, Plan
from spark.steps import dry_run
from tests.spark.rows import NOW_MS


def _log(role: str, topic: str, partition: int, end: int, high_watermark: int | None = None) -> Log:
    high = end if high_watermark is None else high_watermark
    return Log(role, topic, partition, "id", True, False, 0, 0, 0, end, end, high, 0, NOW_MS)


def _report(number: int, offsets: int, seconds: float) -> dict[str, object]:
    cost = {"offsets": offsets, "seconds": {"plan": seconds / 2, "rest": seconds / 2}}
    return {"run": {"number": number}, "cost": cost}


def test_the_offsets_are_listed_by_topic_with_the_time_of_the_largest_run() -> None:
    logs = (
        _log(DATA, "orders", 0, 1000),
        _log(DATA, "orders", 1, 0, 5),
        _log(LEDGER, "fencepost.ledger", 0, 70),
        _log(REQUESTS, "fencepost.requests", 0, 30),
    )
    preview = dry_run.Preview(Plan(8, NOW_MS, "{}", logs), 7, [_report(6, 0, 4.0), _report(5, 550, 8.0)])
    assert list(dry_run.lines(preview)) == [
        "first      run 7 was interrupted: it is finished, or planned again as below",
        "run        8",
        "read       orders: 1,000 offsets in 1 of 2 partitions, 1 blocked by an open transaction",
        "read       fencepost.ledger: 70 offsets in 1 of 1 partitions",
        "read       fencepost.requests: 30 offsets in 1 of 1 partitions",
        "total      1,100 offsets",
        "time       about 16 s, as run 5 read 550 offsets in 8 s",
    ]


def test_no_run_is_faster_than_the_fastest_and_a_first_one_has_no_estimate() -> None:
    assert dry_run.estimate(0, [_report(6, 550, 8.0), _report(5, 0, 4.0)]).startswith("about 4 s")
    assert dry_run.estimate(9, [_report(5, 0, 4.0)]).startswith("about 4 s")
    assert dry_run.estimate(9, []) == "not known: there is no earlier run"
