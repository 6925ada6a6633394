"""The `[[cors]]` tables of the rules: the origins whose web pages may call the API (CORS, Fetch standard)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.contract.faults import TOKEN, Faults, Table

# An origin as browsers serialize it: scheme, host, and a port that is not the scheme's own.
_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST: Final = rf"(?:\*\.(?:{_LABEL}\.)+{_LABEL}|{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:]+\])"
_ORIGIN: Final = re.compile(rf"https?://{_HOST}(?::[0-9]{{1,5}})?")
_DEFAULT_PORT: Final = re.compile(r"http:.*:80|https:.*:443")
MAX_AGE_S: Final = 600
MAX_AGE_MOST_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class CorsRule:
    """One `[[cors]]` table. `https://*.example.com` stands for all hosts below example.com.

    `headers` are request headers that scripts may set beside those of the API. `max_age_s` is how long a browser may
    keep the answer to a preflight.
    """

    origins: tuple[str, ...]
    headers: tuple[str, ...] = ()
    max_age_s: int = MAX_AGE_S


def cors_rule(table: Table) -> CorsRule:
    """Make the rule of a table without faults."""
    return CorsRule(tuple(table["origins"]), tuple(table.get("headers", ())), table.get("max_age_s", MAX_AGE_S))


def cors_faults(table: Table, before: Sequence[Table]) -> Faults:
    """Find the mistakes of a `[[cors]]` table after those `before` it: the name concerned, and the remedy."""
    for unknown in table.keys() - {"origins", "headers", "max_age_s"}:
        yield unknown, "no such setting; write origins, headers and max_age_s"
    origins = table.get("origins")
    if not isinstance(origins, list) or not origins or not all(map(_is_origin, origins)):
        yield (
            "origins",
            'write origins as browsers send them, as in ["https://shop.example.com", "https://*.example.org:8443"]: '
            "lower case, without a path, and without the scheme's own port",
        )
    elif any(origin in other.get("origins", ()) for origin in origins for other in before):
        yield "origins", "another [[cors]] table has one of them: write each once"
    headers = table.get("headers", [])
    if not isinstance(headers, list) or not all(isinstance(name, str) and TOKEN.fullmatch(name) for name in headers):
        yield "headers", 'write names of request headers, as in ["X-Trace-Id"], or leave it out'
    age = table.get("max_age_s", MAX_AGE_S)
    if isinstance(age, bool) or not isinstance(age, int) or not 0 <= age <= MAX_AGE_MOST_S:
        yield "max_age_s", f"write seconds, from 0 to {MAX_AGE_MOST_S}, or leave it out"


def _is_origin(origin: Any) -> bool:
    return isinstance(origin, str) and _ORIGIN.fullmatch(origin) is not None and _DEFAULT_PORT.fullmatch(origin) is None
