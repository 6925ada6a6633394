"""Every setting as a Markdown table, made from the settings class.

`python -m deploy.settings_table` prints it; with a file's name it puts it between the file's markers.
"""

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Final

from service.contract import PREFIX, SharedSettings
from service.core.settings import Settings

BEGIN: Final = "<!-- settings -->"
END: Final = "<!-- /settings -->"

_BETWEEN: Final = re.compile(f"^{re.escape(BEGIN)}$(.*?)^{re.escape(END)}$", re.MULTILINE | re.DOTALL)

HEAD: Final = ("variable", "default", "what it is", "read by")


def table() -> str:
    """The table, those that both halves read first."""
    shared = SharedSettings.variables()
    rows = [_row(name, text, "both" if name in shared else "service") for name, text in Settings.variables().items()]
    return "\n".join(_line(row) for row in (HEAD, ("---",) * len(HEAD), *rows)) + "\n"


def standing(text: str) -> str | None:
    """What stands between the markers of a text, None where they are missing."""
    found = _BETWEEN.search(text)
    return None if found is None else found[1].strip()


def put(text: str) -> str:
    """The text with the table between its markers."""
    return _BETWEEN.sub(lambda _: f"{BEGIN}\n{table()}{END}", text)


def _row(name: str, text: str, reader: str) -> tuple[str, ...]:
    default = _DEFAULTS.get(name, "")
    return f"`{name}`", "" if default == "" else f"`{_as_set(default)}`", text, reader


_DEFAULTS: Final = {PREFIX + item.name.upper(): item.default for item in fields(Settings)}


def _as_set(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    match sys.argv[1:]:
        case []:
            sys.stdout.write(table())
        case [name]:
            path = Path(name)
            path.write_text(put(path.read_text(encoding="utf-8")), encoding="utf-8")
        case _:
            print("usage: python -m deploy.settings_table [FILE]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
