"""The `[[sinks]]` tables of the rules: what is filled from topics, and what the audit compares with them.

A sink is a table that a consumer fills, or a mirror: the same topics in another cluster of Kafka.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from service.contract import mirror_rules
from service.contract.faults import Faults, Table, name_faults, unknown_faults
from service.contract.settings import SharedSettings

DELTA: Final = "delta"
PARQUET: Final = "parquet"
JDBC: Final = "jdbc"
ICEBERG: Final = "iceberg"
KAFKA: Final = "kafka"

MARGIN_S: Final = 3600  # a retry within the hour keeps the time of acceptance of the first attempt
LATE_MOST_S: Final = 30 * 86_400
MARGIN_MOST_S: Final = 7 * 86_400

_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Drivers take a secret in the URL, as a parameter (sslpassword, trustStorePassword, accessToken) or before the host.
_PASSWORD: Final = re.compile(
    r"[?&;:,/(]\s*[\w.]*(?:password|passwd|pwd|token|secret)\s*=|//[^/@]*:[^/@]*@|:[^:/@]+/[^/@]+@", re.IGNORECASE
)


_ADDED: Final = ("catalog_file", "mirror_topic")
"""Settings that rules of earlier versions did not have: without them a rule has the same definition as before."""


@dataclass(frozen=True, slots=True)
class SinkRule:
    """One `[[sinks]]` table: a table, or a mirror, that must have each event of its topics once.

    `topics` are globs. `path` is the folder or URL of a Delta table or of Parquet files; `url` and `table` are those of
    a database, whose `user` has the password in `password_file`. An Iceberg table is `table` of the catalog with the
    properties in `catalog_file`, or `path` of its metadata. `id` is an expression of Spark SQL for the id of an
    event; `coordinates` are three of them, for topic, partition and offset, in its place. `event_time` is a column with
    the time of the event's acceptance, or of its record, which may differ from the acceptance by `margin_s`; `arrived`
    one with the time when the row arrived, empty if the table has none. An event may arrive `late_s` after it became
    visible. `exclusive`: the table has events of Fencepost only. Events that were accepted before `since_ms` (ms since
    the epoch) are not expected.

    A mirror has no columns: its records have Fencepost's header. `mirror_topic` is the name of a topic's copy, with
    mirror_rules.TOPIC_FIELD for the topic (empty: the same name); `connection` are the variables of SharedSettings for
    its cluster.
    """

    name: str
    topics: tuple[str, ...]
    format: str
    event_time: str
    late_s: int
    path: str = ""
    url: str = ""
    table: str = ""
    user: str = ""
    password_file: str = ""
    id: str = ""
    coordinates: tuple[str, ...] = ()
    arrived: str = ""
    margin_s: int = MARGIN_S
    exclusive: bool = False
    since_ms: int = 0
    catalog_file: str = ""
    mirror_topic: str = ""
    connection: tuple[tuple[str, str], ...] = ()

    def expects(self, topic: str) -> bool:
        """Check whether the events of a topic belong into the sink."""
        return any(fnmatchcase(topic, glob) for glob in self.topics)

    @property
    def is_mirror(self) -> bool:
        """Whether the sink is Kafka topics, and no table."""
        return self.format == KAFKA

    @property
    def has_ids(self) -> bool:
        """Whether the sink's rows name an event by its id, and not by its coordinates."""
        return self.is_mirror or bool(self.id)

    def copy_of(self, topic: str) -> str:
        """Return the name of a topic's copy in a mirror."""
        return mirror_rules.copy_of(self.mirror_topic or mirror_rules.TOPIC_FIELD, topic)

    def kafka_settings(self) -> SharedSettings:
        """Read the settings of a mirror's cluster, with its secrets. Raises SettingsError."""
        return mirror_rules.settings_of(self.connection)

    @property
    def expressions(self) -> tuple[str, ...]:
        """The expressions of Spark SQL that identify an event: one for its id, or three for its coordinates."""
        return (self.id,) if self.id else self.coordinates

    @property
    def definition(self) -> str:
        """A digest of the fields on which verdicts depend: if it changes, every hour is compared again."""
        left_out = ("user", "password_file", "connection", *_ADDED)
        values = [getattr(self, name) for name in SinkRule.__slots__ if name not in left_out]
        values += [(name, getattr(self, name)) for name in _ADDED if getattr(self, name)]
        return sha256(repr(values).encode()).hexdigest()[:32]


def sink_rule(table: Table, folder: Path) -> SinkRule:
    """Make the rule of a table without faults; its files are relative to the folder of the rules."""
    connection = mirror_rules.connection_of(table, folder)
    values: dict[str, Any] = {name: value for name, value in table.items() if name not in mirror_rules.OF_CONNECTION}
    values.setdefault("event_time", "")
    values["topics"] = tuple(table["topics"])
    values["coordinates"] = tuple(table.get("coordinates", ()))
    for name in _FILES:
        if name in table:
            values[name] = str(folder / table[name])
    since = values.pop("since", None)
    return SinkRule(**values, since_ms=0 if since is None else int(since.timestamp() * 1000), connection=connection)


_FILES: Final = ("password_file", "catalog_file")

# ----------------------------------------------------------------------------------------------------- mistakes

_OF_EACH: Final = (
    "name",
    "topics",
    "format",
    "id",
    "coordinates",
    "event_time",
    "arrived",
    "late_s",
    "margin_s",
    "exclusive",
    "since",
)
_OF_TABLES: Final = ("id", "coordinates", "event_time", "arrived")
"""The settings of _OF_EACH that only tables have."""
_OF_MIRRORS: Final = (*mirror_rules.MIRROR_SETTINGS, *mirror_rules.SECRETS)
_EXAMPLES: Final = {
    "path": 'path = "s3a://warehouse/orders"',
    "url": 'url = "jdbc:postgresql://db:5432/warehouse"',
    "table": 'table = "public.orders"',
    "user": 'user = "auditor"',
    "password_file": 'password_file = "warehouse.password"',
    "catalog_file": 'catalog_file = "catalog.toml"',
}


