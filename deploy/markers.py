"""Generated text in a Markdown file, between the markers `<!-- name -->` and `<!-- /name -->`."""

import re


def current(text: str, name: str) -> str | None:
    """Return what stands between the markers, without white space around it; None where they are missing."""
    found = _between(name).search(text)
    return None if found is None else found[1].strip()


def put(text: str, name: str, generated: str) -> str:
    """Return the text with `generated`, which ends with a line feed, between its markers."""
    return _between(name).sub(lambda _: f"<!-- {name} -->\n{generated}<!-- /{name} -->", text)


def _between(name: str) -> re.Pattern[str]:
    return re.compile(f"^<!-- {name} -->$(.*?)^<!-- /{name} -->$", re.MULTILINE | re.DOTALL)
