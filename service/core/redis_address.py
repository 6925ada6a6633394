"""Reads the address of Redis: one server, or the sentinels or cluster nodes that tell which server is the primary."""

import re
from dataclasses import dataclass
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from service.contract.settings import servers

Kind = Literal["server", "sentinel", "cluster"]

# Sentinels or nodes in one address; each is asked at once.
SEEDS_MAX: Final = 16

_SERVER: Final = "redis://host:port/db, rediss://… or unix://…"
_ESCAPES: Final = "in a name or password %3A for :, %2F for /, %23 for #, %3F for ?"
_MORE_ESCAPES: Final = f"{_ESCAPES}, %40 for @"
_SERVER_PORT: Final = f"{_SERVER}, port from 1 to 65535; {_ESCAPES}"
_FORMS: Final = {
    "sentinel": f"redis+sentinel://host:port,host:port/name/db (rediss+sentinel://… for TLS), name as the sentinels "
    f"know the primary, db a number; {_MORE_ESCAPES}",
    "cluster": f"redis+cluster://host:port,host:port (rediss+cluster://… for TLS), without a database; {_MORE_ESCAPES}",
}
_BLANKS: Final = "a URL without blanks around it and without line breaks"
_SERVER_DB: Final = re.compile(r"(?:/[0-9]{0,9})?/?")
_SEVERAL: Final = re.compile(
    r"(?P<tls>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<login>[^@/?#]*)@)?(?P<hosts>[^@/?#]+)"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?"
)
# Names as Sentinel's `sentinel monitor` takes them.
_PATHS: Final = {
    "sentinel": re.compile(r"/(?P<name>[A-Za-z0-9._-]+)(?:/(?P<db>[0-9]{1,9}))?"),
    "cluster": re.compile(r"(?:/0?)?"),
}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """An address of Redis, checked.

    `url` is that of one server, as redis-py takes it. If `seeds` (host, port) are given, they tell host and port of the
    primary, and `url` has all else for it: user, password, database, TLS, options. `name` is the name by which
    sentinels know the primary.
    """

    url: str
    kind: Kind = "server"
    seeds: tuple[tuple[str, int], ...] = ()
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address. Raises ValueError with what would be right, without a part of a password.

        Stricter than redis-py, which reads port 0 as 6379, and a path that is not a number as database 0.
        """
        if text != text.strip() or not text.isprintable():  # urllib.parse passes over some, redis-py not
            raise ValueError(_BLANKS)
        scheme = text.partition("://")[0]
        kind = scheme.partition("+")[2]
        if kind in _FORMS and scheme.startswith("redis"):
            return cls._parse_several(text, kind)
        _check_server(text)
        return cls(text)

    @classmethod
    def _parse_several(cls, text: str, kind: str) -> Self:
        found = _SEVERAL.fullmatch(text)
        path = _PATHS[kind].fullmatch(found["path"] or "") if found else None
        if found is None or path is None:
            raise ValueError(_FORMS[kind])
        try:
            servers(found["hosts"])
        except ValueError:
            raise ValueError(_FORMS[kind]) from None
        seeds = tuple(_host_and_port(each.strip()) for each in found["hosts"].split(","))
        if len(seeds) > SEEDS_MAX:
            raise ValueError(f"at most {SEEDS_MAX} addresses, {_FORMS[kind]}")
        login = f"{found['login']}@" if found["login"] is not None else ""
        parts = path.groupdict()
        # The host is replaced before each connection.
        url = f"{found['tls']}://{login}localhost:6379/{parts.get('db') or 0}{found['query'] or ''}"
        return cls(url, "sentinel" if kind == "sentinel" else "cluster", seeds, parts.get("name") or "")


def redis_address(text: str) -> str:
    """Read the setting REDIS; `redis_connections.check_url` checks its query. Raises as RedisAddress."""
    RedisAddress.parse(text)
    return text


def is_tls(text: str) -> bool:
    """Whether connections to this address have TLS."""
    return text.partition("://")[0].partition("+")[0] == "rediss"


def kind_of(text: str) -> str:
    """Return the part of the scheme after its +: `sentinel`, `cluster`, or empty for one server."""
    return text.partition("://")[0].partition("+")[2]


def _host_and_port(server: str) -> tuple[str, int]:
    host, _, port = server.rpartition(":")
    return host.strip("[]"), int(port)


def _check_server(text: str) -> None:
    """Raise ValueError unless this is a redis://, rediss:// or unix:// address."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # its text may contain a part of a password
        raise ValueError(_SERVER_PORT) from None
    if parts.scheme == "unix" and parts.path:
        return
    if parts.scheme not in ("redis", "rediss") or not (parts.hostname or parts.path):
        raise ValueError(_SERVER)
    if port == 0:
        raise ValueError(_SERVER_PORT)
    if _SERVER_DB.fullmatch(parts.path) is None:
        raise ValueError(f"{_SERVER}, db a number")
