"""report.html: renders the document of report.json as one self-contained page, from the template report.html."""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from spark.report import charts, commands
from spark.report.model import SINK_COUNTS, Document, Finding, TopicCounts
from spark.rules.classify import CATEGORIES
from spark.rules.kinds import EXTRA_IN_SINK, KINDS, Kind

LIMITS: Final = SimpleNamespace(
    findings=100, copies=5, open=10, causes=60, topics=60, logs=200, silences=200, instances=20
)
"""Maximum number of rows of each part of the page (`open`: kinds with at most so many findings are unfolded).

All rows are in report.json or in the lake.
"""
HEADLINE_KINDS: Final = 3
NAME_CHARS: Final = 120

CAUSE_MEANINGS: Final = {
    "foreign_writer": "written by another program",
    "rewrite": "the same producer wrote it again",
    "expired_key": "its key had expired",
    "producer_restart": "written again after a restart",
    "dual_producer": "two producers wrote it",
    "new_key": "the client made a new key",
}
"""Causes of copies in the order of their colours, with their meanings."""

_CATEGORY_CLASSES: Final = {"delivered_once": "good", "pending": "wait", "unprovable": "wait"}
"""The style class of a category of the balance; `bad` for all other categories."""
_TOPIC_COUNTS: Final = ("records", "ids", "copies_extra", "accepted", "unrequested", "unkeyed", "rejects")
_PAST_COUNTS: Final = ("findings", "accepted", "delivered_once", "pending", "records", "offsets")
_HEAT_KEYS: Final = (
    ("h1", "few records"),
    (f"h{charts.SHADES}", "many, in equal steps of the logarithm"),
    ("c1", "with findings (a dot)"),
)
"""The legend of the heat map: classes of the style sheet, and what they mean."""


def render(document: Document) -> Iterator[str]:
    """Render the page of a document, in chunks."""
    seconds = document["cost"]["seconds"]
    longest = max(seconds.values(), default=0) or 1
    style, script = (_asset(name) for name in ("report.css", "report.js"))
    bars, bar_keys = timeline(document)
    chart: Mapping[str, Any] = document["map"]
    yield from _template().generate(
        {
            **document,
            "topics": [row for row in document["topics"] if _has_counts(row)],
            "limits": LIMITS,
            "style": style,
            "style_hash": _hash(style),
            "script": script,
            "script_hash": _hash(script),
            "headline": _headline(document),
            "subline": _subline(document),
            "categories": [(name, _CATEGORY_CLASSES.get(name, "bad")) for name in CATEGORIES],
            "heat_map": Markup(charts.heat_map(chart)) if chart["rows"] else "",  # noqa: S704 - heat_map escapes its texts
            "heat_keys": _HEAT_KEYS,
            "bars": bars,
            "bar_keys": bar_keys,
            "groups": _groups(document),
            "commands_of": partial(_commands, document["run"]),
            "console_consumer": _console_consumer(document),
            "answers": [(status, count) for status, count in document["requests"].items() if count],
            "topic_counts": _TOPIC_COUNTS,
            "steps": [
                (step, taken, f"{max(taken / longest * 100, 0.5 if taken else 0):.1f}")
                for step, taken in seconds.items()
            ],
            "past_counts": _PAST_COUNTS,
            "trend": Markup(charts.trend(document["history"])),  # noqa: S704 - trend escapes its texts
            "sink_counts": SINK_COUNTS,
        }
    )


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("spark.report", ""), autoescape=True, undefined=StrictUndefined, auto_reload=False
    )
    environment.filters.update(
        count=_count,
        counted=counted,
        words=_words,
        clipped=_clipped,
        time=_time,
        time_of_ms=lambda ms: _time(datetime.fromtimestamp(ms / 1000, UTC).isoformat()),
        duration=_duration,
        newest=_newest_ms,
        per_million=_per_million,
    )
    return environment.get_template("report.html")


def _asset(name: str) -> Markup:
    """Read a file of this package, for the page, without escaping."""
    source, _, _ = PackageLoader("spark.report", "").get_source(Environment(autoescape=True), name)
    return Markup(source)  # noqa: S704 - our own file


def _hash(content: str) -> str:
    """Return the source expression that allows exactly this style or script in a Content-Security-Policy (CSP 3)."""
    return f"sha256-{b64encode(sha256(content.encode()).digest()).decode()}"


def _headline(document: Document) -> str:
    """Return the verdict in one line."""
    run, balance = document["run"], document["balance"]
    if run["verdict"] == "clean":
        if silenced := _silenced(document):
            return f"Clean, but for {counted(silenced, 'silenced finding', 'silenced findings')}"
        if not balance["accepted"] and not balance["records"]:
            return "Clean: nothing was written yet"
        return f"Clean: {_count(balance['delivered_once'])} accepted events, each delivered exactly once"
    present = [(KINDS[name], count) for name, count in document["kinds"].items() if count]
    listed = ", ".join(_counted_kind(count, kind) for kind, count in present[:HEADLINE_KINDS])
    others = sum(count for _, count in present[HEADLINE_KINDS:])
    more = f" and {counted(others, 'other', 'others')}" if others else ""
    return f"{counted(run['findings'], 'finding', 'findings')}: {listed}{more}"


def _silenced(document: Document) -> int:
    """Return the number of silenced findings."""
    return sum(document["silenced"].values())


