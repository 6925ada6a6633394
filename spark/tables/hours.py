"""Hours of acceptance, the partitions of the lake, as text (`yyyy-MM-dd HH:mm:ss`, UTC), which sorts by time."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

# The same format for Spark and for Python.
_SPARK_FORMAT: Final = "yyyy-MM-dd HH:mm:ss"
_PYTHON_FORMAT: Final = "%Y-%m-%d %H:%M:%S"


def text_of(ms: int) -> str:
    """Return the hour of a time (ms)."""
    return text_at(datetime.fromtimestamp(ms / 1000, UTC).replace(minute=0, second=0, microsecond=0))


def text_at(hour: datetime) -> str:
    """Return an hour as text. Spark collects a timestamp without time zone, in the machine's own."""
    return hour.astimezone(UTC).strftime(_PYTHON_FORMAT)


def at(text: str) -> datetime:
    """Return the hour that a text names."""
    return datetime.strptime(text, _PYTHON_FORMAT).replace(tzinfo=UTC)


def ms_of(text: str) -> int:
    """Return the time (ms) at which the hour begins that a text names."""
    return int(at(text).timestamp() * 1000)


def as_text(hour: Column) -> Column:
    """Format an hour as text: `collect` would return a timestamp in the machine's own time zone."""
    return F.date_format(hour, _SPARK_FORMAT)


def of_text(text: Column) -> Column:
    """Parse hours."""
    return F.to_timestamp(text, _SPARK_FORMAT)


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
