"""Writes results as Markdown tables, which are committed."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from deploy.places import ROOT

RESULTS: Final = Path(__file__).parent / "results"


def machine() -> str:
    """Return date, commit and number of cores."""
    return f"{time.strftime('%Y-%m-%d', time.gmtime())} {revision(ROOT)}, {os.cpu_count()} cores"


def revision(tree: Path) -> str:
    """Return the commit of a tree; "" without a git history."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False).stdout.strip()


def table(heads: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
    rows = [list(heads), ["---"] * len(heads), *([name, *cells] for name, cells in lines.items())]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)


def update(
    path: Path, heads: Sequence[str], lines: Mapping[str, Sequence[str]], order: Sequence[str] | None = None
) -> dict[str, Sequence[str]]:
    """Update the lines of a table in a file, in this order or in the file's."""
    known: dict[str, Sequence[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == len(heads) and cells[0] not in (heads[0], "---"):
            known[cells[0]] = cells[1:]
    known |= lines
    return {name: known[name] for name in (known if order is None else order) if name in known}
