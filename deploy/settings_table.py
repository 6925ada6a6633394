"""Makes a Markdown table of all settings from the settings class.

`python -m deploy.settings_table` prints the table; with the name of a file, the table replaces that between its
markers.
"""

import sys
from dataclasses import fields
from typing import Final

from deploy import markers
from service.contract import PREFIX, SharedSettings
from service.core.settings import Settings

NAME: Final = "settings"
"""The name in the markers."""

HEAD: Final = ("variable", "default", "what it is", "read by")


def table() -> str:
    """Make the table; settings that the service and the job share come first."""
    shared = SharedSettings.variables()
    rows = [_row(name, text, "both" if name in shared else "service") for name, text in Settings.variables().items()]
    return "\n".join(_line(row) for row in (HEAD, ("---",) * len(HEAD), *rows)) + "\n"


def _row(name: str, text: str, reader: str) -> tuple[str, ...]:
    default = _DEFAULTS.get(name, "")
    return f"`{name}`", "" if default == "" else f"`{_as_set(default)}`", text, reader


_DEFAULTS: Final = {PREFIX + item.name.upper(): item.default for item in fields(Settings)}


def _as_set(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(markers.command("deploy.settings_table", NAME, table(), sys.argv[1:]))
