"""Tests that the alert for duplicates and losses fires for new ones only, and the ticket for all."""

import copy
from pathlib import Path
from typing import Final

import pytest

from spark.report import metrics
from spark.rules.kinds import BREAKING, KINDS
from tests.kubernetes.alerting import NOTHING, Rules, Scrape, parse
from tests.kubernetes.rendering import Rendered
from tests.kubernetes.test_alerts import AUDIT

TURN_S: Final = 3600
"""Between two runs of the audit."""
MINUTE_S: Final = 60
PAGE: Final = "FencepostDuplicatesOrLosses"
TICKET: Final = "FencepostDuplicatesOrLossesStand"


@pytest.fixture
def rules(prod: Rendered, tmp_path: Path) -> Rules:
    return Rules(prod, "fencepost-audit", tmp_path)


def shown(pod: str = "report-0", /, **kinds: int) -> Scrape:
    """Make a scrape after a run that found this many of these kinds."""
    document = copy.deepcopy(AUDIT) | {"kinds": dict.fromkeys(KINDS, 0) | kinds, "causes": []}
    found = parse(metrics.text(document), 0, {"namespace": "fencepost", "pod": pod})
    frozen_s = found.value("fencepost_audit_frozen_timestamp_seconds")
    assert frozen_s is not None
    return Scrape(frozen_s + 5, found.samples)


def paged(kind: str) -> list[str]:
    return [f"{PAGE}/{kind}", f"{TICKET}/{kind}"]


def standing(kind: str) -> list[str]:
    return [f"{TICKET}/{kind}"]


def test_new_findings_of_each_kind_page_once_and_stand_as_a_ticket(rules: Rules) -> None:
    none, two, three = (shown(**dict.fromkeys(BREAKING, number)) for number in (0, 2, 3))
    all_paged = [alert for kind in BREAKING for alert in paged(kind)]
    all_standing = [alert for kind in BREAKING for alert in standing(kind)]
    rules.assert_course(
        [
            (none, TURN_S, []),
            (two, TURN_S, all_paged),
            (two, TURN_S, all_standing),
            (two, TURN_S, all_standing),
            (three, TURN_S, all_paged),
            (three, TURN_S, all_standing),
            (two, TURN_S, all_standing),  # one has left the window
            (three, TURN_S, all_paged),  # as many as before, and one of them new
            (none, TURN_S, []),
        ]
    )


def test_findings_of_the_very_first_run_page(rules: Rules) -> None:
    found = shown(lost=1)
    rules.assert_course(
        [(found, MINUTE_S, paged("lost")), (found, 50 * MINUTE_S, paged("lost")), (found, TURN_S, standing("lost"))]
    )


def test_a_page_for_one_kind_says_nothing_of_another(rules: Rules) -> None:
    before, after = shown(duplicate=5), shown(duplicate=4, lost=1)
    every = sorted([*paged("lost"), *standing("duplicate")])
    rules.assert_course(
        [(before, TURN_S, paged("duplicate")), (before, TURN_S, standing("duplicate")), (after, TURN_S, every)]
    )


def test_findings_that_stand_do_not_page_when_their_metrics_were_away(rules: Rules) -> None:
    """After a restart of Prometheus, or of the pod that serves the report, which then has another name."""
    before, after = shown(lost=2), shown("report-1", lost=2)
    late = ["FencepostAuditLate"]
    rules.assert_course(
        [
            (before, TURN_S, paged("lost")),
            (before, TURN_S, standing("lost")),
            (NOTHING, 2 * TURN_S, late),
            (after, 10 * MINUTE_S, standing("lost")),
            (after, TURN_S, standing("lost")),
            (shown("report-1", lost=3), TURN_S, paged("lost")),
        ]
    )


def test_a_sink_that_two_runs_could_not_read_makes_a_ticket(rules: Rules) -> None:
    def seen(reason: str | None) -> Scrape:
        (sink,) = AUDIT["sinks"]
        document = copy.deepcopy(AUDIT) | {"causes": [], "sinks": [{**sink, "unreadable": reason}]}
        found = parse(metrics.text(document), 0, {"namespace": "fencepost", "pod": "report-0"})
        return Scrape(shown().at, found.samples)

    away, readable = seen("refused"), seen(None)
    rules.assert_course(
        [
            (readable, TURN_S, []),
            (away, TURN_S, []),
            (readable, TURN_S, []),
            (away, TURN_S, []),
            (away, TURN_S, ["FencepostSinkUnreadable"]),
            (readable, TURN_S, []),
        ]
    )


def test_findings_from_while_the_metrics_were_away_page_afterwards(rules: Rules) -> None:
    before, after = shown(lost=2), shown("report-1", lost=3)
    rules.assert_course(
        [
            (before, 2 * TURN_S, standing("lost")),
            (NOTHING, 2 * TURN_S, ["FencepostAuditLate"]),
            (after, 10 * MINUTE_S, paged("lost")),
            (after, TURN_S, standing("lost")),
        ]
    )


def test_fewer_in_another_pods_metrics_hide_no_growth(rules: Rules) -> None:
    rules.assert_course(
        [
            (shown(lost=9), TURN_S, paged("lost")),
            (shown("report-1", lost=2), 2 * TURN_S, standing("lost")),
            (shown("report-1", lost=3), TURN_S, paged("lost")),
        ]
    )
