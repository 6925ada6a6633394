"""Tests that alerts and dashboard use existing metrics, and that every alert has a section in the runbook."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import promql_parser
import pytest
from prometheus_client.metrics import MetricWrapperBase
from promql_parser import MatrixSelector, VectorSelector

from deploy.places import ROOT
from service.claims.states import SlotState
from service.core.collectors import DroppedLines
from service.core.metrics import SOURCE_OUTCOMES, FastHistogram, Telemetry
from service.slots.store_recovery import STORE_STATES
from spark.report import metrics
from spark.report.model import SINK_COUNTS
from spark.rules.causes import CAUSES
from spark.rules.kinds import BREAKING, KINDS, PHANTOM
from tests.kubernetes.rendering import HERE, Object, Rendered

# Labels that Prometheus adds to each target.
TARGET: Final = {"namespace", "pod", "job", "instance", "container", "service", "endpoint"}
# The parts of an expression's tree that contain further expressions.
_PARTS: Final = ("expr", "lhs", "rhs", "args", "param", "vector_selector")

Known = dict[str, set[str]]


@pytest.fixture(scope="module")
def known() -> Known:
    """List every metric of a scrape, with its labels."""
    found: Known = {}
    for collector in Telemetry().registry._collector_to_names:
        if not isinstance(collector, MetricWrapperBase | FastHistogram | DroppedLines):
            continue  # memory and files of the process
        for metric in collector.describe():
            labels = set(getattr(metric, "_labelnames", getattr(collector, "_labelnames", ())))
            for suffix in {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""]):
                found[metric.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    for line in metrics.text(AUDIT).splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found[name.split()[0]] = set(re.findall(r'(\w+)="', rest))
    return found


AUDIT: Final[Any] = {
    "run": {"number": 1, "frozen_at": "2026-01-01T00:00:00.000Z", "verdict": "clean"},
    "balance": {"accepted": 1, "records": 1},
    "kinds": dict.fromkeys(KINDS, 0),
    "silenced": dict.fromkeys(KINDS, 0),
    "silences": [],
    "topics": [{"topic": "orders", "ids": 1, "copies_extra": 0}],
    "webhook": None,
    "causes": [{"kind": "duplicate", "topic": "orders", "cause": "rewrite", "records": 1}],
    "sinks": [
        {
            "name": "warehouse",
            **dict.fromkeys(SINK_COUNTS, 0),
            "judged_until": "2026-01-01T00:00:00.000Z",
            "unreadable": None,
        }
    ],
    "evidence": {"rejects": 0, "held_up": []},
    "cost": {"seconds": {"plan": 0.1}},
}


def selectors(expression: Any) -> Iterator[VectorSelector]:
    """List every selector of a metric in an expression."""
    if isinstance(expression, VectorSelector):
        yield expression
    elif isinstance(expression, MatrixSelector):
        yield expression.vector_selector
    elif isinstance(expression, list):
        for part in expression:
            yield from selectors(part)
    else:
        for name in _PARTS:
            if (part := getattr(expression, name, None)) is not None:
                yield from selectors(part)


def faults(text: str, known: Known) -> Iterator[str]:
    """List the metrics and labels of an expression that do not exist."""
    found = list(selectors(promql_parser.parse(text.replace("$__rate_interval", "5m"))))
    if not found:
        yield f"{text}: no metric"
    for selector in found:
        if selector.name not in known:
            yield f"{selector.name}: no such metric"
            continue
        for matcher in selector.matchers.matchers:
            if matcher.name not in known[selector.name] | TARGET:
                yield f"{selector.name} has no label {matcher.name}"
            yield from (f"{matcher.name}={value}: no such value" for value in _unknown(matcher.name, matcher.value))


def _unknown(label: str, values: str) -> Iterator[str]:
    states = {state.value for state in SlotState} | set(STORE_STATES) | {"records"}
    bounded = {"kind": set(KINDS), "state": states}
    for value in values.split("|"):
        if label in bounded and value not in bounded[label]:
            yield value


def alerts(prod: Rendered) -> list[Object]:
    return [rule for group in prod.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]


def test_alerts_are_about_metrics_that_there_are(prod: Rendered, known: Known) -> None:
    assert alerts(prod)
    for rule in alerts(prod):
        assert list(faults(rule["expr"], known)) == [], rule["alert"]


def test_the_dashboard_is_about_metrics_that_there_are(prod: Rendered, known: Known) -> None:
    dashboard = json.loads(prod.one("ConfigMap", "fencepost-dashboard")["data"]["dashboard.json"])
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            assert list(faults(target["expr"], known)) == [], panel["title"]


def test_the_dashboard_leaves_no_metric_out(prod: Rendered, known: Known) -> None:
    shown = prod.one("ConfigMap", "fencepost-dashboard")["data"]["dashboard.json"]
    families = {re.sub("_(bucket|sum|count|total)$", "", name) for name in known}
    # Metrics that repeat what others show.
    families -= {"fencepost_audit_run", "fencepost_audit_clean", "fencepost_audit_rejects"}
    assert {name for name in families if name not in shown} == {"fencepost_audit_finding_records"}


def test_the_readmes_table_names_every_metric_of_the_service_and_no_other(known: Known) -> None:
    section = (ROOT / "service" / "README.md").read_text().split("\n## Watching it\n")[1].split("\n**Alerts**")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    named = {f"fencepost_{name}" for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in known}
    of_service = {name for name in families if not name.startswith("fencepost_audit_")}
    labels = {f"fencepost_{label}" for having in known.values() for label in having}
    stages = {f"fencepost_{stage}" for stage in ("queue", "claim", "kafka", "mark")}
    outcomes = {f"fencepost_{outcome}" for outcome in SOURCE_OUTCOMES}
    assert of_service - named == set()
    assert named - families - labels - stages - outcomes == set()


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(fencepost_answer_total[5m]) > 0", "fencepost_answer_total: no such metric"),
        ('fencepost_slots{stat="ready"}', "fencepost_slots has no label stat"),
        ('fencepost_slots{state=~"ready|idle"}', "state=idle: no such value"),
        ('sum(fencepost_audit_findings{kind="dup"}) or vector(1)', "kind=dup: no such value"),
        ("vector(1)", "vector(1): no metric"),
    ],
)
def test_a_name_that_there_is_not_is_found(expression: str, fault: str, known: Known) -> None:
    assert list(faults(expression, known)) == [fault]


def test_every_alert_has_a_section_of_the_runbook_and_every_section_an_alert(prod: Rendered) -> None:
    sections = re.findall(r"^## (\w+)$", (HERE / "RUNBOOK.md").read_text(), re.MULTILINE)
    names = [rule["alert"] for rule in alerts(prod)]
    assert sorted(sections) == sorted(names)
    pointed = [rule["annotations"]["runbook_url"] for rule in alerts(prod)]
    # The overlay has the URL of the runbook in one place.
    url = prod.one("PrometheusRule")["metadata"]["annotations"]["fencepost/runbook"]
    assert url.startswith("https://")
    assert pointed == [f"{url}#{name.lower()}" for name in names]


def test_every_alert_is_put_to_prometheus_with_metrics_from_a_real_fault(prod: Rendered) -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tested = "".join(text for text in texts if ".assert_firing(" in text or ".assert_course(" in text)
    assert [rule["alert"] for rule in alerts(prod) if f'"{rule["alert"]}' not in tested] == []


def test_every_section_says_what_it_means_how_to_look_and_what_to_do() -> None:
    text = (HERE / "RUNBOOK.md").read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        for part in ("**Means**", "**Look**", "**Do**"):
            assert part in section, section.splitlines()[0]


def test_the_runbook_says_what_to_do_about_every_cause_of_a_copy_and_about_phantoms() -> None:
    text = (HERE / "RUNBOOK.md").read_text()
    section = text.split("\n## FencepostDuplicatesOrLosses\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in cells)
    named = {name for row in cells for name in re.findall(r"`(\w+)`", row[0])}
    assert {*CAUSES, PHANTOM.name} <= named


KINDS_OF_ALERTS: Final = {
    "FencepostDuplicatesOrLosses": set(BREAKING),
    "FencepostDuplicatesOrLossesStand": set(BREAKING),
    "FencepostAuditFindings": set(KINDS) - set(BREAKING),
}


def test_alerts_and_runbook_are_about_the_kinds_of_findings_of_the_registry(prod: Rendered) -> None:
    """New findings that break the promise page, other kinds make a ticket, and the runbook names each."""
    text = (HERE / "RUNBOOK.md").read_text()
    found: dict[str, set[str]] = {}
    for rule in alerts(prod):
        for selector in selectors(promql_parser.parse(rule["expr"])):
            of_kinds = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "kind"]
            if of_kinds:
                assert found.setdefault(rule["alert"], set(of_kinds[0].split("|"))) == set(of_kinds[0].split("|"))
    assert found == KINDS_OF_ALERTS
    for alert, names in KINDS_OF_ALERTS.items():
        section = text.split(f"\n## {alert}\n")[1].split("\n## ")[0]
        assert [name for name in names if f"`{name}`" not in section] == [], alert


def test_the_runbooks_links_lead_to_its_sections() -> None:
    text = (HERE / "RUNBOOK.md").read_text()
    sections = {name.lower() for name in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\(#(\w+)\)", text)) <= sections


def test_severities_of_alerts_and_runbook_agree(prod: Rendered) -> None:
    text = (HERE / "RUNBOOK.md").read_text()
    for rule in alerts(prod):
        section = text.split(f"\n## {rule['alert']}\n")[1]
        assert section.startswith(f"\n**Means** ({rule['labels']['severity']})"), rule["alert"]
