"""Draws a flame graph as one SVG from py-spy's raw stacks. Names and shares show on hover; there is no script in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape

Stack = tuple[str, ...]

_WIDE, _ROW = 1200, 16
_LEAST_SHARE = 0.001  # narrower than about a pixel


@dataclass
class _Node:
    samples: int = 0
    below: dict[str, "_Node"] = field(default_factory=dict)


def render(stacks: Mapping[Stack, int], title: str, colour: Callable[[Stack], str]) -> str:
    """Draw the graph, roots at the bottom; `colour` gets each frame as the stack that ends with it."""
    root = _Node()
    for stack, samples in stacks.items():
        node = root
        node.samples += samples
        for frame in stack:
            node = node.below.setdefault(frame, _Node())
            node.samples += samples
    rows: list[str] = []
    total = max(1, root.samples)
    depths = [0]

    def draw(node: _Node, stack: Stack, start: float) -> None:
        for frame, below in sorted(node.below.items()):
            share = below.samples / total
            if share >= _LEAST_SHARE:
                depths.append(len(stack) + 1)
                rows.append(_frame(frame, (*stack, frame), start, share, colour))
                draw(below, (*stack, frame), start)
            start += share

    draw(root, (), 0.0)
    high = (max(depths) + 2) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-high} {_WIDE} {high}" width="{_WIDE}" height="{high}" '
        f'font-family="ui-monospace,monospace" font-size="10">'
        f'<rect y="{-high}" width="{_WIDE}" height="{high}" fill="#fff"/>'
        f'<text x="6" y="{-high + 13}" font-size="12">{escape(title)}</text>{"".join(rows)}</svg>\n'
    )


def _frame(name: str, stack: Stack, start: float, share: float, colour: Callable[[Stack], str]) -> str:
    x, width, y = start * _WIDE, share * _WIDE, -len(stack) * _ROW
    letters = int(width / 6.2)
    text = f'<text x="{x + 2:.1f}" y="{y + 11}">{escape(name[:letters])}</text>' if letters > 3 else ""
    return (
        f'<g><title>{escape(name)}: {share:.1%}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{_ROW - 1}" fill="{colour(stack)}" stroke="#fff" stroke-width=".4"/>{text}</g>'
    )
