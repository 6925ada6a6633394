"""report.html: the document of report.json as one page that needs nothing else, verdict first."""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from spark.report import charts, commands
from spark.rules.classify import CATEGORIES
from spark.rules.findings import KINDS

HERE: Final = Path(__file__).parent
# A page is read by a person: the rest is in report.json and in the lake.
FINDINGS_A_KIND: Final = 100
COPIES_SHOWN: Final = 5
# The kinds whose findings stand open where there are few.
OPEN_MAX: Final = 10
HEADLINE_KINDS: Final = 3
CAUSES_SHOWN: Final = 60
TOPICS_SHOWN: Final = 60
LOGS_SHOWN: Final = 200
NAME_CHARS: Final = 120

_NAMES: Final = {
    "duplicate": ("duplicate", "duplicates"),
    "conflict": ("conflict", "conflicts"),
    "client_duplicate": ("duplicate by the client", "duplicates by clients"),
    "derived_copy": ("copy in another topic", "copies in other topics"),
    "lost": ("lost event", "lost events"),
    "phantom": ("phantom", "phantoms"),
    "unkeyed": ("partition with unkeyed records", "partitions with unkeyed records"),
    "stuck": ("stuck request", "stuck requests"),
    "evidence_gap": ("gap in the evidence", "gaps in the evidence"),
}
"""What one finding of a kind is called, and several."""

_MEANING: Final = {
    "duplicate": "One id, delivered more than once with the same content.",
    "conflict": "One id, delivered with different contents.",
    "client_duplicate": "Different ids with the same content and record key: a client made a new key for its retry.",
    "derived_copy": "A record of another topic, forwarded with its header. Where that is meant, the rules may say so.",
    "lost": "The ledger or a 201 names a place in the log that holds another record, or none.",
    "phantom": "A record with Fencepost's header of which the ledger knows nothing.",
    "unkeyed": "Records without id: whether they repeat, nobody can tell.",
    "stuck": "Answered 202 or 504, and never settled.",
    "evidence_gap": "What would prove the delivery is gone. Nothing here is called lost.",
}

_CAUSES: Final = {
    "foreign_writer": "written past Fencepost",
    "rewrite": "the same producer wrote it again",
    "expired_key": "its key had expired",
    "producer_restart": "written again after a restart",
    "dual_producer": "two producers wrote it",
    "new_key": "the client made a new key",
}
"""Causes of copies in the order of their colours, and what they mean."""

_GOOD: Final = {"delivered_once"}
_WAIT: Final = {"pending", "unprovable"}


