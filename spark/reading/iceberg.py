"""Iceberg tables as sinks, read by PyIceberg: Iceberg has no runtime for the Spark of the job.

The driver reads the files one after the other, in parts that are bounded, and hands each part to Spark.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from service.contract import SinkRule
from service.contract.sink_rules import ICEBERG
from spark.engine.jvm import Py4JError
from spark.errors import CannotRun, Unreadable
from spark.reading.intervals import Interval

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.table import DataScan, Table
    from pyiceberg.types import NestedField

PART_ROWS: Final = 200_000
"""How many rows go to Spark at a time. Of a data file the needed columns and rows are read at once."""

_NO_EQUALITY_DELETES: Final = (
    "the table has rows that equality deletes remove: compact it, and let its writer use position deletes, or rewrite "
    "files"
)

_SECRET: Final = (
    *("password", "passwd", "pwd", "secret", "token", "credential", "key"),
    *("authorization", "cookie", "connection-string", "signature"),
)
"""What the names of properties with secrets have: `header.Authorization`, `adls.connection-string`, …"""


def check_installed(rule: SinkRule) -> None:
    """Check that PyIceberg is there if a sink needs it; CannotRun otherwise."""
    missing = [name for name in ("pyiceberg", "pyarrow") if find_spec(name) is None]
    if rule.format == ICEBERG and missing:
        raise CannotRun(
            f"the sink {rule.name!r} needs {' and '.join(missing)}: install fencepost with its extra iceberg, as in "
            "pip install '.[spark,iceberg]'"
        )


def catalog_properties(rule: SinkRule) -> dict[str, str]:
    """Read the properties of a catalog, and its `name`, from its TOML file; none without a file.

    A property is written with its name in quotes, or as a table: `s3.region = "eu-central-1"`. Raises ValueError
    without any value of the file in the message, as the file has secrets.
    """
    if not rule.catalog_file:
        return {}
    try:
        parsed = tomllib.loads(Path(rule.catalog_file).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ValueError(
            f"{rule.catalog_file} is no TOML: write a property of PyIceberg's catalog in each line"
        ) from None
    return dict(_flat(parsed))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables with their names joined by dots."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield f"{prefix}{name}", str(value).lower()
        elif isinstance(value, str | int | float):
            yield f"{prefix}{name}", str(value)
        else:
            raise ValueError(f"the property {prefix}{name} of the catalog is no text, number, true or false")


def secrets_of(properties: Mapping[str, str]) -> list[str]:
    """Return what no message may have of a catalog's properties, the longest first.

    Of a header (`Bearer …`) and of a connection string (`AccountName=…;AccountKey=…`) the parts are secrets, too.
    """
    found = {value for name, value in properties.items() if _is_secret(name)}
    found |= {part for value in found for part in _parts(value)}
    for value in properties.values():
        if "://" in value and (password := _password_in(value)):
            found |= {password, unquote(password)}
    return sorted(found - {""}, key=len, reverse=True)


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in _SECRET)


def _parts(value: str) -> Iterator[str]:
    """Yield the parts of a property that are secrets by themselves."""
    scheme, _, credentials = value.partition(" ")
    if scheme.lower() in ("bearer", "basic"):
        yield credentials
    for part in value.split(";"):
        name, _, text = part.partition("=")
        if _is_secret(name):
            yield text


def _password_in(url: str) -> str | None:
    try:
        return urlsplit(url).password
    except ValueError:
        return None


def columns_of(rule: SinkRule, names: Sequence[str]) -> list[str]:
    """Return the columns of a table that a rule may need: its times, and each whose name is in an expression.

    A column that merely has its name in a longer word is read in vain.
    """
    times = {name.lower() for name in (rule.event_time, rule.arrived) if name}
    text = " ".join(rule.expressions).lower()
    return [name for name in names if name.lower() in times or name.lower() in text]


class IcebergTable:
    """A table of a catalog, or of a metadata file, at the snapshot that it has when a run reads it first.

    A run that reads a sink twice must not compare two states of the table.
    """

    def __init__(self, spark: SparkSession, rule: SinkRule) -> None:
        self.spark, self.rule = spark, rule
        with _made_unreadable():
            self._table = _load(rule)
            snapshot = self._table.current_snapshot()
        self._snapshot_id = None if snapshot is None else snapshot.snapshot_id

    def parts(self, intervals: Sequence[Interval]) -> Iterator[DataFrame]:
        """Return the rows whose time lies in these intervals (merged), in parts of about PART_ROWS rows."""
        import pyarrow as pa
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        with _made_unreadable():
            fields = self._table.schema().fields
            time = _time_field(self.rule, fields)
            names = columns_of(self.rule, [field.name for field in fields])
            scan = self._table.scan(_between(time, intervals), tuple(names), snapshot_id=self._snapshot_id)
            schema = _plain(schema_to_pyarrow(scan.projection(), include_field_ids=False))
            part = [schema.empty_table()]
            for batch in _batches(self._table, scan):
                part.append(pa.Table.from_batches([batch]).cast(schema))
                if sum(map(len, part)) >= PART_ROWS:
                    yield self._frame(pa.concat_tables(part))
                    part = [schema.empty_table()]
            yield self._frame(pa.concat_tables(part))

    def _frame(self, rows: "pa.Table") -> DataFrame:
        return self.spark.createDataFrame(rows).coalesce(self.spark.sparkContext.defaultParallelism)


@contextmanager
def _made_unreadable() -> Iterator[None]:
    """Make what PyIceberg, Arrow, a catalog or a store raises Unreadable: they have no error in common. Spark's own
    errors stay as they are."""
    try:
        yield
    except (Unreadable, PySparkException, Py4JError):
        raise
    except Exception as error:
        message = str(error) or type(error).__name__
        raise Unreadable(f"{_NO_EQUALITY_DELETES}: {message}" if "equality deletes" in message else message) from error


def _load(rule: SinkRule) -> "Table":
    from pyiceberg.catalog import load_catalog
    from pyiceberg.table import StaticTable

    properties = catalog_properties(rule)
    if rule.path:
        return StaticTable.from_metadata(rule.path, properties)
    # A catalog in a database has only the tables that were made under its name.
    return load_catalog(properties.pop("name", "default"), **properties).load_table(rule.table)


def _batches(table: "Table", scan: "DataScan") -> Iterator["pa.RecordBatch"]:
    """Read the rows of a scan, one data file after the other: PyIceberg reads the files of one call at a time."""
    from pyiceberg.io.pyarrow import ArrowScan

    reader = ArrowScan(table.metadata, table.io, scan.projection(), scan.row_filter)
    for task in scan.plan_files():
        yield from reader.to_record_batches([task])


def _time_field(rule: SinkRule, fields: Iterable["NestedField"]) -> "NestedField":
    """Return the column for the time of a row. Raises Unreadable if it is missing or no time."""
    from pyiceberg.types import IntegerType, LongType, TimestampType, TimestamptzType

    for field in fields:
        if field.name.lower() == rule.event_time.lower():
            if isinstance(field.field_type, TimestampType | TimestamptzType | LongType | IntegerType):
                return field
            raise Unreadable(
                f"the column {rule.event_time} is a {field.field_type}: name a timestamp, or a number of ms since the "
                "epoch"
            )
    raise Unreadable(f"the table has no column {rule.event_time}: it has {', '.join(field.name for field in fields)}")


def _between(time: "NestedField", intervals: Sequence[Interval]) -> "BooleanExpression":
    """Return the filter on the rows whose time lies in one of these intervals."""
    from pyiceberg.expressions import AlwaysFalse, And, GreaterThanOrEqual, LessThan, Or, Reference
    from pyiceberg.expressions.literals import literal
    from pyiceberg.types import TimestampType, TimestamptzType

    def value(ms: int) -> int | str:
        if not isinstance(time.field_type, TimestampType | TimestamptzType):
            return ms
        at = datetime.fromtimestamp(ms / 1000, UTC)
        with_zone = isinstance(time.field_type, TimestamptzType)
        return (at if with_zone else at.replace(tzinfo=None)).isoformat(timespec="milliseconds")

    column = Reference(time.name)
    spans = [
        And(
            GreaterThanOrEqual(term=column, value=literal(value(first))),
            LessThan(term=column, value=literal(value(end))),
        )
        for first, end in intervals
    ]
    return Or(*spans) if len(spans) > 1 else spans[0] if spans else AlwaysFalse()


def _plain(schema: "pa.Schema") -> "pa.Schema":
    """Replace Arrow's extension types, as that of a UUID, by their storage, which Spark knows."""
    import pyarrow as pa

    return pa.schema([field.with_type(getattr(field.type, "storage_type", field.type)) for field in schema])
