"""Tests the audit's alerts with the metrics of a run with findings, and of runs that no longer come."""

from typing import Final

import pytest
from confluent_kafka import Producer

from tests.kubernetes.alerting import NOTHING, Rules, Scrape, check_metrics, parse
from tests.kubernetes.rendering import HERE, Rendered, render
from tests.spark.conftest import Audit, Ran
from tests.spark.history import History, Writer

MINUTE_S: Final = 60
HOUR_S: Final = 3600
WRITER: Final = Writer(0, 1000)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    return Rules(Rendered("prod", render(HERE / "overlays" / "prod")), "fencepost-audit", tmp_path_factory.mktemp("a"))


def metrics_of(ran: Ran) -> Scrape:
    """Make the scrape of some seconds after a run."""
    text = (ran.report / "metrics.prom").read_text()
    frozen = parse(text, 0, {}).value("fencepost_audit_frozen_timestamp_seconds")
    assert frozen is not None
    return parse(text, frozen + 5, {"namespace": "fencepost"})


def test_the_audits_alerts(history: History, audit: Audit, rules: Rules) -> None:
    topic = history.topic(f"{history.namespace}-t", 2)
    producer = history.transactional(WRITER)
    history.deliver(producer, WRITER, topic, ["a", "b"])
    clean = audit(history)
    assert clean.outcome.status == 0
    healthy = metrics_of(clean)
    assert check_metrics((clean.report / "metrics.prom").read_text()) == ""
    rules.assert_firing([], healthy, (healthy, healthy), HOUR_S)
    # No run comes any more; or its report is not served.
    rules.assert_firing(["FencepostAuditLate"], healthy, (healthy, healthy), 3 * HOUR_S)
    rules.assert_firing(["FencepostAuditLate"], healthy, (NOTHING, NOTHING), 30 * MINUTE_S)
    # A foreign copy, a record without a key, and an open transaction: 20 minutes later.
    history.send(history.plain, topic, ["a"], None)
    history.raw(history.plain, topic, b"no key")
    hanging = Producer(
        {
            "bootstrap.servers": history.bootstrap,
            "transactional.id": f"{history.namespace}-foreign",
            "transaction.timeout.ms": 600_000,
        }
    )
    hanging.init_transactions(30)
    hanging.begin_transaction()
    history.raw(hanging, topic, b"no end", 1, headers=[("idempotency-key", b"z")])
    found = metrics_of(audit(history, later_s=20 * MINUTE_S))
    hanging.abort_transaction(30)
    assert found.value("fencepost_audit_held_up_partitions") == 1
    alerts = ["FencepostDuplicatesOrLossesStand", "FencepostAuditFindings", "FencepostPartitionStandsStill"]
    rules.assert_firing([*alerts, "FencepostDuplicatesOrLosses"], healthy, (found, found), 10 * MINUTE_S)
    rules.assert_firing(alerts, healthy, (found, found), 90 * MINUTE_S)  # the findings are not new any more