def _subline(document: Document) -> str:
    """Return what restricts the verdict: pending events, revisions, options that leave records or ids out."""
    run, balance = document["run"], document["balance"]
    parts = []
    if run["findings"] > run["failing"]:
        parts.append(
            f"Of the findings, {_count(run['failing'])} make the exit status 3 (--fail-on {','.join(run['fail_on'])})."
        )
    if run["findings"] and (silenced := _silenced(document)):
        parts.append(f"{counted(silenced, 'more finding is', 'more findings are')} silenced.")
    if balance["pending"]:
        parts.append(f"{counted(balance['pending'], 'accepted event', 'accepted events')} cannot be judged yet.")
    if revised := document["verdicts"]["revised"]:
        parts.append(f"Of {counted(revised, 'event', 'events')} an earlier run had said something else.")
    if run["finished_first"] is not None:
        parts.append(
            f"Run {run['finished_first']}, interrupted with other options, was finished with its own options first."
        )
    if run["recounted"]:
        parts.append("The balance did not close, and was counted again: a fault of the audit; please open an issue.")
    if (delivery := document["webhook"]) and delivery["error"] is not None:
        parts.append(f"New findings were not delivered to the webhook ({delivery['error']}); the next run sends them.")
    if not run["caught_up"]:
        parts.append("This run was limited by --max-records: some records are not read yet.")
    parts += [
        f"The sink {sink['name']} could not be read: what it has is as of an earlier run."
        for sink in document["sinks"]
        if sink["unreadable"] is not None
    ]
    parts += [
        f"The sink {sink['name']} was not compared: nothing was delivered yet to a topic that its rule names."
        for sink in document["sinks"]
        if sink["awaits_topics"]
    ]
    if not run["ids_pass"]:
        parts.append("The pass over all ids was skipped: copies in other hours are not in this report.")
    return " ".join(parts) or "Every accepted event is accounted for."


def timeline(document: Document) -> tuple[Markup | str, list[tuple[str, str]]]:
    """Draw the bars of surplus copies over time, and their legend; both empty without copies that have a cause."""
    chart: Mapping[str, Any] = document["map"]
    points = document["timeline"]
    if not points or not chart["columns"]:
        return "", []
    start = datetime.fromisoformat(chart["from"])
    columns: dict[str, list[int]] = {}
    totals: Counter[str] = Counter()
    for point in points:
        cause = point["cause"] or ""
        nth = int((datetime.fromisoformat(point["hour"]) - start).total_seconds()) // 3600 // chart["hours_a_column"]
        values = columns.setdefault(cause, [0] * chart["columns"])
        if 0 <= nth < chart["columns"]:
            values[nth] += point["records"]
        totals[cause] += point["records"]
    # A derived copy has no cause.
    present = [(f"c{nth}", cause) for nth, cause in enumerate(CAUSE_MEANINGS, 1) if cause in columns]
    if not present:
        return "", []
    drawn = charts.stacked(chart, [(css_class, cause, columns[cause]) for css_class, cause in present])
    keys = [(css_class, f"{cause}, {CAUSE_MEANINGS[cause]}: {_count(totals[cause])}") for css_class, cause in present]
    return Markup(drawn), keys  # noqa: S704 - stacked escapes its texts


def _groups(document: Document) -> list[dict[str, Any]]:
    """Return the findings that the page shows, by kind."""
    counts, silenced = document["kinds"], document["silenced"]
    return [
        {
            "number": counts[name] + silenced[name],
            "title": _counted_kind(counts[name] + silenced[name], kind),
            "silenced": silenced[name],
            "meaning": kind.meaning,
            "findings": _shown([row for row in document["findings"] if row["kind"] == name]),
        }
        for name, kind in KINDS.items()
        if counts[name] + silenced[name]
    ]


def _shown(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that the page shows of a kind: those that are silenced come last."""
    return sorted(findings, key=lambda row: row["silenced"] is not None)[: LIMITS.findings]


def _counted_kind(number: int, kind: Kind) -> str:
    return counted(number, kind.title, kind.plural)


def _commands(run: Mapping[str, Any], finding: Finding) -> Sequence[str]:
    """Return the commands that print the records of a finding."""
    is_known = finding["id"] and finding["kind"] != EXTRA_IN_SINK.name
    show = [commands.show(run, finding["id"])] if is_known and finding["id"] else []
    return show + commands.kcat(run, finding)


def _console_consumer(document: Document) -> str | None:
    """Return one example of Kafka's console consumer, for the first finding with records."""
    lines = (commands.console_consumer(document["run"], finding) for finding in document["findings"])
    return next((line for line in lines if line), None)


def _has_counts(row: TopicCounts) -> bool:
    counts: Mapping[str, Any] = row
    return any(counts[name] for name in _TOPIC_COUNTS)


def counted(number: int, singular: str, plural: str) -> str:
    """Format a number with its noun: "1 record", "1,200 records"."""
    return f"{_count(number)} {singular if number == 1 else plural}"


def _count(number: int) -> str:
    return f"{number:,}"


def _newest_ms(finding: Finding) -> int:
    """Return the time of the newest copy of a finding, 0 if none has a time."""
    return max((copy["timestamp"] or 0 for copy in finding["coordinates"]), default=0)


def _per_million(row: TopicCounts) -> str:
    """Format the surplus copies of a topic for each million of its ids."""
    return f"{row['copies_extra'] / row['ids'] * 1e6:,.1f}" if row["ids"] else ""


def _words(name: str) -> str:
    return name.replace("_", " ")


def _clipped(text: str) -> str:
    return text if len(text) <= NAME_CHARS else text[: NAME_CHARS - 1] + "…"


def _time(iso: str) -> str:
    """Format a time of report.json: UTC, to the second."""
    return f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M:%S} UTC"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
