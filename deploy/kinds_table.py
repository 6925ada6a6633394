"""Makes a Markdown table of the audit's kinds of findings from their registry.

`python -m deploy.kinds_table` prints the table; with the name of a file, the table replaces that between its markers.
"""

import sys
from pathlib import Path
from typing import Final

from deploy import markers
from spark.rules.kinds import KINDS

NAME: Final = "kinds of findings"
"""The name in the markers."""

HEAD: Final = ("kind", "severity", "breaks the promise", "about", "what a finding says")
_SUBJECTS: Final = {"id": "an id", "content": "a content", "partition": "a partition", "sink": "an id in a sink"}


def table() -> str:
    """Make the table, in the order of the report."""
    rows = [
        (
            f"`{kind.name}`",
            f"`{kind.severity}`",
            "yes" if kind.breaks_promise else "no",
            _SUBJECTS[kind.subject],
            kind.meaning,
        )
        for kind in KINDS.values()
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (HEAD, ("---",) * len(HEAD), *rows))


def main() -> int:
    match sys.argv[1:]:
        case []:
            sys.stdout.write(table())
        case [name]:
            path = Path(name)
            path.write_text(markers.put(path.read_text(encoding="utf-8"), NAME, table()), encoding="utf-8")
        case _:
            print("usage: python -m deploy.kinds_table [FILE]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
