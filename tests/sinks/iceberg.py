"""An Iceberg table on disk, in a catalog of SQLite, that PyIceberg writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from service.contract import SinkRule

TABLE: Final = "sales.orders"


class Iceberg:
    """A table with these columns, in a folder of its own."""

    def __init__(self, root: Path, columns: Mapping[str, pa.DataType]) -> None:
        properties = {"type": "sql", "uri": f"sqlite:///{root / 'catalog.db'}", "warehouse": f"file://{root}"}
        self.catalog_file = root / "catalog.toml"
        written = {"name": "tests", **properties}
        self.catalog_file.write_text("".join(f'{name} = "{value}"\n' for name, value in written.items()))
        self.schema = pa.schema(dict(columns))
        catalog = load_catalog("tests", **properties)
        catalog.create_namespace("sales")
        self._table = catalog.create_table(TABLE, schema=self.schema)

    @property
    def metadata(self) -> str:
        """The file of the table's newest version."""
        return self._table.metadata_location

    def append(self, **columns: Sequence[Any]) -> SinkRule:
        """Append rows in a file of their own; returns a rule for the table."""
        arrays = {name: pa.array(columns[name], self.schema.field(name).type) for name in self.schema.names}
        self._table.append(pa.table(arrays, self.schema))
        return SinkRule(
            *("warehouse", ("t",), "iceberg", "accepted_at", 600),
            table=TABLE,
            catalog_file=str(self.catalog_file),
            id="event_id",
            margin_s=60,
        )
