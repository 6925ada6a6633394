"""Reads Delta tables from their files, where a test needs no query of Spark: one over few rows takes half a second.

By the actions `add` and `remove` of the Delta transaction log protocol, from all commits: Delta keeps commits for a day
or longer. The tests' tables have no deletion vectors.
"""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq


def rows(table: Path, *columns: str) -> list[dict[str, Any]]:
    """Return these columns of all rows, no rows without a table. Columns of its partitions are in no file."""
    return [row for file in files(table) for row in pq.ParquetFile(file).read(list(columns)).to_pylist()]


def count(table: Path) -> int:
    """Return the number of rows."""
    return sum(pq.read_metadata(file).num_rows for file in files(table))


def files(table: Path) -> list[Path]:
    """List the data files of the newest version."""
    found: set[str] = set()
    for commit in _commits(table):
        actions = [json.loads(line) for line in commit.read_text(encoding="utf-8").splitlines()]
        added = [action["add"] for action in actions if "add" in action]
        assert not any(file.get("deletionVector") for file in added), "a deletion vector is not read"
        found -= {action["remove"]["path"] for action in actions if "remove" in action}
        found |= {file["path"] for file in added}
    return sorted(table / unquote(path) for path in found)


def version(table: Path) -> int:
    """Return the number of the newest version."""
    return int(_commits(table)[-1].stem)


def metrics(table: Path) -> dict[str, str]:
    """Return Delta's metrics of the newest commit."""
    lines = _commits(table)[-1].read_text(encoding="utf-8").splitlines()
    (info,) = (action["commitInfo"] for action in map(json.loads, lines) if "commitInfo" in action)
    return dict(info["operationMetrics"])


def _commits(table: Path) -> list[Path]:
    """List the commits in their order, none if there is no table; a version without its commit is an error."""
    found = sorted((table / "_delta_log").glob("*[0-9].json"))
    assert [int(commit.stem) for commit in found] == list(range(len(found))), f"{table}: not all commits are kept"
    return found
