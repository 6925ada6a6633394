"""The charts of the report page as inline SVG. Colours come from the page's style, for a light and a dark scheme."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Any, Final

WIDTH: Final = 960.0
ROW: Final = 18.0
COLUMN_MAX: Final = 44.0
CHAR: Final = 6.4  # maximum width of a character of a label
SHADES: Final = 5
LABEL_CHARS: Final = 26


def heat_map(chart: Mapping[str, Any]) -> str:
    """Draw the heat map of hours and partitions: shades by records; a cell with findings is red and has a dot."""
    columns, rows = chart["columns"], chart["rows"]
    if not columns:
        return ""
    left, _ = _columns(chart)
    most = max((count for row in rows for count in row["records"]), default=0)
    shapes = []
    for nth, row in enumerate(rows):
        y = nth * ROW
        name = row_name(row, chart["partitions_folded"])
        title = f"{name}: {sum(row['records']):,} records, {sum(row['troubled']):,} in trouble"
        shapes.append(
            f'<text x="{left - 8:g}" y="{y + 13:g}" text-anchor="end">{escape(_shortened(name))}'
            f"<title>{escape(title)}</title></text>"
        )
        shapes += _cells(chart, row, name, y, most)
    height = len(rows) * ROW
    axis = _axis(chart, height + 14)
    return _svg(height + 20, "Records by hour and partition", "".join(shapes) + axis)


def _columns(chart: Mapping[str, Any]) -> tuple[float, float]:
    """Return the x coordinate of the first column, after the row names, and the width of a column."""
    names = (row_name(row, chart["partitions_folded"]) for row in chart["rows"])
    left = 16 + CHAR * max((len(_shortened(name)) for name in names), default=0)
    return left, min((WIDTH - left) / chart["columns"], COLUMN_MAX)


def _cells(chart: Mapping[str, Any], row: Mapping[str, Any], name: str, y: float, most: int) -> Iterator[str]:
    """Draw the cells of a row; `most` is the number of records in the strongest shade."""
    left, step = _columns(chart)
    wide, tall = max(step - 1.5, step * 0.75), ROW - 2.5
    for nth, (count, of_findings) in enumerate(zip(row["records"], row["troubled"], strict=True)):
        if not count and not of_findings:
            continue
        x = left + nth * step
        title = f"{name}, {column_name(chart, nth)}: {count:,} records"
        if of_findings:
            title += f", {of_findings:,} in trouble"
        css_class = "bad" if of_findings else f"h{shade(count, most)}"
        dot = f'<circle cx="{x + wide / 2:.1f}" cy="{y + tall / 2:.1f}" r="2.2"/>' if of_findings else ""
        yield (
            f'<g class="{css_class}"><title>{escape(title)}</title>'
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" rx="2"/>{dot}</g>'
        )


def shade(count: int, most: int) -> int:
    """Return the shade of a count: 1 (few) to SHADES (most), in equal steps of the logarithm."""
    if count <= 0 or most <= 1:
        return SHADES
    return 1 + min(SHADES - 1, int(SHADES * math.log(count + 1) / math.log(most + 1)))


def stacked(chart: Mapping[str, Any], series: Sequence[tuple[str, str, Sequence[int]]]) -> str:
    """Draw stacked bars over the columns of the map; a series is a style class, a name, and a number a column."""
    columns = chart["columns"]
    height = 130.0
    left, step = _columns(chart)
    most = max(sum(values[nth] for _, _, values in series) for nth in range(columns)) or 1
    shapes = [
        f'<text x="{left - 8:g}" y="12" text-anchor="end">{most:,}</text>',
        f'<text x="{left - 8:g}" y="{height:g}" text-anchor="end">0</text>',
        f'<path class="baseline" d="M{left:g} {height:g}H{left + columns * step:.1f}"/>',
    ]
    for nth in range(columns):
        y = height
        for css_class, name, values in series:
            if count := values[nth]:
                # A single record among thousands must be visible.
                tall = max(2.5, (height - 6) * count / most)
                y -= tall
                shapes.append(
                    f'<rect class="{css_class}" x="{left + nth * step:.1f}" y="{max(y, 0):.1f}" '
                    f'width="{max(step - 1.5, step * 0.75):.1f}" height="{tall:.1f}" rx="1.5">'
                    f"<title>{escape(column_name(chart, nth))}: {count:,} {escape(name)}</title></rect>"
                )
    return _svg(height + 20, "Surplus copies by hour and cause", "".join(shapes) + _axis(chart, height + 14))


def trend(history: Sequence[Mapping[str, Any]]) -> str:
    """Draw the findings of the recent runs (model.PastRun, newest first) as bars, the oldest on the left; "" if there
    were none, or is only one run."""
    runs = [*reversed(history)]
    most = max((run["findings"] for run in runs), default=0)
    if len(runs) < 2 or not most:
        return ""
    height, left = 90.0, 16 + CHAR * len(f"{most:,}")
    step = min((WIDTH - left) / len(runs), COLUMN_MAX)
    shapes = [
        f'<text x="{left - 8:g}" y="12" text-anchor="end">{most:,}</text>',
        f'<text x="{left - 8:g}" y="{height:g}" text-anchor="end">0</text>',
        f'<path class="baseline" d="M{left:g} {height:g}H{left + len(runs) * step:.1f}"/>',
    ]
    for nth, run in enumerate(runs):
        x = left + nth * step
        tall = max(2.5, (height - 6) * run["findings"] / most) if run["findings"] else 0
        # A run without findings has a title too: over the whole height.
        shapes.append(
            f"<g><title>run {run['number']}, {escape(run['frozen_at'])}: {run['findings']:,} findings</title>"
            f'<rect class="blank" x="{x:.1f}" y="0" width="{step:.1f}" height="{height:g}"/>'
            f'<rect class="c1" x="{x:.1f}" y="{height - tall:.1f}" width="{step * 0.75:.1f}" height="{tall:.1f}" '
            'rx="1.5"/></g>'
        )
    ends = ((0, "start"), (len(runs) - 1, "end")) if len(runs) > 3 else ((0, "start"),)
    for nth, anchor in ends:
        x = left + (nth + (anchor == "end")) * step
        shapes.append(f'<text x="{x:.1f}" y="{height + 14:g}" text-anchor="{anchor}">run {runs[nth]["number"]}</text>')
    return _svg(height + 20, "Findings of the recent runs", "".join(shapes))


def row_name(row: Mapping[str, Any], folded: int) -> str:
    """Return the label of a row of the map."""
    if row["topic"] is None:
        return f"{folded:,} other partitions"
    return f"{row['topic']}[{row['partition']}]" if row["partition"] is not None else f"{row['topic']}"


def column_name(chart: Mapping[str, Any], nth: int) -> str:
    """Return the label of a column: its hours, UTC."""
    hours = chart["hours_a_column"]
    start = datetime.fromisoformat(chart["from"]) + timedelta(hours=nth * hours)
    return f"{start:%d %b %H:%M}" + (f" and {hours - 1} h more" if hours > 1 else "")


def _axis(chart: Mapping[str, Any], y: float) -> str:
    """Draw the labels of the first column, and of as many others as fit."""
    left, step = _columns(chart)
    marks = range(0, chart["columns"], max(1, math.ceil(110 / step)))
    return "".join(
        f'<text x="{left + nth * step:.1f}" y="{y:g}">{escape(column_name(chart, nth).split(" and")[0])}</text>'
        for nth in marks
        if left + nth * step < WIDTH - 60
    )


def _shortened(name: str) -> str:
    """Shorten a name at its start, since the partition is at its end."""
    return name if len(name) <= LABEL_CHARS else "…" + name[-LABEL_CHARS + 1 :]


def _svg(height: float, label: str, shapes: str) -> str:
    """Wrap shapes into an SVG in a scrollable region."""
    return (
        f'<div class="scroll chart" role="region" aria-label="{escape(label)}" tabindex="0">'
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label)}">{shapes}</svg></div>'
    )
