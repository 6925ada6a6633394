"""Generated text in a Markdown file, between the markers `<!-- name -->` and `<!-- /name -->`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path


def current(text: str, name: str) -> str | None:
    """Return what stands between the markers, without white space around it; None where they are missing."""
    found = _between(name).search(text)
    return None if found is None else found[1].strip()


def put(text: str, name: str, generated: str) -> str:
    """Return the text with `generated`, which ends with a line feed, between its markers."""
    return _between(name).sub(lambda _: f"<!-- {name} -->\n{generated}<!-- /{name} -->", text)


def command(program: str, name: str, generated: str, arguments: Sequence[str]) -> int:
    """Print the text, or put it between its markers in the file that the arguments name; returns the exit status."""
    match arguments:
        case []:
            sys.stdout.write(generated)
        case [file]:
            path = Path(file)
            path.write_text(put(path.read_text(encoding="utf-8"), name, generated), encoding="utf-8")
        case _:
            print(f"usage: python -m {program} [FILE]", file=sys.stderr)
            return 2
    return 0


def _between(name: str) -> re.Pattern[str]:
    return re.compile(f"^<!-- {name} -->$(.*?)^<!-- /{name} -->$", re.MULTILINE | re.DOTALL)
