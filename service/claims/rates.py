"""Token buckets in Redis, which all processes share. The script is rates.lua."""

from typing import NamedTuple


class Ask(NamedTuple):
    """A request for tokens of a bucket: `rate` a second, at most `burst`; `spent` without asking (< 0: given back)."""

    id: bytes
    rate: float
    burst: float
    spent: float
    want: int


class Granted(NamedTuple):
    """The tokens that a bucket grants, and those that it has left; less than 0 while a debt is paid off."""

    tokens: int
    left: float
