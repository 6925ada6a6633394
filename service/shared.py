"""The settings that the service and the job read from the same environment, and how a setting is read.

Standard library only: the job imports this module and `wire`, and nothing else of the service.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from service.wire import TOPIC

PREFIX = "FENCEPOST_"


class SettingsError(ValueError):
    """One or more settings are wrong; each line of the text says which, why, and what to set."""


Read = Callable[[str], Any]


def setting(default: Any, help: str, read: Read) -> Any:
    """A dataclass field that is a setting: its default, what it is for, and how its text becomes a value.

    `read` raises ValueError with what would be right ("an integer of 1 or more").
    """
    return field(default=default, metadata={"help": help, "read": read})


def integer(least: int, most: int | None = None) -> Read:
    """Reader of a decimal integer within bounds, both inclusive."""
    wanted = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if number < least or number > (math.inf if most is None else most):
            raise ValueError(wanted)
        return number

    return read


def matching(pattern: Any, wanted: str) -> Read:
    """Reader of a text that matches a compiled regular expression as a whole."""

    def read(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError(wanted)
        return text

    return read


def servers(text: str) -> str:
    """Reader of `host:port[,host:port…]`."""
    for server in text.split(","):
        host, colon, port = server.strip().rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("host:port, several separated by commas")
    return text


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """What the service and the job must agree on."""

    kafka: str = setting("127.0.0.1:9092", "Kafka's bootstrap servers, host:port separated by commas", servers)
    namespace: str = setting(
        "fencepost",
        "prefix of the internal topics, the transactional ids and the keys in Redis",
        matching(TOPIC, "1 to 249 of letters, digits, '.', '_' and '-'"),
    )
    key_ttl_s: int = setting(86_400, "key retention: for how long a key is remembered, in seconds", integer(1))
    transaction_timeout_ms: int = setting(
        10_000, "Kafka aborts a transaction that is open for longer, in milliseconds", integer(1_000, 900_000)
    )
    request_timeout_ms: int = setting(
        10_000, "deadline of a request, and of each call to Kafka, in milliseconds", integer(100, 900_000)
    )
    rules: str = setting("", "path of a TOML file with rules for topics; empty for none", str)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read every setting from `FENCEPOST_<NAME>`; SettingsError lists all that are wrong, a line each."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for item in fields(cls):
            name = PREFIX + item.name.upper()
            text = environ.get(name, "")
            if text == "":
                continue
            try:
                values[item.name] = item.metadata["read"](text)
            except ValueError as error:
                wrong.append(f"{name}={text!r} is wrong: set {error}")
        if not wrong:
            settings = cls(**values)
            wrong = settings.conflicts()
            if not wrong:
                return settings
        raise SettingsError("\n".join(wrong))

    def conflicts(self) -> list[str]:
        """Settings that do not fit together, a line each that says what to set."""
        least_ms = 10 * (self.request_timeout_ms + self.transaction_timeout_ms)
        if self.key_ttl_s * 1000 < least_ms:
            return [
                f"{PREFIX}KEY_TTL_S={self.key_ttl_s} is too short: a key must outlive ten times the request and the "
                f"transaction timeout together; set {math.ceil(least_ms / 1000)} or more, or shorter timeouts"
            ]
        return []
