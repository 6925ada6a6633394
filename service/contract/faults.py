"""What the tables of the rules have in common: names, rates, and the form in which their mistakes are reported."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

Table = dict[str, Any]
Faults = Iterator[tuple[str, str]]
"""The mistakes of a table: the name concerned, and the remedy."""

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
"""The name of a header (RFC 9110, section 5.6.2), within a bound."""
NAME_REMEDY: Final = "write 1 to 64 of letters, digits, '.', '_' and '-'"
# Bounds of a rate, in events a second, within which its waiting times are meaningful.
_RATES: Final = (0.000001, 1_000_000_000)


def rate_faults(table: Mapping[str, Any]) -> Faults:
    """Find the mistakes of a table's optional `rate`, in events a second."""
    rate = table.get("rate", 1)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not _RATES[0] <= rate <= _RATES[1]:
        yield "rate", f"write events a second, from {_RATES[0]:f} to {_RATES[1]}, or leave it out"