def sink_faults(table: Table, before: Sequence[Table]) -> Faults:
    """Find the mistakes of a `[[sinks]]` table after those `before` it: the name concerned, and the remedy."""
    listed = (*_OF_EACH, *_EXAMPLES, *mirror_rules.MIRROR_SETTINGS)
    yield from unknown_faults({name: table[name] for name in table if name not in mirror_rules.SECRETS}, listed)
    yield from name_faults(table, before, "another sink has it: write a different one")
    if not _are_texts(table.get("topics")):
        yield "topics", 'write names or globs, as in topics = ["orders.*"]'
    yield from _place_faults(table)
    if table.get("format") != KAFKA:
        yield from _identity_faults(table)
        yield from _column_faults(table)
    yield from _time_faults(table)
    if not isinstance(table.get("exclusive", False), bool):
        yield "exclusive", "write true or false"


def _place_faults(table: Table) -> Faults:
    """Find the mistakes about where the table of a sink is."""
    name = table.get("format")
    form = SINK_FORMATS.get(name) if isinstance(name, str) else None
    if form is None:
        yield "format", f"write one of {', '.join(SINK_FORMATS)}"
        return
    for setting in _OF_TABLES if name == KAFKA else _OF_MIRRORS:
        if setting in table:
            yield setting, f"{name} has no such setting; leave it out"
    for setting, example in _EXAMPLES.items():
        if setting not in form.settings:
            if setting in table:
                yield setting, f"{name} has no such setting; leave it out"
        elif (setting in table or setting in form.needed) and not _is_text(table.get(setting)):
            yield setting, f"write a text, as in {example}"
    yield from form.faults(table)


def _no_faults(table: Table) -> Faults:
    """Find no mistake: the settings of the format are independent texts."""
    return iter(())


def _database_faults(table: Table) -> Faults:
    """Find the mistakes of a URL of JDBC."""
    url = table.get("url")
    if not isinstance(url, str) or not url:
        return
    if not url.startswith("jdbc:"):
        yield "url", f"write a URL of JDBC, as in {_EXAMPLES['url']}"
    elif _PASSWORD.search(url):
        yield "url", f"a password in it would come into logs: write {_EXAMPLES['password_file']} instead"


def _iceberg_faults(table: Table) -> Faults:
    """Find an Iceberg table that is named in both ways, or in none."""
    if ("path" in table) == ("table" in table):
        yield (
            "table",
            'write table = "sales.orders" and catalog_file = "catalog.toml", or the path of the table\'s metadata, but '
            "not both",
        )
    elif "table" in table and "catalog_file" not in table:
        yield "catalog_file", f"write the file with the properties of the catalog, as in {_EXAMPLES['catalog_file']}"


@dataclass(frozen=True, slots=True)
class SinkFormat:
    """How a format says where the table of a sink is: settings (of _EXAMPLES) that it may have, those `needed`, and
    what else `faults` finds wrong with them."""

    settings: tuple[str, ...]
    needed: tuple[str, ...]
    faults: Callable[[Table], Faults] = _no_faults


SINK_FORMATS: Final[Mapping[str, SinkFormat]] = {
    DELTA: SinkFormat(("path",), ("path",)),
    PARQUET: SinkFormat(("path",), ("path",)),
    JDBC: SinkFormat(("url", "table", "user", "password_file"), ("url", "table"), _database_faults),
    ICEBERG: SinkFormat(("path", "table", "catalog_file"), (), _iceberg_faults),
    KAFKA: SinkFormat((), (), mirror_rules.mirror_faults),
}


def _identity_faults(table: Table) -> Faults:
    """Find the mistakes of `id` and `coordinates`."""
    if ("id" in table) == ("coordinates" in table):
        yield (
            "id",
            'write an expression for the id, as in id = "event_id", or coordinates = ["topic", "partition", "offset"]'
            ", but not both",
        )
    if "id" in table and not _is_text(table["id"]):
        yield "id", 'write a column or an expression of Spark SQL, as in id = "event_id"'
    coordinates = table.get("coordinates", ["-"] * 3)
    if not _are_texts(coordinates) or len(coordinates) != 3:
        yield "coordinates", 'write three expressions of Spark SQL, as in ["topic", "partition", "offset"]'


def _column_faults(table: Table) -> Faults:
    """Find the mistakes of the columns with times."""
    for name, default in (("event_time", None), ("arrived", "_")):
        column = table.get(name, default)
        if not isinstance(column, str) or _COLUMN.fullmatch(column) is None:
            yield name, f'write the name of a column (letters, digits and _), as in {name} = "{name}"'


def _time_faults(table: Table) -> Faults:
    """Find the mistakes of times: lateness and margin in seconds, and the time since which to compare."""
    bounds = {"late_s": (1, LATE_MOST_S), "margin_s": (0, MARGIN_MOST_S)}
    for name, (least, most) in bounds.items():
        seconds = table.get(name, None if name == "late_s" else MARGIN_S)
        if isinstance(seconds, bool) or not isinstance(seconds, int) or not least <= seconds <= most:
            yield name, f"write seconds, from {least} to {most}"
    since = table.get("since")
    if "since" in table and not (isinstance(since, datetime) and since.tzinfo is not None):
        yield "since", "write a time with its zone, without quotes, as in since = 2026-01-31T00:00:00Z"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(map(_is_text, values))
