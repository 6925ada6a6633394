"""The rows of a benchmark: figures, one for each round, each with its goal."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class NotRealWork(Exception):
    """A benchmark's check failed: the timed work was not the claimed work, so there is no number."""


@dataclass(frozen=True)
class Goal:
    """A bound, inclusive, on the median."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        return " and ".join(
            f"{sign} {bound:,g}" for sign, bound in (("≥", self.least), ("≤", self.most)) if bound is not None
        )


@dataclass(frozen=True)
class Row:
    """One figure: its value in each round. Rows of one `series` are the points of a plot, `at` their positions on x."""

    name: str
    unit: str
    values: Sequence[float]
    goal: Goal | None = None
    series: str = ""
    at: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the rounds."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.goal.met(self.median)

    def as_json(self) -> dict[str, Any]:
        first, third = self.quartiles
        return {
            "name": self.name,
            "unit": self.unit,
            "median": _round(self.median),
            "quartiles": [_round(first), _round(third)],
            "rounds": [_round(value) for value in self.values],
            **({} if self.goal is None else {"goal": str(self.goal), "met": self.met}),
            **({"series": self.series, "at": self.at} if self.series else {}),
        }


def _round(value: float) -> float:
    """Round to four digits, which is more than any figure is exact to."""
    return float(f"{value:.4g}")


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide round by round, so that a change of the machine's speed affects both sides."""
    return [one / other for one, other in zip(over, under, strict=True)]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def growth(name: str, unit: str, costs: Mapping[int, Sequence[float]], series: str) -> list[Row]:
    """Make rows of a cost by the amount of work, and the largest factor of the cost for a doubling of the work."""
    points = [Row(f"{name} at {at:,g}", unit, values, series=series, at=at) for at, values in costs.items()]
    worst = [
        max((later / earlier) ** (1 / _doublings(a, b)) for (a, earlier), (b, later) in itertools.pairwise(round_))
        for round_ in (list(zip(costs, values, strict=True)) for values in zip(*costs.values(), strict=True))
    ]
    return [*points, Row(f"{name}: a doubling multiplies it by, at worst", "x", worst, Goal(most=2.0))]


def _doublings(a: float, b: float) -> float:
    return math.log2(b / a)
