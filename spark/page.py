"""report.html: the document as one page that needs nothing else, verdict first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from spark.balance import ByHour
from spark.verdict import CATEGORIES

TEMPLATE: Final = Path(__file__).with_name("report.html")
# A page is read by a person: the rest is in report.json and in the lake.
FINDINGS_SHOWN: Final = 1_000
COPIES_SHOWN: Final = 10

_NAMES: Final = {
    "duplicate": ("duplicate", "duplicates"),
    "conflict": ("conflict", "conflicts"),
    "client_duplicate": ("duplicate by the client", "duplicates by clients"),
    "lost": ("lost event", "lost events"),
    "phantom": ("phantom", "phantoms"),
    "unkeyed": ("partition with unkeyed records", "partitions with unkeyed records"),
    "stuck": ("stuck request", "stuck requests"),
    "evidence_gap": ("gap in the evidence", "gaps in the evidence"),
}
"""What one finding of a kind is called, and several."""

_GOOD: Final = {"delivered_once"}
_WAIT: Final = {"pending", "unprovable"}


def render(document: Mapping[str, Any], hours: ByHour) -> Iterator[str]:
    """The page of a report document; `hours` are the sums behind the plot."""
    run, balance = document["run"], document["balance"]
    sections = "\n".join(
        part
        for part in (
            _causes(document),
            _topics(document),
            _plot(hours),
            _findings(document),
            _held(document),
            _answers(document),
            _cost(document),
        )
        if part
    )
    yield Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"Fencepost audit, run {run['number']}: {run['verdict']}"),
        verdict=run["verdict"],
        headline=escape(_headline(document)),
        subline=escape(_subline(document)),
        provenance=escape(
            f"Run {run['number']}, ends frozen {run['frozen_at']}, window from {run['window_from']}, "
            f"namespace {run['namespace']}, topics {', '.join(run['topics']) or 'none'}"
        ),
        balance=_balance(balance),
        apart=escape(
            f"Apart from the line: {_several(balance['phantom'], 'phantom', 'phantoms')}, that nobody accepted; "
            f"{_several(balance['records'], 'record', 'records')} delivered in all."
        ),
        sections=sections,
    )


def _headline(document: Mapping[str, Any]) -> str:
    run, balance = document["run"], document["balance"]
    if run["verdict"] == "clean":
        if not balance["accepted"] and not balance["records"]:
            return "Clean: nothing was written yet"
        return f"Clean: {_count(balance['delivered_once'])} accepted events, each delivered exactly once"
    told = [_several(count, *_NAMES[kind]) for kind, count in document["kinds"].items() if count]
    return f"{_several(run['findings'], 'finding', 'findings')}: {', '.join(told)}"


def _subline(document: Mapping[str, Any]) -> str:
    run, balance = document["run"], document["balance"]
    parts = []
    if balance["pending"]:
        parts.append(f"{_several(balance['pending'], 'accepted event', 'accepted events')} cannot be judged yet.")
    if not run["caught_up"]:
        parts.append("This run was capped: records are left to read.")
    if not run["ids_pass"]:
        parts.append("The pass over all ids was left out: copies in other hours are not in this report.")
    return " ".join(parts) or "Every accepted event is accounted for."


def _balance(balance: Mapping[str, int]) -> str:
    def box(name: str, rule: str) -> str:
        count = balance[name]
        state = "zero" if not count else rule
        return f'<div class="{state}"><b>{_count(count)}</b>{escape(name.replace("_", " "))}</div>'

    parts = [box("accepted", ""), '<div class="sign">=</div>']
    for nth, name in enumerate(CATEGORIES):
        if nth:
            parts.append('<div class="sign">+</div>')
        parts.append(box(name, "good" if name in _GOOD else "wait" if name in _WAIT else "bad"))
    return "".join(parts)


def _causes(document: Mapping[str, Any]) -> str:
    rows = [
        (row["kind"], row["topic"], row["cause"] or "", _number(row["findings"]), _number(row["records"]))
        for row in document["causes"]
    ]
    if not rows:
        return ""
    note = (
        '<p class="soft">Records of duplicates and conflicts are the copies too many, each under its own topic and '
        "cause; a finding has the cause of its first copy too many.</p>"
    )
    head = ("kind", "topic", "cause", ("findings",), ("records",))
    return "<h2>Findings by kind, topic and cause</h2>" + _table(head, rows) + note


def _topics(document: Mapping[str, Any]) -> str:
    names = ("records", "ids", "copies_extra", "accepted", "unrequested", "unkeyed", "rejects")
    rows = [
        (row["topic"], *(_number(row[name]) for name in names))
        for row in document["topics"]
        if any(row[name] for name in names)
    ]
    if not rows:
        return ""
    head: list[str | tuple[str]] = ["topic", *((name.replace("_", " "),) for name in names)]
    note = '<p class="soft">Unrequested: ids that others wrote, of which neither ledger nor answers know.</p>'
    return "<h2>Topics</h2>" + _table(head, rows) + note


def _findings(document: Mapping[str, Any]) -> str:
    found = document["findings"]
    if not found:
        return ""
    rows = []
    for finding in found[:FINDINGS_SHOWN]:
        key = escape(finding["key"]) if finding["key"] else f'<span class="mono">{finding["id"] or ""}</span>'
        rows.append((finding["kind"], finding["cause"] or "", _html(key), _number(finding["count"]), _places(finding)))
    left = document["run"]["findings"] - len(rows)
    note = f'<p class="soft">{_count(left)} more are in report.json and in the lake.</p>' if left else ""
    head = ("kind", "cause", "key or id", ("records",), "where")
    return "<h2>Findings</h2>" + _table(head, rows) + note


def _places(finding: Mapping[str, Any]) -> "_html":
    copies = finding["coordinates"] or []
    if not copies:
        if finding["first_offset"] is None:
            return _html(escape(finding["topic"] or ""))
        span = f"{finding['topic']}[{finding['partition']}] {finding['first_offset']} to {finding['last_offset']}"
        return _html(f"<code>{escape(span)}</code>")
    lines = [_place(copy) for copy in copies[:COPIES_SHOWN]]
    left = max(finding["count"], len(copies)) - len(lines)
    if left:
        lines.append(f"and {_count(left)} more")
    return _html("<br>".join(lines))


def _place(copy: Mapping[str, Any]) -> str:
    place = f"{copy['topic']}[{copy['partition']}]@{copy['offset']}"
    writer = ""
    if copy.get("slot") is not None:
        writer = f" slot {copy['slot']}, producer {copy['pid']}/{copy['epoch']}, {copy['instance']}"
    cause = f" <b>{escape(copy['cause'])}</b>" if copy.get("cause") else ""
    return f'<code>{escape(place)}</code><span class="soft">{escape(writer)}</span>{cause}'


def _held(document: Mapping[str, Any]) -> str:
    evidence = document["evidence"]
    rows = [
        (
            f"{held['topic']}[{held['partition']}]",
            _number(held["offset"]),
            _number(held["high_watermark"]),
            held["open_since"] or "unknown",
            "" if held["age_s"] is None else f"{held['age_s']} s",
        )
        for held in evidence["held_up"]
    ]
    text = ""
    if rows:
        head = ("partition", ("decided up to",), ("log ends at",), "open transaction since", "age")
        text += "<h2>Held up by open transactions</h2>" + _table(head, rows)
    if evidence["rejects"]:
        text += f"<h2>Rejects</h2><p>{_count(evidence['rejects'])} records could not be decoded.</p>"
    return text


def _answers(document: Mapping[str, Any]) -> str:
    told = [(name, _number(count)) for name, count in document["requests"].items() if count]
    return "<h2>Answers</h2>" + _table(("status", ("answers",)), told) if told else ""


def _cost(document: Mapping[str, Any]) -> str:
    cost = document["cost"]
    rows = [(step, f"{seconds:.1f} s") for step, seconds in cost["seconds"].items()]
    body = _table(("step", "time"), rows)
    return f"<h2>Cost</h2><details><summary>{_count(cost['offsets'])} offsets read</summary>{body}</details>"


def _plot(hours: ByHour) -> str:
    """Ids of each hour as bars: delivered once, everything else, and what waits."""
    names = sorted(hours)
    if len(names) < 2:
        return ""
    bars = []
    for hour in names:
        counts: dict[str, int] = {}
        for topic in hours[hour].values():
            for name, count in topic.items():
                counts[name] = counts.get(name, 0) + count
        waits = counts.get("pending", 0)
        odd = sum(counts.get(name, 0) for name in CATEGORIES if name not in (*_GOOD, "pending"))
        once = counts.get("delivered_once", 0) + counts.get("unrequested", 0) - counts.get("unrequested_multiple", 0)
        bars.append((hour, once, odd + counts.get("unrequested_multiple", 0), waits))
    most = max(once + odd + waits for _, once, odd, waits in bars) or 1
    width, height, left = 960.0, 150.0, 4.0
    step = (width - 2 * left) / len(bars)
    shapes = []
    for nth, (hour, once, odd, waits) in enumerate(bars):
        y = height
        for rule, count in (("once", once), ("odd", odd), ("later", waits)):
            # A single odd id among millions has to be seen.
            tall = max(2.0, (height - 10) * count / most) if count else 0.0
            y -= tall
            shapes.append(
                f'<rect class="{rule}" x="{left + nth * step:.1f}" y="{y:.1f}" width="{max(step - 1, 0.8):.1f}" '
                f'height="{tall:.1f}"><title>{escape(hour)} UTC: {count} {_MEANING[rule]}</title></rect>'
            )
    axis = (
        f'<text x="{left}" y="{height + 16}">{escape(names[0])} UTC</text>'
        f'<text x="{width - left}" y="{height + 16}" text-anchor="end">{escape(names[-1])} UTC</text>'
    )
    legend = (
        '<p class="soft">Ids by hour of acceptance: delivered once (blue), not once (red), not known yet (amber).</p>'
    )
    box = f"0 0 {width:.0f} {height + 24:.0f}"
    return f'<h2>Hours</h2><svg viewBox="{box}" role="img">{"".join(shapes)}{axis}</svg>{legend}'


_MEANING: Final = {"once": "delivered once", "odd": "not delivered exactly once", "later": "not known yet"}


class _html(str):  # noqa: N801 - reads like a function at each use
    """Text that is HTML already."""


class _number(int):  # noqa: N801 - reads like a function at each use
    """A cell that is set to the right."""


Cell = str | int


def _table(head: Sequence[str | tuple[str]], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; a head of one in a tuple stands over numbers."""
    heads = "".join(
        f'<th class="n">{escape(name[0])}</th>' if isinstance(name, tuple) else f"<th>{escape(name)}</th>"
        for name in head
    )
    lines = ("".join(_cell(cell) for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, _number):
        return f'<td class="n">{_count(cell)}</td>'
    return f"<td>{cell if isinstance(cell, _html) else escape(str(cell))}</td>"


def _several(count: int, one: str, many: str) -> str:
    return f"{_count(count)} {one if count == 1 else many}"


def _count(number: int) -> str:
    return f"{number:,}"
