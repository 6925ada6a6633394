"""The report of many findings: small enough for a browser, complete in the lake, and shown in a real browser."""

import json
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from markupsafe import escape
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from deploy.console import StackError
from service.contract import Rules, SharedSettings, TopicRule
from spark.reading.run_plan import DATA, Log, Plan, RunContext
from spark.report import charts, document, metrics, page, terminal
from spark.report.document import Report
from spark.report.model import SINK_COUNTS, Document, TimelinePoint, schema
from spark.rules import current_findings, kinds
from spark.rules.balance import Balance
from spark.rules.classify import CATEGORIES
from spark.rules.findings import HOUR, IDS, LOG, SUMS
from spark.rules.kinds import CONFLICT, DUPLICATE, KINDS, LOST
from spark.rules.sink_comparison import SCOPE
from spark.settings import Options, Settings
from spark.silences import Silence
from spark.step_timer import StepTimer
from spark.tables import hours, schemas
from spark.tables.lake import Lake
from tests.conftest import LONG
from tests.spark import browser
from tests.spark.rows import NOW_MS
from tests.spark.times import HOUR_MS

# What the page has to bear is heavy to make: a slice of it always runs.
MANY = 100_000 if LONG else 3_000
DUPLICATES = -(-MANY // 3)
SIZE_MAX = 5 * 1024 * 1024
TOPIC = "orders.with-a-rather-long-name"
FIRST_DUPLICATE, FIRST_CONFLICT = (
    f"{kind.name}:{md5(number, usedforsecurity=False).hexdigest()}"
    for kind, number in ((DUPLICATE, b"0"), (CONFLICT, b"1"))
)
SILENCES = (
    Silence(FIRST_DUPLICATE, NOW_MS + 1, "known <b>"),
    Silence(f"{FIRST_CONFLICT[:-2]}?*", NOW_MS + 2000, "known too"),
    Silence("lost:*", NOW_MS, "over"),
    Silence("phantom:*", NOW_MS + 1, "there is none"),
)
SILENCED = 2
NO_RULES = Rules()
HOSTILE = '<img src=x onerror="document.title=1">'


def _findings(lake: Lake) -> None:
    """MANY findings of three kinds over 150 hours and 40 partitions, each with two copies."""
    n = F.col("id")
    hour = F.timestamp_seconds((F.lit(NOW_MS // HOUR_MS) - n % 150) * 3600)
    names = F.array(*(F.lit(kind.name) for kind in (DUPLICATE, CONFLICT, LOST)))

    def copy(nth: int, cause: str | None) -> Any:
        return F.struct(
            F.lit(TOPIC).alias("topic"),
            (n % 40).cast("int").alias("partition"),
            (n * 2 + nth).alias("offset"),
            (F.lit(NOW_MS) - (n % 150) * HOUR_MS).alias("timestamp"),
            (n % 7).cast("int").alias("slot"),
            n.alias("pid"),
            F.lit(0).alias("epoch"),
            F.lit("a-host-with-a-name.example:8000").alias("instance"),
            F.lit(cause).cast("string").alias("cause"),
        )

    columns = {
        "scope": F.lit(HOUR),
        "accepted_hour": hour,
        "kind": F.get(names, n % 3),
        "cause": F.lit("producer_restart"),
        "id": F.unhex(F.md5(n.cast("string"))),
        "key": F.concat(F.lit(HOSTILE), F.repeat(n.cast("string"), 60)),
        "topic": F.lit(TOPIC),
        "count": F.lit(2),
        "last_ms": F.lit(NOW_MS),
        "coordinates": F.array(copy(0, None), copy(1, "producer_restart")),
    }
    rows = lake.spark.range(MANY).select(
        *(columns.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in schemas.FINDING.items())
    )
    lake.append_once("findings", rows, 1)


def test_no_bars_are_drawn_of_copies_without_a_cause() -> None:
    """Derived copies are the only ones without."""
    chart = {"columns": 2, "rows": [], "from": "2026-11-01T00:00:00Z", "hours_a_column": 1, "partitions_folded": False}
    point = {"hour": "2026-11-01T01:00:00Z", "kind": "derived_copy", "cause": None, "records": 3}
    found = cast(Document, {"map": chart, "timeline": [point]})
    assert page.timeline(found) == ("", [])
    found["timeline"].append(cast(TimelinePoint, {**point, "cause": "rewrite"}))
    assert [key for _, key in page.timeline(found)[1]] == ["rewrite, the same producer wrote it again: 3"]


@pytest.fixture(scope="module")
def large(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The document and the folder of a report with MANY findings."""
    root = tmp_path_factory.mktemp("large")
    lake = Lake(spark, str(root / "lake"))
    _findings(lake)
    made = _built(lake, lake.read("findings"), SILENCES, ("lost", "warning"))
    document.write(spark, str(root / "report"), made)
    return dict(made.document), root / "report"


def _built(
    lake: Lake,
    findings: DataFrame,
    silences: tuple[Silence, ...] = (),
    fail_on: tuple[str, ...] = (),
    rules: Rules = NO_RULES,
) -> document.Report:
    """Build the report of a run that has these findings (schemas.FINDING)."""
    logs = tuple(Log(DATA, TOPIC, n, "topic_id", True, False, 0, 0, 0, 9, 9, 9, 0, NOW_MS) for n in range(39))
    # Blocked by a transaction that the broker does not name; its first record has a timestamp in microseconds.
    logs += (Log(DATA, TOPIC, 39, "topic_id", True, False, 0, 0, 0, 9, 9, 12, 0, NOW_MS * 1000),)
    plan = Plan(1, NOW_MS, "{}", logs)
    options = Options(lake=lake.root, report="report", fail_on=fail_on)
    settings = Settings(shared=SharedSettings(), options=options, silences=silences, rules=rules)
    context = RunContext(plan, settings)
    held = current_findings.by_hour(findings, context.window_from)
    closed = Balance().close(hours.text_of(context.window_from))
    revised = {"revised": 1, "changes": [{"before": "lost", "after": None, "ids": 1}]}
    collected = document.collect(held, current_findings.by_finding(held), context)
    results = document.Results(collected, closed, revised)
    return document.build(results, context, document.RunKind(), StepTimer(lambda line: None, {"plan": 1.5}))


def test_a_finding_of_each_kind_counts_in_report_exit_status_page_and_metrics(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What is made of a finding follows from the entry of its kind."""
    a_finding = {"accepted_hour": hours.at(hours.text_of(NOW_MS)), "last_ms": NOW_MS, "count": 1, "topic": "orders"}
    subjects: dict[str, dict[str, Any]] = {
        "id": {"scope": IDS, "id": b"i" * 16},
        "content": {"scope": IDS, "id": b"i" * 16, "fingerprint": b"f" * 8},
        "partition": {"scope": LOG, "partition": 3, "first_offset": 7, "last_offset": 7},
        "sink": {"scope": SCOPE, "id": b"i" * 16, "sink": "warehouse"},
    }
    rows = [{"kind": name, **a_finding, **subjects[kind.subject]} for name, kind in KINDS.items()]
    lake = Lake(spark, str(tmp_path))
    with_sink = StructType([*schemas.of("findings"), StructField("sink", StringType())])
    made = _built(lake, spark.createDataFrame(rows, with_sink))
    jsonschema.Draft202012Validator(schema()).validate(json.loads(json.dumps(made.document)))
    assert made.document["kinds"] == dict.fromkeys(KINDS, 1)
    assert (made.document["run"]["findings"], made.status) == (len(KINDS), 3)
    assert [row["kind"] for row in made.document["findings"]] == list(KINDS)
    assert {row["kind"]: row["severity"] for row in made.document["findings"]} == {
        name: kind.severity for name, kind in KINDS.items()
    }
    subject_of = {name: row["finding_id"] for name, row in zip(KINDS, made.document["findings"], strict=True)}
    assert subject_of["duplicate"] == f"duplicate:{(b'i' * 16).hex()}"
    assert subject_of["client_duplicate"] == f"client_duplicate:{(b'f' * 8).hex()}"
    assert subject_of["unkeyed"] == "unkeyed::orders:3"
    assert subject_of["late_in_sink"] == f"late_in_sink:warehouse:{(b'i' * 16).hex()}"
    text, numbers = "".join(page.render(made.document)), metrics.text(made.document)
    for name, kind in KINDS.items():
        assert f"<h3>1 {kind.title}</h3>" in text, name
        assert escape(kind.meaning) in text, name
        assert f'fencepost_audit_findings{{kind="{name}",severity="{kind.severity}"}} 1.0' in numbers, name


def test_many_findings_make_a_page_that_a_browser_opens_and_a_complete_report(
    large: tuple[dict[str, Any], Path],
) -> None:
    document, folder = large
    assert (folder / "report.html").stat().st_size < SIZE_MAX
    assert document["run"]["findings"] + SILENCED == len(document["findings"]) == MANY
    assert sum(document["kinds"].values()) + SILENCED == MANY
    assert len({one["finding_id"] for one in document["findings"]}) == MANY
    assert json.loads((folder / "report.json").read_text()) == document
    few = {**document, "findings": document["findings"][:: MANY // 100]}
    jsonschema.Draft202012Validator(schema()).validate(few)
    assert document["map"]["partitions_folded"] == 9
    assert sum(sum(row["troubled"]) for row in document["map"]["rows"]) == sum(
        {DUPLICATE.name: 1, CONFLICT.name: 1, LOST.name: 2}[one["kind"]] for one in document["findings"]
    )


def test_a_silenced_finding_stays_in_the_report_and_counts_nowhere(large: tuple[dict[str, Any], Path]) -> None:
    document, folder = large
    silenced = {one["finding_id"]: one["silenced"] for one in document["findings"] if one["silenced"]}
    assert list(silenced) == [FIRST_DUPLICATE, FIRST_CONFLICT]
    assert silenced[FIRST_DUPLICATE] == {"until": "2023-11-14T22:13:20.001Z", "reason": "known <b>"}
    assert {kind: count for kind, count in document["silenced"].items() if count} == {"duplicate": 1, "conflict": 1}
    assert [(use["state"], use["findings"]) for use in document["silences"]] == [
        ("active", 1),
        ("active", 1),
        ("expired", 0),
        ("unmatched", 0),
    ]
    counted = {row["kind"]: (row["findings"], row["records"]) for row in document["causes"]}
    assert counted["duplicate"] == (DUPLICATES - 1, DUPLICATES - 1)
    surplus = sum(len(one["coordinates"]) - 1 for one in document["findings"] if one["kind"] != "lost")
    assert document["instances"] == [{"instance": "a-host-with-a-name.example:8000", "copies": surplus}]
    metrics = (folder / "metrics.prom").read_text()
    assert f'fencepost_audit_findings{{kind="duplicate",severity="error"}} {DUPLICATES - 1}.0' in metrics
    assert 'fencepost_audit_silenced_findings{kind="duplicate"} 1.0' in metrics
    assert 'fencepost_audit_silences{state="expired"} 1.0' in metrics
    page = (folder / "report.html").read_text()
    assert "2 more findings are silenced." in page
    assert "known &lt;b&gt;" in page


def test_a_kind_that_the_rule_of_its_topic_does_not_list_counts_nowhere(spark: SparkSession, tmp_path: Path) -> None:
    a_finding = {"scope": IDS, "last_ms": NOW_MS, "count": 1, "id": b"i" * 16}
    rows = [{"kind": kind, "topic": TOPIC, **a_finding} for kind in ("lost", "stuck")]
    rows.append({"kind": "stuck", "topic": "another", **a_finding, "id": b"a" * 16})
    rules = Rules((TopicRule("orders.*", findings=("error",)), TopicRule("*", findings=("lost",))))
    lake = Lake(spark, str(tmp_path))
    made = _built(lake, spark.createDataFrame(rows, schemas.of("findings")), rules=rules)
    # The other topic is not audited any more: its findings count.
    assert {kind: count for kind, count in made.document["kinds"].items() if count} == {"lost": 1, "stuck": 1}
    assert {kind: count for kind, count in made.document["silenced"].items() if count} == {"stuck": 1}
    silenced = {"until": None, "reason": f"the rule of {TOPIC} does not count this kind"}
    assert [one["silenced"] for one in made.document["findings"] if one["topic"] == TOPIC] == [None, silenced]
    jsonschema.Draft202012Validator(schema()).validate(json.loads(json.dumps(made.document)))
    assert f"silenced: the rule of {TOPIC} does" in "".join(page.render(made.document))
    assert ", 1 silenced\n" in terminal.text_of(made, "r")


def test_only_findings_of_the_chosen_kinds_make_the_exit_status_3(large: tuple[dict[str, Any], Path]) -> None:
    run = large[0]["run"]
    chosen = [name for name, kind in KINDS.items() if name == "lost" or kind.severity == "warning"]
    assert run["fail_on"] == chosen
    assert run["failing"] == large[0]["kinds"]["lost"] > 0

    def status(failing: int) -> int:
        return document.Report(cast(Document, {**large[0], "run": {**run, "failing": failing}})).status

    assert (status(1), status(0)) == (3, 0)
    text = terminal.text_of(document.Report(cast(Document, {**large[0], "run": {**run, "failing": 0}})), "r")
    assert f"verdict    findings, {MANY - SILENCED} findings, 2 silenced\n" in text
    assert "silence    lost:* has expired at 2023-11-14T22:13:20.000Z: over\n" in text
    assert "silence    phantom:* matches no finding: there is none\n" in text
    assert f"exit       0: no finding of {', '.join(chosen)} (--fail-on)\n" in text


def test_a_report_with_silenced_findings_only_is_clean_and_says_so(large: tuple[dict[str, Any], Path]) -> None:
    document = {**large[0], "run": {**large[0]["run"], "verdict": "clean", "findings": 0, "failing": 0}}
    document["kinds"] = dict.fromkeys(KINDS, 0)
    text = "".join(page.render(cast(Document, document)))
    assert "<h1>Clean, but for 2 silenced findings</h1>" in text
    assert "<h3>1 duplicate, 1 silenced</h3>" in text


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    try:
        browser.ensure()
    except StackError as error:
        pytest.skip(str(error))
    with browser.opened(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_is_laid_out_and_complete_in_a_real_browser(
    large: tuple[dict[str, Any], Path], tab: browser.Page, width: int, dark: bool
) -> None:
    document, folder = large
    file = folder / "report.html"
    tab.requested.clear()
    tab.open(file, width=width, dark=dark)
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value("document.querySelector('h1').textContent").startswith(
        f"{MANY - SILENCED:,} findings: {DUPLICATES - 1:,} duplicates"
    )
    assert tab.value("document.title") == "Fencepost audit, run 1: findings"
    text = tab.value("document.body.textContent")
    assert f"The first 100 of {DUPLICATES:,}; all of them are in report.json." in text
    assert tab.value("document.querySelectorAll('article').length") == 300
    cells = sum(1 for row in document["map"]["rows"] for count in row["troubled"] if count)
    assert tab.value("document.querySelectorAll('g.bad').length") == cells
    # Values from a client are escaped everywhere.
    assert tab.value("document.querySelectorAll('img').length") == 0
    assert HOSTILE in tab.value("document.querySelector('article b').textContent")
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 128) is dark
    assert tab.requested == [file.as_uri()]
    assert tab.problems == []


def test_text_has_enough_contrast_in_the_light_and_the_dark_scheme(
    large: tuple[dict[str, Any], Path], tab: browser.Page
) -> None:
    for dark in (False, True):
        tab.open(large[1] / "report.html", width=1280, dark=dark)
        assert tab.value(_LOWEST_CONTRAST) >= 4.5  # WCAG 2.2, 1.4.3


_LOWEST_CONTRAST = """
(() => {
  const channel = c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const luminance = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
    return .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  let least = 21;
  for (const node of document.querySelectorAll("h1, h2, h3, p, th, td, b, code, pre, li, span, button, summary")) {
    const [light, dark] = [luminance(getComputedStyle(node).color), luminance(ground(node))].sort((a, b) => b - a);
    least = Math.min(least, (light + .05) / (dark + .05));
  }
  return least;
})()
"""


def test_a_button_copies_the_commands_of_a_finding(large: tuple[dict[str, Any], Path], tab: browser.Page) -> None:
    tab.open(large[1] / "report.html", width=1280)
    tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.value("document.querySelector('.kind').open = true")
    assert tab.value("document.querySelector('article .copy button').innerText") == "copy"
    commands = tab.value("document.querySelector('article pre').textContent").splitlines()
    first = large[0]["findings"][0]
    first_copy = first["coordinates"][0]
    assert commands[0].startswith(f"python -m spark show {first['id']} --lake ")
    assert commands[1] == (
        f"kcat -C -q -J -e -b 127.0.0.1:9092 -t {TOPIC} -p {first_copy['partition']} -o {first_copy['offset']} -c 1"
    )


_SHOWN = "[...document.querySelectorAll('article')].filter(one => one.checkVisibility()).length"


def _entered(tab: browser.Page, selector: str, value: str) -> None:
    """Enter a value into a control, as a user does."""
    control = f"document.querySelector({json.dumps(selector)})"
    tab.value(f"{control}.value = {json.dumps(value)}; {control}.dispatchEvent(new Event('input'))")


def test_findings_are_searched_filtered_and_sorted_in_the_page(
    large: tuple[dict[str, Any], Path], tab: browser.Page, tmp_path: Path
) -> None:
    document, folder = large
    tab.open(folder / "report.html", width=1280)
    note = "document.querySelector('#find output').value"
    assert (tab.value(_SHOWN), tab.value(note)) == (0, "")
    _entered(tab, "#find input", f"{document['findings'][7]['id'].upper()} rewrite")
    assert (tab.value(_SHOWN), tab.value(note)) == (0, "0 of the 300 findings on this page")
    _entered(tab, "#find input", f"{document['findings'][7]['id'].upper()} producer_restart")
    assert (tab.value(_SHOWN), tab.value(note)) == (1, "1 of the 300 findings on this page")
    _entered(tab, "#find input", "")
    assert (tab.value(_SHOWN), tab.value(note)) == (0, "")
    _entered(tab, "#find select", TOPIC)
    assert tab.value(_SHOWN) == 300
    _entered(tab, "#find select[aria-label=order]", "newest first")
    times = tab.value("[...document.querySelector('.kind').querySelectorAll('article')].map(one => one.dataset.time)")
    assert times == sorted(times, key=int, reverse=True)
    assert len(set(times)) > 1
    # A page of few findings, one of them silenced and one without a topic.
    few = [one for one in document["findings"] if one["silenced"]] + [{**document["findings"][0], "topic": None}]
    (tmp_path / "few.html").write_text("".join(page.render(cast(Document, {**document, "findings": few}))))
    tab.open(tmp_path / "few.html", width=1280)
    tab.value("document.querySelector('#find input[type=checkbox]').click()")
    assert (tab.value(_SHOWN), tab.value(note)) == (1, "1 of the 3 findings on this page")
    options = tab.value("[...document.querySelector('#find select').options].map(one => one.text)")
    assert options == ["all", "none", TOPIC]
    assert tab.problems == []


def test_the_findings_of_the_recent_runs_are_bars() -> None:
    runs = [{"number": 9 - nth, "frozen_at": "<now>", "findings": nth} for nth in range(5)]
    drawn = charts.trend(runs)
    assert drawn.index("run 5, &lt;now&gt;: 4 findings") < drawn.index("run 9, &lt;now&gt;: 0 findings")
    assert 'height="84.0"' in drawn
    assert charts.trend(runs[:1]) == charts.trend([{**one, "findings": 0} for one in runs]) == ""


def test_the_page_prints_with_every_shown_finding_opened(
    large: tuple[dict[str, Any], Path], tab: browser.Page, tmp_path: Path
) -> None:
    tab.open(large[1] / "report.html", width=1280)
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.value("document.querySelector('.kind').open") is False
    assert tab.value("document.querySelector('article').getBoundingClientRect().height") > 0
    tab.printed(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_page_names_blocking_transactions_and_revised_verdicts(large: tuple[dict[str, Any], Path]) -> None:
    whole = {"caught_up": True, "ids_pass": True, "failing": large[0]["run"]["findings"]}
    document = {**large[0], "run": large[0]["run"] | whole, "verdicts": {"revised": 0, "changes": []}}
    document["silenced"] = dict.fromkeys(KINDS, 0)
    assert [(one["partition"], one["open_since"]) for one in document["evidence"]["held_up"]] == [(39, None)]
    assert "Every accepted event is accounted for." in "".join(page.render(cast(Document, document)))
    held = {"role": "data", "topic": "orders", "partition": 3, "offset": 17, "high_watermark": 21}
    by = {"transactional_id": "billing-7", "producer_id": 4000, "epoch": 2}
    since = {"open_since": "2026-11-21T18:00:00.000Z", "age_s": 90.5}
    document["evidence"] = {**document["evidence"], "held_up": [held | by | since], "rejects": 2}
    document["verdicts"] = {"revised": 3, "changes": [{"before": "lost", "after": "delivered_once", "ids": 3}]}
    # A 201 without coordinates.
    gap: dict[str, Any] = dict.fromkeys([*current_findings.FIELDS, "silenced"])
    gap |= {"finding_id": "evidence_gap:no_coordinates:orders:", "kind": "evidence_gap", "cause": "no_coordinates"}
    document["findings"] = [
        gap | {"severity": "warning", "topic": "orders", "count": 1, "coordinates": [], "sink_coordinates": []}
    ]
    document["findings"].append(
        {**document["findings"][0], "finding_id": "evidence_gap:dr", "cause": "unreadable", "topic": None, "sink": "dr"}
    )
    document["kinds"] = {**document["kinds"], "evidence_gap": 2}
    document["causes"] = [
        {"kind": "evidence_gap", "topic": None, "cause": "unreadable", "findings": 1, "records": 0},
    ]
    times: dict[str, Any] = dict.fromkeys(("judged_until", "read_at"))
    unread: dict[str, Any] = {"format": "kafka", **dict.fromkeys((*SINK_COUNTS, "unidentified"), 0), **times}
    document["sinks"] = [
        {"name": "dr", **unread, "unreadable": "refused", "awaits_topics": False},
        {"name": "soon", **unread, "unreadable": None, "awaits_topics": True},
    ]
    document["topics"] = [{"topic": "orders", **dict.fromkeys(SUMS, 0), "ids": 3000, "copies_extra": 1}]
    jsonschema.Draft202012Validator(schema()).validate(document)
    text = "".join(page.render(cast(Document, document)))
    assert '<td class="n">333.3</td>' in text
    assert "Of 3 events an earlier run had said something else." in text
    assert "<td>orders[3]</td>" in text
    assert "<b>orders</b>" in text
    assert "<td>billing-7, producer 4000 epoch 2</td>" in text
    assert "<td>lost</td><td>delivered once</td>" in text
    assert "2 records could not be decoded." in text
    assert "dr could not be read: refused" in text
    assert "<b>dr</b>" in text
    assert "this run could not read the sink: its counts are those of the last run that could" in text
    assert "soon: nothing delivered yet. No run has audited a topic that its rule names." in text
    assert "The sink soon was not compared: nothing was delivered yet to a topic that its rule names." in text
    shown = terminal.text_of(Report(cast(Document, document)), "r")
    assert "finding    evidence_gap/unreadable: 1 findings, 0 records\n" in shown
    assert "sink       dr could not be read: refused\n" in shown
    assert "sink       soon: nothing delivered yet to a topic that its rule names\n" in shown
    readable = [line for line in metrics.text(cast(Document, document)).splitlines() if "sink_readable{" in line]
    assert [line.split("{")[1] for line in readable] == ['sink="dr"} 0.0', 'sink="soon"} 1.0']


def test_every_field_of_the_schema_has_a_description() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    objects = schema()["$defs"]
    fields = {
        f"{name}.{field}": described
        for name, found in objects.items()
        for field, described in found["properties"].items()
    }
    assert {path for path, field in fields.items() if not field.get("description")} == set()
    assert all(found["additionalProperties"] is False for found in objects.values())
    assert all(set(found["required"]) == set(found["properties"]) for found in objects.values())
    of_kinds = objects["Document"]["properties"]["kinds"]
    assert set(of_kinds["properties"]) == set(of_kinds["required"]) == set(KINDS)
    assert of_kinds["additionalProperties"] is False
    assert all(name in field["description"] for name, field in of_kinds["properties"].items())
    assert objects["TimelinePoint"]["properties"]["kind"]["enum"] == list(kinds.with_surplus())
    assert set(objects["Finding"]["properties"]["kind"]["enum"]) == set(KINDS)
    assert set(objects["TopicCounts"]["properties"]) == {"topic", *SUMS}
    assert set(objects["Balance"]["properties"]) == {"accepted", *CATEGORIES, "phantom", "records"}
    counted = ("Balance", "TopicCounts", "Requests")
    numbers = {
        path: field
        for path, field in fields.items()
        if field.get("type") == "integer" and path.partition(".")[0] in counted
    }
    assert numbers
    assert {path for path, field in numbers.items() if "Unit: " not in field["description"]} == set()


def test_an_additional_field_violates_the_schema(large: tuple[dict[str, Any], Path]) -> None:
    few = {**large[0], "findings": []}
    validator = jsonschema.Draft202012Validator(schema())
    assert validator.is_valid(few)
    assert not validator.is_valid({**few, "more": 1})
    assert not validator.is_valid({**few, "balance": few["balance"] | {"more": 1}})
    assert not validator.is_valid({name: value for name, value in few.items() if name != "cost"})
