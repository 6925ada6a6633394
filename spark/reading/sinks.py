"""Read the rows of a table that is a sink, in some spans of time, and convert them to rows of one form.

A sink is not ours: whatever is wrong with it is Unreadable, and ends no run.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Final

from pyspark.errors import ParseException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, DataType, IntegralType, StringType

from service.contract import SinkRule
from service.contract.wire.ids import ID_BYTES
from spark.engine import frames
from spark.engine.jvm import Py4JError, Py4JJavaError, is_deterministic, parse_expression, reason
from spark.errors import CannotRun, Unreadable
from spark.reading import iceberg
from spark.reading.intervals import Interval
from spark.reading.sink_tables import TABLES, SinkTable, password_of, time_type, type_of

ROW: Final = {
    "id": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "event_ms": "bigint",
    "arrived_ms": "bigint",
    "timestamp_ms": "bigint",
}
"""A row of a sink. Either `id` is null, or the coordinates are; all are null for a row that names no event.

`event_ms` is the time by which the row was read, `arrived_ms` null if the sink has no such column, or no value.
A row of a mirror is a record there: the coordinates and `timestamp_ms` (else null) are its own."""

REASON_CHARS: Final = 300

_UUID_DASHES: Final = r"^(.{8})-(.{4})-(.{4})-(.{4})-(.{12})$"


def check_rules(spark: SparkSession, rules: Iterable[SinkRule]) -> None:
    """Check that each expression of the sinks is Spark SQL, and that what their formats need is there; else CannotRun.

    The columns of an expression are checked by the SinkReader.
    """
    for rule in rules:
        iceberg.check_installed(rule)
        for expression in rule.expressions:
            try:
                parse_expression(spark, expression)
            except ParseException as error:
                raise CannotRun(
                    f"the sink {rule.name!r}: {expression!r} is no expression of Spark SQL: {_first_line(error)}"
                ) from error


class SinkReader:
    """Reads the rows of a sink in one run."""

    def __init__(self, spark: SparkSession, rule: SinkRule) -> None:
        self.spark, self.rule = spark, rule
        self._table: SinkTable | None = None

    def read(self, intervals: Sequence[Interval]) -> DataFrame:
        """Read the rows (ROW) of the sink whose time lies in these intervals (merged), and keep them on the executors.

        Raises Unreadable. A row without a time is never read.
        """
        secrets: Sequence[str] = ()
        try:
            secrets = _secrets(self.rule)
            if self._table is None:
                self._table = TABLES[self.rule.format](self.spark, self.rule)
            parts = [_rows(part, self.rule).localCheckpoint() for part in self._table.parts(intervals)]
            return reduce(DataFrame.unionByName, parts)
        except Py4JJavaError as error:
            raise Unreadable(shown(reason(error), secrets)) from None
        except Unreadable as error:
            raise Unreadable(shown(str(error), secrets)) from None
        except (PySparkException, Py4JError, OSError, ValueError) as error:
            raise Unreadable(shown(_first_line(error), secrets)) from None


def _secrets(rule: SinkRule) -> list[str]:
    """Read what no message may have of the files that a sink's rule names."""
    password = password_of(rule)
    return [*([password] if password else []), *iceberg.secrets_of(iceberg.catalog_properties(rule))]


def _ms(table: DataFrame, name: str) -> Column:
    """Convert a time of a sink to ms since the epoch. Raises Unreadable if the column is no time."""
    if isinstance(time_type(table, name), IntegralType):
        return F.col(name).cast("bigint")
    return F.unix_millis(F.col(name).cast("timestamp"))


def _rows(table: DataFrame, rule: SinkRule) -> DataFrame:
    """Convert the rows of a sink to ROW."""
    identity = [F.expr(expression) for expression in rule.expressions]
    if not is_deterministic(table.select(*identity)):
        raise Unreadable("the expression for the event gives another value each time: name the table's columns")
    columns = {"event_ms": _ms(table, rule.event_time)}
    if rule.arrived:
        columns["arrived_ms"] = _ms(table, rule.arrived)
    if rule.id:
        columns["id"] = _id(identity[0], type_of(table, identity[0]))
    else:
        columns |= dict(zip(("topic", "partition", "offset"), identity, strict=True))
    return frames.typed(table, ROW, columns)


def _id(value: Column, data_type: DataType) -> Column:
    """Convert an id to its 16 bytes: from bytes, 32 hexadecimal digits, or a UUID's text; null for anything else."""
    if isinstance(data_type, BinaryType):
        found = value
    elif isinstance(data_type, StringType):
        # A database pads a CHAR(n) with spaces.
        digits = F.regexp_replace(F.trim(value), _UUID_DASHES, "$1$2$3$4$5")
        found = F.when(F.length(digits) == 2 * ID_BYTES, F.unhex(digits))
    else:
        raise Unreadable(
            f"the id is a {data_type.simpleString()}: write an expression for its 16 bytes, 32 hexadecimal digits, or "
            "a UUID"
        )
    return F.when(F.octet_length(found) == ID_BYTES, found)


def _first_line(error: Exception) -> str:
    message = error.getMessage() if isinstance(error, PySparkException) else None
    return (message or str(error)).split("\n", 1)[0]


def shown(message: str, secrets: Sequence[str] = ()) -> str:
    """Shorten the message of an error to one line without secrets."""
    line = " ".join(message.split())
    for secret in secrets:
        line = line.replace(secret, "***")
    return line if len(line) <= REASON_CHARS else f"{line[: REASON_CHARS - 1]}…"
