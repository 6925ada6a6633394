"""Makes a Markdown table of the audit's kinds of findings from their registry.

`python -m deploy.kinds_table` prints the table; with the name of a file, the table replaces that between its markers.
"""

import sys
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


if __name__ == "__main__":
    sys.exit(markers.command("deploy.kinds_table", NAME, table(), sys.argv[1:]))
