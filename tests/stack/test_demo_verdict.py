"""Tests that the demo's verdict finds each kind of mistake."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.demo import verdict
from deploy.demo.audit import Finding, Report
from deploy.demo.client import Place, Tally
from deploy.demo.delays import Delays, delays_of, results, totals
from deploy.demo.truth import Topic
from service.contract.wire.ids import event_id

SENT = ["a", "b", "c"]
TWICE = {"a": [Place(0, 1), Place(0, 7)]}


def _tally() -> Tally:
    return Tally(answers={key: Place(0, offset) for offset, key in enumerate(SENT)})


def _topic() -> Topic:
    found = Topic()
    for offset, key in enumerate(SENT):
        found.places[key].append(Place(0, offset))
    return found


def _finding(key: str = "a") -> Finding:
    return Finding("duplicate", "foreign_writer", "plain", event_id(key).hex(), frozenset(TWICE["a"]))


def _report(*findings: Finding) -> Report:
    balance = {"accepted": 3, "delivered_once": 3, "duplicated": 0, "lost": 0, "phantom": 0, "records": 8}
    return Report(findings=list(findings), balance=balance, page=Path("report.html"))


def _lose(tally: Tally, topic: Topic) -> None:
    del topic.places["b"]


def _forget(tally: Tally, topic: Topic) -> None:
    del tally.answers["b"]


def _repeat(tally: Tally, topic: Topic) -> None:
    topic.places["b"].append(Place(0, 9))


def _move(tally: Tally, topic: Topic) -> None:
    topic.places["b"] = [Place(0, 9)]


def _add(tally: Tally, topic: Topic) -> None:
    topic.places["x"].append(Place(0, 9))


def _add_without_key(tally: Tally, topic: Topic) -> None:
    topic.unkeyed = 1


def _quarrel(tally: Tally, topic: Topic) -> None:
    tally.mistakes.append("b was answered in two ways")


def test_all_is_well_when_every_event_is_there_once_where_it_was_answered() -> None:
    assert verdict.with_fencepost(SENT, _tally(), _topic()) == []
    assert verdict.without_fencepost(SENT, _topic()) == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_lose, "b was acknowledged but is not there"),
        (_forget, "b has no answer"),
        (_repeat, "b is there more than once"),
        (_move, "b is not where the answer said"),
        (_add, "x is there, but nobody sent it"),
        (_add_without_key, "1 records have no key"),
        (_quarrel, "b was answered in two ways"),
    ],
)
def test_a_mistake_of_the_service_is_seen(spoil: Callable[[Tally, Topic], None], complaint: str) -> None:
    tally, topic = _tally(), _topic()
    spoil(tally, topic)
    assert complaint in verdict.with_fencepost(SENT, tally, topic)


def test_a_loss_of_the_plain_producer_is_seen() -> None:
    topic = _topic()
    _lose(_tally(), topic)
    assert verdict.without_fencepost(SENT, topic) == ["b is not there"]


def test_the_job_must_find_the_duplicates_and_nothing_else() -> None:
    id = event_id("a").hex()
    assert verdict.of_the_job(_report(_finding()), TWICE, "plain") == []
    assert verdict.of_the_job(_report(), TWICE, "plain") == [f"{id} is twice in plain, but not to the job"]
    assert verdict.of_the_job(_report(_finding()), {}, "plain") == [f"{id} is twice in plain to the job only"]
    other_place = replace(_finding(), places=frozenset({Place(0, 1), Place(0, 8)}))
    assert verdict.of_the_job(_report(other_place), TWICE, "plain") == [f"{id} has other coordinates to the job"]
    elsewhere = replace(_finding(), topic="flights")
    assert "duplicate in flights was found by the job, but is not there" in verdict.of_the_job(
        _report(_finding(), elsewhere), TWICE, "plain"
    )


def test_the_jobs_balance_must_be_of_what_was_sent() -> None:
    assert verdict.of_the_balance(_report(), 3) == []
    assert verdict.of_the_balance(_report(), 4) == [
        "the job counts 3 accepted, not 4",
        "the job counts 3 delivered_once, not 4",
    ]


def test_many_mistakes_are_counted_not_listed() -> None:
    lines = verdict.without_fencepost([f"key-{n}" for n in range(1000)], Topic())
    assert len(lines) == 6
    assert lines[-1] == "... and 995 more: is not there"


FLIGHTS: list[dict[str, object]] = [
    {"carrier": "UA", "arr_delay": 11},
    {"carrier": "UA", "arr_delay": -20},
    {"carrier": "AA", "arr_delay": "NA"},
    {"carrier": "AA", "arr_delay": None},
]


def test_the_totals_of_batches_add_up_to_the_delays_of_all_flights() -> None:
    batches = [results("delays", f"b{n}", delays_of(FLIGHTS[n:][:3])) for n in (0, 3)]
    events = [event for batch in batches for event in batch]
    assert len({event.encode() for event in events}) == len(events)
    found = totals(json.dumps(event.value).encode() for event in events)
    assert found == delays_of(FLIGHTS) == {"UA": Delays(2, 11), "AA": Delays(2, 0)}


@pytest.mark.parametrize("found", [{"UA": Delays(1, 5)}, {}, {"UA": Delays(2, 5), "AA": Delays(1, 0)}])
def test_a_flight_that_is_not_counted_once_is_a_mistake(found: dict[str, Delays]) -> None:
    assert verdict.of_the_totals({"UA": Delays(2, 5)}, {"UA": Delays(2, 5)}) == []
    assert len(verdict.of_the_totals({"UA": Delays(2, 5)}, found)) == 1
