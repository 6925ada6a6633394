"""Read the rows of a sink that lie in some spans of time: a Delta table, Parquet files, or a table of a database.

A sink is not ours: whatever is wrong with it is Unreadable, and ends no run.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pyspark.errors import ParseException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, DataType, IntegralType, StringType, TimestampNTZType, TimestampType

from service.contract import SinkRule, wire
from service.contract.sink_rules import JDBC
from spark.errors import CannotRun
from spark.reading.jvm import Py4JError, Py4JJavaError, is_deterministic, jvm, parse_expression, reason

ROW: Final = "id binary, topic string, partition int, offset bigint, event_ms bigint, arrived_ms bigint"
"""A row of a sink. Either `id` is null, or the coordinates are; all are null for a row that names no event.

`event_ms` is the time by which the row was read, `arrived_ms` null if the sink has no such column, or no value."""

Interval = tuple[int, int]
"""A span of time in ms since the epoch; the end is exclusive."""

CONNECTIONS: Final = 4
"""How many connections to a database a run has at most at a time."""
QUERY_TIMEOUT_S: Final = 600
CONNECT_TIMEOUT_S: Final = 10
# A driver without it reads the whole result into memory (PostgreSQL), or a few rows in each round trip.
FETCH_ROWS: Final = 10_000
REASON_CHARS: Final = 300

_UUID_DASHES: Final = r"^(.{8})-(.{4})-(.{4})-(.{4})-(.{12})$"


class Unreadable(Exception):
    """A sink cannot be read, or not as its rule says; the message is one line without secrets."""


def check_expressions(spark: SparkSession, rules: Iterable[SinkRule]) -> None:
    """Check that each expression of the sinks is Spark SQL; CannotRun otherwise. Its columns are checked by `read`."""
    for rule in rules:
        for expression in rule.expressions:
            try:
                parse_expression(spark, expression)
            except ParseException as error:
                raise CannotRun(
                    f"the sink {rule.name!r}: {expression!r} is no expression of Spark SQL: {_first_line(error)}"
                ) from error


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Unite intervals that overlap or touch: a row is read once."""
    found: list[Interval] = []
    for first, end in sorted(intervals):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def without(intervals: Iterable[Interval], read: Sequence[Interval]) -> list[Interval]:
    """Subtract the intervals that were `read` (merged) from others."""
    left = merged(intervals)
    for first, end in read:
        pieces = [((start, min(stop, first)), (max(start, end), stop)) for start, stop in left]
        left = [piece for pair in pieces for piece in pair if piece[0] < piece[1]]
    return left


def read(spark: SparkSession, rule: SinkRule, intervals: Sequence[Interval]) -> DataFrame:
    """Read the rows (ROW) of a sink whose time lies in these intervals (merged), and keep them on the executors.

    Raises Unreadable. A row without a time is never read.
    """
    secret = ""
    try:
        secret = _password(rule)
        table = (
            _of_database(spark, rule, intervals, secret) if rule.format == JDBC else _of_files(spark, rule, intervals)
        )
        return _rows(table, rule).localCheckpoint()
    except Py4JJavaError as error:
        raise Unreadable(_shown(reason(error), secret)) from None
    except (PySparkException, Py4JError, OSError, ValueError) as error:
        raise Unreadable(_shown(_first_line(error), secret)) from None


def _password(rule: SinkRule) -> str:
    """Read the password of a database, without the line break at the file's end; "" without a file."""
    return Path(rule.password_file).read_text(encoding="utf-8").rstrip("\r\n") if rule.password_file else ""


def _of_files(spark: SparkSession, rule: SinkRule, intervals: Sequence[Interval]) -> DataFrame:
    """Read a Delta table or Parquet files; the format skips files and row groups by the statistics of the time."""
    table = spark.read.format(rule.format).load(rule.path)
    time_type = _time_type(table, rule.event_time)
    inside = F.lit(False)
    for first, end in intervals:
        after, before = (F.expr(_literal(ms, time_type, standard=False)) for ms in (first, end))
        inside = inside | ((F.col(rule.event_time) >= after) & (F.col(rule.event_time) < before))
    return table.where(inside)


