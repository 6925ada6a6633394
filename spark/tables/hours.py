"""Hours of acceptance, the partitions of the lake, as text (`yyyy-MM-dd HH:mm:ss`, UTC), which sorts by time."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

FORMAT: Final = "yyyy-MM-dd HH:mm:ss"
"""Spark's date pattern of an hour."""


def text_of(ms: int) -> str:
    """Return the hour of a time (ms)."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:00:00")


def as_text(hour: Column) -> Column:
    """Format an hour as text: `collect` would return a timestamp in the machine's own time zone."""
    return F.date_format(hour, FORMAT)


def of(rows: DataFrame) -> list[str]:
    """Collect the distinct hours of rows, sorted."""
    found = rows.select(as_text(F.col("accepted_hour")).alias("hour")).distinct().collect()
    return sorted(row["hour"] for row in found)


def sql(hours: Iterable[str], row: str = "") -> str:
    """Return the SQL condition that a row is in one of these hours, with literals, by which Delta prunes its files.

    `row` is the prefix of the row's alias.
    """
    literals = ", ".join(f"TIMESTAMP '{hour}'" for hour in sorted(hours))
    return f"{row}accepted_hour IN ({literals})" if literals else "false"


def within(hours: Iterable[str]) -> Column:
    """Return the condition of `sql` as a column."""
    return F.expr(sql(hours))


def since(first: str) -> str:
    """Return the SQL condition that a row is in this hour or a later one."""
    return f"accepted_hour >= TIMESTAMP '{first}'"
