"""Checks the claims of the demo; returns a line for each that does not hold."""

from collections.abc import Collection, Mapping

from deploy.demo.audit import Report
from deploy.demo.client import Place, Tally
from deploy.demo.delays import Delays
from deploy.demo.truth import Topic
from service.contract.wire.ids import event_id

_SHOWN = 5  # examples of one kind of mistake


def with_fencepost(sent: Collection[str], tally: Tally, topic: Topic) -> list[str]:
    """Check that the topic has every event exactly once, at the offset of its answer, and nothing else."""
    wrong = [*tally.mistakes]
    wrong += _each("was acknowledged but is not there", [key for key in tally.answers if key not in topic.places])
    wrong += _each("has no answer", [key for key in sent if key not in tally.answers])
    wrong += _each("is there more than once", topic.repeated)
    wrong += _each("is there, but nobody sent it", [key for key in topic.places if key not in tally.answers])
    elsewhere = [key for key, place in tally.answers.items() if topic.places.get(key, [place]) != [place]]
    wrong += _each("is not where the answer said", [key for key in elsewhere if key not in topic.repeated])
    if topic.unkeyed:
        wrong.append(f"{topic.unkeyed} records have no key")
    return wrong


def without_fencepost(sent: Collection[str], topic: Topic) -> list[str]:
    """Check that the plain producer lost no event; it may have written duplicates."""
    wrong = _each("is not there", [key for key in sent if key not in topic.places])
    wrong += _each("is there, but nobody sent it", [key for key in topic.places if key not in set(sent)])
    return wrong


def of_the_job(report: Report, repeated: Mapping[str, list[Place]], topic: str) -> list[str]:
    """Check that the job found exactly the duplicates that are in `topic`, and nothing in other topics.

    Args:
        report: the report of the job.
        repeated: the keys with more than one record in the topic, with their coordinates.
        topic: the only topic with duplicates.
    """
    truth = {event_id(key).hex(): frozenset(places) for key, places in repeated.items()}
    found = {each.id or "": each.places for each in report.findings if each.kind == "duplicate" and each.topic == topic}
    others = [
        f"{each.kind} in {each.topic}" for each in report.findings if (each.kind, each.topic) != ("duplicate", topic)
    ]
    wrong = _each("was found by the job, but is not there", others)
    wrong += _each(f"is twice in {topic}, but not to the job", [id for id in truth if id not in found])
    wrong += _each(f"is twice in {topic} to the job only", [id for id in found if id not in truth])
    both = [id for id in truth if id in found and truth[id] != found[id]]
    return wrong + _each("has other coordinates to the job", both)


def of_the_totals(expected: Mapping[str, Delays], found: Mapping[str, Delays]) -> list[str]:
    """Check that the processor has counted each flight once, under its carrier."""
    carriers = sorted(expected.keys() | found.keys())
    wrong = [each for each in carriers if expected.get(each) != found.get(each)]
    return [f"{each}: counted {found.get(each)}, not {expected.get(each)}" for each in wrong]


def of_the_balance(report: Report, sent: int) -> list[str]:
    """Check the job's balance: every accepted event was delivered once."""
    expected = {name: 0 for name in report.balance if name != "records"} | {"accepted": sent, "delivered_once": sent}
    names = [name for name, count in expected.items() if report.balance.get(name) != count]
    return [f"the job counts {report.balance.get(name)} {name}, not {expected[name]}" for name in names]


def _each(what: str, keys: Collection[str]) -> list[str]:
    """Return the first lines, and one that counts the rest."""
    lines = [f"{key} {what}" for key in list(keys)[:_SHOWN]]
    if len(keys) > _SHOWN:
        lines.append(f"... and {len(keys) - _SHOWN:,} more: {what}")
    return lines
