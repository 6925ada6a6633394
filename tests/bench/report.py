"""Writes the results as text, and as one self-contained HTML page: tables with goals, plots, the flame graph."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tests.bench import plots, results
from tests.bench.rows import Row

_STYLE = """
:root { color-scheme: light; } body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
padding: 0 1rem; color: #22303a; } h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .22rem .6rem; border-bottom: 1px solid #e3e7ea;
text-align: right; white-space: nowrap; } th:first-child, td:first-child { text-align: left; white-space: normal; }
th { font-weight: 600; color: #5b6a74; } .met { color: #3f6b3a; font-weight: 600; } .missed { color: #b23a24;
font-weight: 600; } .about, .where { color: #5b6a74; white-space: pre-line; } .where { font-size: .85rem; }
.failed { background: #fbe9e5; padding: .6rem; } .plot { margin: .6rem .8rem .2rem 0; } svg text { font-size: 10px;
fill: #5b6a74; } svg .t { font-size: 11px; fill: #22303a; } .axis { stroke: #c3ccd2; fill: none; }
.goal { stroke: #22303a; stroke-width: 1.5; } .flame { overflow-x: auto; } .flame svg text { fill: #22303a; }
"""


def as_text(rows: Sequence[Row]) -> str:
    """Format a table for a terminal."""
    lines = [("", "median", "quartiles", "goal", "")]
    for row in rows:
        spread = "{:,.4g} to {:,.4g}".format(*row.quartiles)
        said = {None: "", True: "met", False: "NOT MET"}[row.met]
        lines.append((row.name, _number(row.median, row.unit), spread, str(row.goal or ""), said))
    m, n, o, p, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(f"{a:<{m}}  {b:>{n}}  {c:>{o}}  {d:>{p}}  {e}".rstrip() for a, b, c, d, e in lines)


def write(folder: Path, order: Sequence[str]) -> None:
    """Write results.html into a folder, from all results in it."""
    found = {result["name"]: result for result in results.read(folder)}
    names = [name for name in order if name in found] + sorted(found.keys() - set(order))
    goals = [(name, row) for name in names for row in found[name]["rows"] if "goal" in row]
    met = sum(row["met"] for _, row in goals)
    failed = sum("failed" in found[name] for name in names)
    body = [
        f"<h1>Fencepost: speed</h1><p>{met} of {len(goals)} goals met; {failed} benches have no number. Medians of the "
        "rounds, with first and third "
        "quartile; sides of a ratio ran in turn. Each number's work was checked: every key once in the topic, and in "
        "the ledger.</p>",
        _table(goals_rows=goals),
        *(_section(found[name], sorted(folder.glob(f"{name}*.svg"))) for name in names),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Fencepost: speed</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
    (folder / "results.html").write_text(page)


def _table(goals_rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(row['name'])} <a href='#{escape(name)}'>{escape(name)}</a></td>"
        f"<td>{_number(row['median'], row['unit'])}</td><td>{escape(row['goal'])}</td><td>{_verdict(row)}</td></tr>"
        for name, row in goals_rows
    )
    return f"<h2>Goals</h2><table><tr><th></th><th>median</th><th>goal</th><th></th></tr>{rows}</table>"


def _section(result: dict[str, Any], graphs: Sequence[Path]) -> str:
    name = escape(result["name"])
    known = (
        "commit",
        "ours",
        "against",
        "date",
        "depth",
        "machine",
        "cores",
        "load",
        "python",
        "compiled",
        "kafka",
        "aiokafka",
        "redis",
        "took_s",
    )
    where = " · ".join(f"{key} {escape(str(result[key]))}" for key in known if key in result)
    head = f"<h2 id='{name}'>{name}</h2><p class='about'>{escape(result.get('about', ''))}</p>"
    if "failed" in result:
        return f"{head}<p class='failed'>No number: {escape(result['failed'])}</p><p class='where'>{where}</p>"
    by_series: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "series" in row:
            by_series.setdefault(row["series"], []).append(row)
    drawn = "".join(plots.series(series, rows) for series, rows in by_series.items() if len(rows) > 1)
    rows = "".join(
        f"<tr><td>{escape(row['name'])}</td><td>{_number(row['median'], row['unit'])}</td>"
        f"<td>{row['quartiles'][0]:,g} to {row['quartiles'][1]:,g}</td><td>{plots.strip(row)}</td>"
        f"<td>{escape(row.get('goal', ''))}</td><td>{_verdict(row)}</td></tr>"
        for row in result["rows"]
    )
    return (
        f"{head}{drawn}<table><tr><th></th><th>median</th><th>quartiles</th><th>rounds</th><th>goal</th><th></th></tr>"
        f"{rows}</table><p class='where'>{where}</p>"
        + "".join(f"<div class='flame'>{graph.read_text()}</div>" for graph in graphs)
    )


def _verdict(row: dict[str, Any]) -> str:
    if "met" not in row:
        return ""
    return "<span class='met'>met</span>" if row["met"] else "<span class='missed'>not met</span>"


def _number(value: float, unit: str) -> str:
    return f"{value:,.4g} {unit}".strip() if value < 1000 else f"{value:,.0f} {unit}".strip()
