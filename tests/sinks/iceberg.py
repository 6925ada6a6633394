"""An Iceberg table on disk, in a catalog of SQLite, that PyIceberg writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch
from uuid import uuid4

import pyarrow as pa
from pyarrow import parquet
from pyiceberg.catalog import load_catalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
from pyiceberg.typedef import Record

from service.contract import SinkRule

TABLE: Final = "sales.orders"


class Iceberg:
    """A table with these columns, in a folder of its own."""

    def __init__(self, root: Path, columns: Mapping[str, pa.DataType]) -> None:
        properties = {"type": "sql", "uri": f"sqlite:///{root / 'catalog.db'}", "warehouse": f"file://{root}"}
        self.root = root
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

    def delete_row(self, position: int) -> None:
        """Delete a row of the newest data file by its position there, as writers that merge on read do."""
        (newest, *_) = (task.file.file_path for task in self._table.scan().plan_files())
        self._delete(DataFileContent.POSITION_DELETES, file_path=[newest], pos=[position])

    def delete_rows_with(self, column: str, value: str) -> None:
        """Delete the rows with a value by an equality delete, as some streaming writers do."""
        field = self._table.schema().find_field(column)
        self._delete(DataFileContent.EQUALITY_DELETES, [field.field_id], **{column: [value]})

    def _delete(self, content: DataFileContent, equality_ids: list[int] | None = None, **columns: list[Any]) -> None:
        """Commit a delete file with these columns. PyIceberg writes no manifests of such files but with this patch."""
        path = self.root / f"{uuid4()}.parquet"
        parquet.write_table(pa.table(columns), path)
        file = DataFile.from_args(
            content=content,
            file_path=f"file://{path}",
            file_format=FileFormat.PARQUET,
            partition=Record(),
            record_count=1,
            file_size_in_bytes=path.stat().st_size,
            equality_ids=equality_ids,
            spec_id=self._table.metadata.default_spec_id,
        )
        with (
            patch.object(ManifestWriterV2, "content", lambda writer: ManifestContent.DELETES),
            self._table.transaction() as transaction,
            transaction.update_snapshot().fast_append() as append,
        ):
            append.append_data_file(file)

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
