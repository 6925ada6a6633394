"""A report in a few lines, for a terminal."""

from collections.abc import Mapping
from typing import Any

from spark.report import document
from spark.rules.classify import CATEGORIES


def text_of(report: document.Report, folder: str) -> str:
    """Format a report in a few lines for a terminal; `folder` is that of the report."""
    run, balance = report.document["run"], report.document["balance"]
    silenced = sum(report.document["silenced"].values())
    parts = "  ".join(f"{name} {balance[name]}" for name in CATEGORIES if balance[name] or name == "delivered_once")
    lines = [
        f"verdict    {run['verdict']}, {run['findings']} findings" + (f", {silenced} silenced" * bool(silenced)),
        f"balance    accepted {balance['accepted']} = {parts}",
        f"records    {balance['records']} delivered, {balance['phantom']} phantom",
    ]
    for row in report.document["causes"]:
        name = f"{row['kind']}{'/' + row['cause'] if row['cause'] else ''}"
        where = "" if row["topic"] is None else f" in {row['topic']}"
        lines.append(f"finding    {name}{where}: {row['findings']} findings, {row['records']} records")
    for sink in report.document["sinks"]:
        counts: Mapping[str, Any] = sink
        names = ("present_once", "missing", "twice", "late", "pending", "unprovable")
        parts = "  ".join(f"{name} {counts[name]}" for name in names if counts[name] or name == "present_once")
        lines.append(f"sink       {sink['name']}: expected {sink['expected']} = {parts}, extra {sink['extra']}")
        if sink["unreadable"] is not None:
            lines.append(f"sink       {sink['name']} could not be read: {sink['unreadable']}")
        if sink["awaits_topics"]:
            lines.append(f"sink       {sink['name']}: nothing delivered yet to a topic that its rule names")
    for use in report.document["silences"]:
        if use["state"] == "expired":
            lines.append(f"silence    {use['finding']} has expired at {use['until']}: {use['reason']}")
        elif use["state"] == "unmatched":
            lines.append(f"silence    {use['finding']} matches no finding: {use['reason']}")
    if (delivery := report.document["webhook"]) is not None:
        error = delivery["error"]
        outcome = "sent" if error is None else f"not delivered, the next run sends them: {error}"
        lines.append(f"webhook    {delivery['findings']} findings {outcome}")
    if run["findings"] and not run["failing"]:
        lines.append(f"exit       0: no finding of {', '.join(run['fail_on'])} (--fail-on)")
    lines.append(f"report     {folder}/report.html")
    return "\n".join(lines) + "\n"
