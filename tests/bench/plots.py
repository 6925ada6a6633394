"""Draws plots as inline SVG, without a library or a script."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

_WIDE, _HIGH = 340, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 30
_COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#7b5ea7")


def series(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Draw medians with their quartiles against `at`, on logarithmic axes."""
    xs = [row["at"] for row in rows]
    lows, highs = [row["quartiles"][0] for row in rows], [row["quartiles"][1] for row in rows]
    x_of = _axis(min(xs), max(xs), _LEFT, _WIDE - _RIGHT)
    y_of = _axis(min(lows) / 1.3, max(highs) * 1.3, _HIGH - _BOTTOM, _TOP)
    points = [(x_of(row["at"]), y_of(row["median"])) for row in rows]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" role="img">',
        f'<text x="4" y="14" class="t">{escape(name)}, {escape(rows[0]["unit"])}</text>',
        f'<path d="M{_LEFT} {_TOP}V{_HIGH - _BOTTOM}H{_WIDE - _RIGHT}" class="axis"/>',
        f'<polyline points="{line}" fill="none" stroke="{_COLOURS[0]}" stroke-width="1.6"/>',
    ]
    for row, (x, y) in zip(rows, points, strict=True):
        first, third = row["quartiles"]
        parts.append(f'<path d="M{x:.1f} {y_of(first):.1f}V{y_of(third):.1f}" stroke="{_COLOURS[0]}"/>')
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[0]}">'
            f"<title>{row['at']:,g}: {row['median']:,g} {escape(row['unit'])}</title></circle>"
        )
    shown = sorted({min(xs), max(xs), *(xs if len(xs) < 6 else xs[:: len(xs) // 4])})
    parts += [
        f'<text x="{x_of(x):.1f}" y="{_HIGH - _BOTTOM + 14}" text-anchor="middle">{_short(x)}</text>' for x in shown
    ]
    values = sorted({min(row["median"] for row in rows), max(row["median"] for row in rows)})
    parts += [
        f'<text x="{_LEFT - 5}" y="{y_of(value) + 4:.1f}" text-anchor="end">{_short(value)}</text>' for value in values
    ]
    return "".join([*parts, "</svg>"])


def strip(row: dict[str, Any]) -> str:
    """Draw the rounds of a row as dots on a line, and its goal as a bar."""
    goals = [float(word.replace(",", "")) for word in str(row.get("goal", "")).split() if word[0].isdigit()]
    rounds = row["rounds"]
    most = max([*rounds, *goals]) * 1.08 or 1.0
    width, middle = 150, 9
    colour = {True: "#588157", False: "#c8553d"}.get(row.get("met"), _COLOURS[0])  # type: ignore[arg-type]
    dots = "".join(
        f'<circle cx="{4 + (width - 8) * value / most:.1f}" cy="{middle}" r="2.6" fill="{colour}" fill-opacity=".55"/>'
        for value in rounds
    )
    bars = "".join(f'<path d="M{4 + (width - 8) * goal / most:.1f} 1V17" class="goal"/>' for goal in goals)
    return (
        f'<svg class="strip" width="{width}" height="18"><path d="M4 {middle}H{width - 4}" class="axis"/>'
        f"{bars}{dots}</svg>"
    )


def _axis(low: float, high: float, start: float, end: float) -> Any:
    """A logarithmic axis from `start` to `end`."""
    if low <= 0 or high <= low:
        return lambda value: (start + end) / 2
    span = math.log(high / low)
    return lambda value: start + (end - start) * math.log(max(value, low) / low) / span


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