def render(document: Mapping[str, Any]) -> Iterator[str]:
    """The page of a report document."""
    run = document["run"]
    style, script = (HERE.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    sections = (_verdict, _balance, _map, _timeline, _causes, _findings, _evidence, _topics, _cost, _history)
    yield Template(HERE.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"Fencepost audit, run {run['number']}: {run['verdict']}"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        content="\n".join(part for section in sections if (part := section(document))),
    )


def _hash(content: str) -> str:
    """How a Content-Security-Policy names the one style, or script, that it allows."""
    return f"sha256-{b64encode(sha256(content.encode()).digest()).decode()}"


# ----------------------------------------------------------------------------------------------- verdict and balance


def _verdict(document: Mapping[str, Any]) -> str:
    run = document["run"]
    topics = ", ".join(run["topics"][:TOPICS_SHOWN]) or "none"
    facts = (
        f"Run {run['number']}, ends frozen {_time(run['frozen_at'])}, looking back to {_time(run['window_from'])}. "
        f"Namespace {run['namespace']}, topics: {topics}."
    )
    return (
        f'<header class="verdict {escape(run["verdict"])}"><b class="word">{escape(run["verdict"])}</b>'
        f"<h1>{escape(_headline(document))}</h1><p>{escape(_subline(document))}</p>"
        f'<p class="soft small">{escape(facts)}</p></header>'
    )


def _headline(document: Mapping[str, Any]) -> str:
    run, balance = document["run"], document["balance"]
    if run["verdict"] == "clean":
        if not balance["accepted"] and not balance["records"]:
            return "Clean: nothing was written yet"
        return f"Clean: {_count(balance['delivered_once'])} accepted events, each delivered exactly once"
    present = [(kind, count) for kind, count in document["kinds"].items() if count]
    told = ", ".join(_several(count, *_NAMES[kind]) for kind, count in present[:HEADLINE_KINDS])
    others = sum(count for _, count in present[HEADLINE_KINDS:])
    more = f" and {_several(others, 'other', 'others')}" if others else ""
    return f"{_several(run['findings'], 'finding', 'findings')}: {told}{more}"


def _subline(document: Mapping[str, Any]) -> str:
    run, balance = document["run"], document["balance"]
    parts = []
    if balance["pending"]:
        parts.append(f"{_several(balance['pending'], 'accepted event', 'accepted events')} cannot be judged yet.")
    if revised := document["verdicts"]["revised"]:
        parts.append(f"Of {_several(revised, 'event', 'events')} an earlier run had said something else.")
    if not run["caught_up"]:
        parts.append("This run was capped: records are left to read.")
    if not run["ids_pass"]:
        parts.append("The pass over all ids was left out: copies in other hours are not in this report.")
    return " ".join(parts) or "Every accepted event is accounted for."


def _balance(document: Mapping[str, Any]) -> str:
    balance = document["balance"]

    def box(name: str, rule: str) -> str:
        state = rule if balance[name] else "zero"
        return f'<div class="{state}"><b>{_count(balance[name])}</b>{escape(_words(name))}</div>'

    parts = [box("accepted", ""), "<i>=</i>"]
    for nth, name in enumerate(CATEGORIES):
        if nth:
            parts.append("<i>+</i>")
        parts.append(box(name, "good" if name in _GOOD else "wait" if name in _WAIT else "bad"))
    apart = (
        f"Over ids. Apart from the line: {_several(balance['phantom'], 'phantom', 'phantoms')}, that nobody accepted; "
        f"{_several(balance['records'], 'record', 'records')} delivered in all."
    )
    return (
        f'<h2>The balance closes</h2><div class="balance">{"".join(parts)}</div>'
        f'<p class="soft small">{escape(apart)}</p>'
    )


def _causes(document: Mapping[str, Any]) -> str:
    rows = [
        (row["kind"], row["topic"] or "", row["cause"] or "", _number(row["findings"]), _number(row["records"]))
        for row in document["causes"][:CAUSES_SHOWN]
    ]
    if not rows:
        return ""
    left = len(document["causes"]) - len(rows)
    note = (
        '<p class="soft small">Records of duplicates and conflicts are the copies too many, each under its own topic '
        f"and cause; a finding has the cause of its first copy too many.{_left(left, 'lines')}</p>"
    )
    head = ("kind", "topic", "cause", ("findings",), ("records",))
    return "<h2>What was found</h2>" + _table(head, rows) + note


# --------------------------------------------------------------------------------------------------------- drawings


def _map(document: Mapping[str, Any]) -> str:
    chart = document["map"]
    if not chart["rows"]:
        return ""
    keys = [
        ("h1", "few records"),
        (f"h{charts.SHADES}", "many, in equal steps of the logarithm"),
        ("c1", "trouble (a dot)"),
    ]
    note = '<p class="soft small">By hour of acceptance, UTC; later ones count in that of the run.</p>'
    return f"<h2>Hours and partitions</h2>{charts.heat_map(chart)}{_legend(keys)}{note}"


def _timeline(document: Mapping[str, Any]) -> str:
    chart, points = document["map"], document["timeline"]
    if not points or not chart["columns"]:
        return ""
    start = datetime.fromisoformat(chart["from"])
    counts: dict[str, list[int]] = {}
    totals: Counter[str] = Counter()
    for point in points:
        nth = int((datetime.fromisoformat(point["hour"]) - start).total_seconds()) // 3600 // chart["hours_a_column"]
        values = counts.setdefault(point["cause"], [0] * chart["columns"])
        if 0 <= nth < chart["columns"]:
            values[nth] += point["records"]
        totals[point["cause"]] += point["records"]
    present = [(nth, cause) for nth, cause in enumerate(_CAUSES, 1) if cause in counts]
    series = [(f"c{nth}", cause, counts[cause]) for nth, cause in present]
    keys = [(f"c{nth}", f"{cause}, {_CAUSES[cause]}: {_count(totals[cause])}") for nth, cause in present]
    return f"<h2>Copies too many, by cause</h2>{charts.stacked(chart, series)}{_legend(keys)}"


def _legend(keys: Iterable[tuple[str, str]]) -> str:
    items = (
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{rule}" width="10" height="10" rx="2"/></svg>'
        f"{escape(text)}</li>"
        for rule, text in keys
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


# --------------------------------------------------------------------------------------------------------- findings


def _findings(document: Mapping[str, Any]) -> str:
    found = document["findings"]
    if not found:
        return ""
    run = document["run"]
    parts = []
    for kind in KINDS:
        number = document["kinds"][kind]
        if not number:
            continue
        shown = [one for one in found if one["kind"] == kind][:FINDINGS_A_KIND]
        left = number - len(shown)
        more = (
            f'<p class="soft small">The first {_count(len(shown))} of {_count(number)}; all of them are in '
            f"report.json{_beyond(document)}.</p>"
            if left
            else ""
        )
        opened = " open" if number <= OPEN_MAX else ""
        parts.append(
            f'<details class="kind"{opened}><summary><h3>{_several(number, *_NAMES[kind])}</h3></summary>'
            f'<p class="soft">{_MEANING[kind]}</p>{more}{"".join(_finding(run, one) for one in shown)}</details>'
        )
    note = "<p>Each with what to type to see it. The kcat commands print records as JSON.</p>"
    other = next((line for one in found if (line := commands.console_consumer(run, one))), None)
    if other:
        note += f"<details><summary>The same with Kafka's own tool</summary>{_commands([other])}</details>"
    return f"<h2>Findings</h2>{note}{''.join(parts)}"


def _beyond(document: Mapping[str, Any]) -> str:
    left = document["findings_left_out"]
    return f", but for {_count(left)} that are only in the lake's table findings" if left else ""


def _finding(run: Mapping[str, Any], finding: Mapping[str, Any]) -> str:
    name = finding["key"] or finding["id"] or f"{finding['topic']}[{finding['partition']}]"
    facts = [] if finding["cause"] is None else [f'<span class="tag">{escape(finding["cause"])}</span>']
    if finding["id"]:
        facts.append(f'<code class="soft">{finding["id"]}</code>')
    typed = ([commands.show(run, finding["id"])] if finding["id"] else []) + commands.kcat(run, finding)
    return (
        f'<article class="finding"><div class="name"><b>{escape(_clipped(name))}</b>{"".join(facts)}</div>'
        f"{_places(finding)}{_commands(typed) if typed else ''}</article>"
    )


def _places(finding: Mapping[str, Any]) -> str:
    copies = finding["coordinates"]
    if not copies:
        if finding["first_offset"] is None:
            return f'<p class="soft">accepted for topic {escape(finding["topic"] or "?")}</p>'
        span = f"{finding['topic']}[{finding['partition']}] {finding['first_offset']} to {finding['last_offset']}"
        return f"<p><code>{escape(span)}</code> {_several(finding['count'], 'record', 'records')}</p>"
    lines = "".join(f"<li>{_place(copy)}</li>" for copy in copies[:COPIES_SHOWN])
    left = max(finding["count"], len(copies)) - min(len(copies), COPIES_SHOWN)
    return f"<ol>{lines}</ol>" + (f'<p class="soft small">and {_count(left)} more</p>' if left else "")


def _place(copy: Mapping[str, Any]) -> str:
    place = f"{copy['topic']}[{copy['partition']}]@{copy['offset']}"
    told = []
    if copy["timestamp"] is not None:
        told.append(_time(datetime.fromtimestamp(copy["timestamp"] / 1000, UTC).isoformat()))
    if copy["slot"] is not None:
        told.append(f"slot {copy['slot']}, producer {copy['pid']} epoch {copy['epoch']}, {copy['instance']}")
    cause = f' <b class="word-bad">{escape(copy["cause"])}</b>' if copy["cause"] else ""
    return f'<code>{escape(place)}</code> <span class="soft small">{escape("; ".join(told))}</span>{cause}'


def _commands(lines: Sequence[str]) -> str:
    return f'<div class="copy"><pre>{escape(chr(10).join(lines))}</pre></div>'


# --------------------------------------------------------------------------------------------------------- evidence


def _evidence(document: Mapping[str, Any]) -> str:
    evidence = document["evidence"]
    held = [
        (
            f"{one['topic']}[{one['partition']}]",
            _number(one["offset"]),
            _number(one["high_watermark"]),
            _time(one["open_since"]) if one["open_since"] else "unknown",
            _right("" if one["age_s"] is None else _duration(one["age_s"])),
            _holder(one),
        )
        for one in evidence["held_up"]
    ]
    gaps = [
        (f"{one['topic']}[{one['partition']}]", one["cause"], _number(one["first"]), _number(one["last"]))
        for one in evidence["gaps"]
    ]
    logs = [
        (f"{one['topic']}[{one['partition']}]", one["role"], *(_number(one[name]) for name in _LOG))
        for one in evidence["logs"]
    ]
    parts = ["<h2>Evidence</h2>"]
    if not held and not gaps and not evidence["rejects"]:
        parts.append("<p>Nothing holds an answer up, nothing is missing, every record could be read.</p>")
    if held:
        waiting = ("held up by an open transaction", ("decided up to",), ("log ends at",), "open since", ("age",), "by")
        parts.append(_table(waiting, held[:LOGS_SHOWN]))
    if gaps:
        gone = ("gone before it was read", "why", ("from",), ("up to",))
        parts.append(_table(gone, gaps[:LOGS_SHOWN]))
    if evidence["rejects"]:
        parts.append(f"<p>{_several(evidence['rejects'], 'record', 'records')} could not be decoded.</p>")
    if changes := document["verdicts"]["changes"]:
        told = [
            (_words(one["before"]), _words(one["after"] or "nothing to say"), _number(one["ids"])) for one in changes
        ]
        parts.append(_folded("What was said before, and is now", _table(("before", "now", ("ids",)), told)))
    answers = [(name, _number(count)) for name, count in document["requests"].items() if count]
    if answers:
        parts.append(_folded("Answers of the window, by status", _table(("status", ("answers",)), answers)))
    head = ("log", "role", ("read from",), ("to",), ("last stable",), ("high watermark",))
    title = f"{_several(len(logs), 'log', 'logs')} read{_left(len(logs) - LOGS_SHOWN, 'logs')}"
    parts.append(_folded(title, _table(head, logs[:LOGS_SHOWN])))
    return "".join(parts)


def _holder(held: Mapping[str, Any]) -> str:
    """Who holds a partition up, as far as the broker tells."""
    if held["producer_id"] is None:
        return "unknown"
    producer = f"producer {held['producer_id']} epoch {held['epoch']}"
    return producer if held["transactional_id"] is None else f"{held['transactional_id']}, {producer}"


_LOG: Final = ("from", "to", "last_stable", "high_watermark")


def _topics(document: Mapping[str, Any]) -> str:
    names = ("records", "ids", "copies_extra", "accepted", "unrequested", "unkeyed", "rejects")
    every = [row for row in document["topics"] if any(row[name] for name in names)]
    if not every:
        return ""
    rows = [(row["topic"], *(_number(row[name]) for name in names)) for row in every[:TOPICS_SHOWN]]
    head: list[Head] = ["topic", *((_words(name),) for name in names)]
    note = (
        '<p class="soft small">Unrequested: ids that others wrote, of which neither ledger nor answers know.'
        f"{_left(len(every) - len(rows), 'topics')}</p>"
    )
    return "<h2>Topics</h2>" + _table(head, rows) + note


# --------------------------------------------------------------------------------------------------- cost, history


def _cost(document: Mapping[str, Any]) -> str:
    cost = document["cost"]
    whole = sum(cost["seconds"].values())
    most = max(cost["seconds"].values(), default=0) or 1
    rows = [(step, _bar(taken / most), _right(_duration(taken))) for step, taken in cost["seconds"].items()]
    head = ("step", "", ("time",))
    summary = f"{_several(cost['offsets'], 'offset', 'offsets')} read; {_duration(whole)} up to this report"
    return f"<h2>Cost</h2><p>{escape(summary)}.</p>" + _table(head, rows)


def _history(document: Mapping[str, Any]) -> str:
    past = document["history"]
    rows: list[Sequence[Cell]] = [
        (
            _number(one["number"]),
            _html(f'<span class="whole">{_time(one["frozen_at"])}</span>'),
            _html(
                f'<span class="word-{"good" if one["verdict"] == "clean" else "bad"}">{escape(one["verdict"])}</span>'
            ),
            *(_number(one[name]) for name in ("findings", "accepted", "delivered_once", "pending", "records")),
            _number(one["offsets"]),
            _right(_duration(one["seconds"])),
        )
        for one in past
    ]
    numbers = [(_words(name),) for name in ("findings", "accepted", "delivered_once", "pending", "records")]
    head: list[Head] = [("run",), "ends frozen", "verdict", *numbers, ("offsets read",), ("time",)]
    foot = "<footer>The same in full: report.json; numbers for Prometheus: metrics.prom.</footer>"
    return "<h2>The last runs</h2>" + _table(head, rows) + foot


# ------------------------------------------------------------------------------------------------------ small parts


class _html(str):  # noqa: N801 - reads like a function at each use
    """Text that is HTML already."""


class _right(str):  # noqa: N801 - reads like a function at each use
    """Text that is set to the right."""


class _number(int):  # noqa: N801 - reads like a function at each use
    """A cell that is set to the right."""


Cell = str | int
Head = str | tuple[str]


def _table(head: Sequence[Head], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; a head of one in a tuple stands over numbers."""
    heads = "".join(
        f'<th class="n" scope="col">{escape(name[0])}</th>'
        if isinstance(name, tuple)
        else f'<th scope="col">{escape(name)}</th>'
        for name in head
    )
    lines = ("".join(_cell(cell) for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll" tabindex="0"><table><tr>{heads}</tr>{body}</table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, _number):
        return f'<td class="n">{_count(cell)}</td>'
    if isinstance(cell, _right):
        return f'<td class="n">{escape(cell)}</td>'
    return f"<td>{cell if isinstance(cell, _html) else escape(_clipped(str(cell)))}</td>"


def _bar(share: float) -> _html:
    wide = max(share * 100, 0.5 if share else 0)
    return _html(
        f'<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{wide:.1f}" height="6"/></svg>'
    )


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _clipped(text: str) -> str:
    return text if len(text) <= NAME_CHARS else text[: NAME_CHARS - 1] + "…"


def _left(count: int, what: str) -> str:
    return f" {_count(count)} more {what} are in report.json." if count > 0 else ""


def _several(count: int, one: str, many: str) -> str:
    return f"{_count(count)} {one if count == 1 else many}"


def _count(number: int) -> str:
    return f"{number:,}"


def _time(iso: str) -> str:
    """A time of report.json, for people: UTC, to the second."""
    return f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M:%S} UTC"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
