"""Hours of acceptance, by which the lake is cut: as text (`yyyy-MM-dd HH:mm:ss`, UTC), which sorts as they do."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

FORMAT: Final = "yyyy-MM-dd HH:mm:ss"
"""Spark's pattern of an hour as text."""


def text_of(ms: int) -> str:
    """The hour in which a time (ms) lies."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:00:00")


def as_text(hour: Column) -> Column:
    """An hour as text: a timestamp that is collected would be in the machine's own zone."""
    return F.date_format(hour, FORMAT)


def of(rows: DataFrame) -> list[str]:
    """The distinct hours of rows, sorted."""
    found = rows.select(as_text(F.col("accepted_hour")).alias("hour")).distinct().collect()
    return sorted(row["hour"] for row in found)


def sql(hours: Iterable[str]) -> str:
    """The condition that a row lies in one of these hours, with literals: Delta reads no other for it."""
    literals = ", ".join(f"TIMESTAMP '{hour}'" for hour in sorted(hours))
    return f"accepted_hour IN ({literals})" if literals else "false"


def within(hours: Iterable[str]) -> Column:
    """`sql` as a column."""
    return F.expr(sql(hours))


def since(first: str) -> str:
    """The condition that a row lies in this hour or a later one."""
    return f"accepted_hour >= TIMESTAMP '{first}'"
