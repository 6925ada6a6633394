"""The formats of sinks: where each finds the rows of some spans of time, with the columns that the sink has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType, IntegralType, TimestampNTZType, TimestampType

from service.contract import SinkRule
from service.contract.sink_rules import DELTA, ICEBERG, JDBC, PARQUET
from spark.engine.frames import any_of
from spark.engine.jvm import jvm
from spark.errors import Unreadable
from spark.reading.iceberg import IcebergTable
from spark.reading.intervals import Interval, pieces

CONNECTIONS: Final = 4
"""How many connections to a database a run has at most at a time."""
QUERY_TIMEOUT_S: Final = 600
CONNECT_TIMEOUT_S: Final = 10
# A driver without it reads the whole result into memory (PostgreSQL), or a few rows in each round trip.
FETCH_ROWS: Final = 10_000


class SinkTable(Protocol):
    """The table of a sink, for one run. What it raises is made Unreadable by the SinkReader."""

    def parts(self, intervals: Sequence[Interval]) -> Iterator[DataFrame]:
        """Return the rows whose time lies in these intervals (merged), in one or more parts of one schema."""


class _Files:
    """A Delta table, or Parquet files; the format skips files and row groups by the statistics of the time."""

    def __init__(self, spark: SparkSession, rule: SinkRule) -> None:
        self.spark, self.rule = spark, rule

    def parts(self, intervals: Sequence[Interval]) -> Iterator[DataFrame]:
        table = self.spark.read.format(self.rule.format).load(self.rule.path)
        column, found = F.col(self.rule.event_time), time_type(table, self.rule.event_time)

        def literal(ms: int) -> Column:
            return F.expr(_literal(ms, found, standard=False))

        yield table.where(any_of([(column >= literal(first)) & (column < literal(end)) for first, end in intervals]))


class _Database:
    """A table by JDBC: each of at most CONNECTIONS queries has its own intervals in its condition.

    The conditions are in standard SQL; the database finds the rows by an index on the column. Spark would push down a
    filter on a time with zone as a literal without zone.
    """

    def __init__(self, spark: SparkSession, rule: SinkRule) -> None:
        self.spark, self.rule = spark, rule

    def parts(self, intervals: Sequence[Interval]) -> Iterator[DataFrame]:
        rule, password = self.rule, password_of(self.rule)
        options = {
            "fetchsize": str(FETCH_ROWS),
            "queryTimeout": str(QUERY_TIMEOUT_S),
            "preferTimestampNTZ": "true",
            **({"user": rule.user} if rule.user else {}),
            **({"password": password} if password else {}),
            **_driver_options(rule.url),
        }
        table = self.spark.read.options(**options).format("jdbc").options(url=rule.url, dbtable=rule.table).load()
        found = time_type(table, rule.event_time)
        dialect = jvm(self.spark).org.apache.spark.sql.jdbc.JdbcDialects.get(rule.url)
        column = dialect.quoteIdentifier(rule.event_time)
        conditions = [
            f"({column} >= {_literal(first, found, standard=True)} "
            f"AND {column} < {_literal(end, found, standard=True)})"
            for first, end in pieces(intervals, CONNECTIONS)
        ]
        shares = [conditions[nth::CONNECTIONS] for nth in range(min(CONNECTIONS, len(conditions)))]
        predicates = [" OR ".join(share) for share in shares]
        yield self.spark.read.options(**options).jdbc(rule.url, rule.table, predicates=predicates)


def password_of(rule: SinkRule) -> str:
    """Read the password of a database, without the line break at the file's end; "" without a file."""
    return Path(rule.password_file).read_text(encoding="utf-8").rstrip("\r\n") if rule.password_file else ""


def _driver_options(url: str) -> dict[str, str]:
    """Return class and timeouts (s) of the driver of PostgreSQL; another one is found by its URL."""
    if not url.startswith("jdbc:postgresql:"):
        return {}
    return {
        "driver": "org.postgresql.Driver",
        "connectTimeout": str(CONNECT_TIMEOUT_S),
        "loginTimeout": str(CONNECT_TIMEOUT_S),
        "socketTimeout": str(QUERY_TIMEOUT_S + CONNECT_TIMEOUT_S),
        "ApplicationName": "fencepost-audit",
    }


def type_of(table: DataFrame, column: Column) -> DataType:
    return table.select(column).schema[0].dataType


def time_type(table: DataFrame, name: str) -> DataType:
    """Return the type of a column for a time. Raises Unreadable if the column is no time."""
    found = type_of(table, F.col(name))
    if not isinstance(found, TimestampType | TimestampNTZType | IntegralType):
        raise Unreadable(
            f"the column {name} is a {found.simpleString()}: name a timestamp, or a number of ms since the epoch"
        )
    return found


def _literal(ms: int, time_type: DataType, *, standard: bool) -> str:
    """Write a time as a literal of standard SQL, or else of Spark; a time without zone is in UTC.

    PostgreSQL ignores a zone in a literal of type TIMESTAMP. Spark has names of its own for the two types.
    """
    if isinstance(time_type, IntegralType):
        return str(ms)
    text = f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    if isinstance(time_type, TimestampNTZType):
        return f"TIMESTAMP '{text}'" if standard else f"TIMESTAMP_NTZ '{text}'"
    return f"TIMESTAMP WITH TIME ZONE '{text}+00:00'" if standard else f"TIMESTAMP_LTZ '{text}+00:00'"


TABLES: Final[Mapping[str, Callable[[SparkSession, SinkRule], SinkTable]]] = {
    DELTA: _Files,
    PARQUET: _Files,
    JDBC: _Database,
    ICEBERG: IcebergTable,
}
"""How the rows of each format (SINK_FORMATS) are read."""