def _of_database(spark: SparkSession, rule: SinkRule, intervals: Sequence[Interval], password: str) -> DataFrame:
    """Read a table by JDBC: each of at most CONNECTIONS queries has its own intervals in its condition.

    The conditions are in standard SQL; the database finds the rows by an index on the column. Spark would push down a
    filter on a time with zone as a literal without zone.
    """
    options = {
        "fetchsize": str(FETCH_ROWS),
        "queryTimeout": str(QUERY_TIMEOUT_S),
        "preferTimestampNTZ": "true",
        **({"user": rule.user} if rule.user else {}),
        **({"password": password} if password else {}),
        **_driver_options(rule.url),
    }
    reader = spark.read.options(**options)
    table = reader.format("jdbc").options(url=rule.url, dbtable=rule.table).load()
    time_type = _time_type(table, rule.event_time)
    column = jvm(spark).org.apache.spark.sql.jdbc.JdbcDialects.get(rule.url).quoteIdentifier(rule.event_time)
    conditions = [
        f"({column} >= {_literal(first, time_type, standard=True)} AND "
        f"{column} < {_literal(end, time_type, standard=True)})"
        for first, end in _pieces(intervals, CONNECTIONS)
    ]
    shares = [conditions[nth::CONNECTIONS] for nth in range(min(CONNECTIONS, len(conditions)))]
    return spark.read.options(**options).jdbc(rule.url, rule.table, predicates=[" OR ".join(share) for share in shares])


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


def _pieces(intervals: Sequence[Interval], least: int) -> list[Interval]:
    """Cut intervals so that there are at least `least` pieces of about the same length, if they are that long."""
    total = sum(end - first for first, end in intervals)
    length = max(-(-total // least), 1)
    return [(start, min(start + length, end)) for first, end in intervals for start in range(first, end, length)]


def _type_of(table: DataFrame, column: Column) -> DataType:
    return table.select(column).schema[0].dataType


def _time_type(table: DataFrame, name: str) -> DataType:
    """Return the type of a column for a time. Raises Unreadable if the column is no time."""
    found = _type_of(table, F.col(name))
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


def _ms(table: DataFrame, name: str) -> Column:
    """Convert a time of a sink to ms since the epoch. Raises Unreadable if the column is no time."""
    if isinstance(_time_type(table, name), IntegralType):
        return F.col(name).cast("bigint")
    return F.unix_millis(F.col(name).cast("timestamp"))


def _rows(table: DataFrame, rule: SinkRule) -> DataFrame:
    """Convert the rows of a sink to ROW."""
    identity = [F.expr(expression) for expression in rule.expressions]
    if not is_deterministic(table.select(*identity)):
        raise Unreadable("the expression for the event gives another value each time: name the table's columns")
    columns: dict[str, Any] = {"event_ms": _ms(table, rule.event_time)}
    if rule.arrived:
        columns["arrived_ms"] = _ms(table, rule.arrived)
    if rule.id:
        columns["id"] = _id(identity[0], _type_of(table, identity[0]))
    else:
        columns |= dict(zip(("topic", "partition", "offset"), identity, strict=True))
    types = (field.split(" ") for field in ROW.split(", "))
    return table.select(*(columns.get(name, F.lit(None)).cast(data_type).alias(name) for name, data_type in types))


def _id(value: Column, data_type: DataType) -> Column:
    """Convert an id to its 16 bytes: from bytes, 32 hexadecimal digits, or a UUID's text; null for anything else."""
    if isinstance(data_type, BinaryType):
        found = value
    elif isinstance(data_type, StringType):
        digits = F.regexp_replace(value, _UUID_DASHES, "$1$2$3$4$5")
        found = F.when(F.length(digits) == 2 * wire.ID_BYTES, F.unhex(digits))
    else:
        raise Unreadable(
            f"the id is a {data_type.simpleString()}: write an expression for its 16 bytes, 32 hexadecimal digits, or "
            "a UUID"
        )
    return F.when(F.octet_length(found) == wire.ID_BYTES, found)


def _first_line(error: Exception) -> str:
    message = error.getMessage() if isinstance(error, PySparkException) else None
    return (message or str(error)).split("\n", 1)[0]


def _shown(message: str, secret: str) -> str:
    """Shorten the message of an error to one line without the password."""
    line = " ".join(message.split())
    if secret:
        line = line.replace(secret, "***")
    return line if len(line) <= REASON_CHARS else f"{line[: REASON_CHARS - 1]}…"
