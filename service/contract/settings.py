"""The settings that the service and the job share, and how a setting is read from the environment."""

import math
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Self

from service.contract.wire import TOPIC, TOPIC_CHARS_MAX, internal_topics

PREFIX: Final = "FENCEPOST_"
FILE: Final = "_FILE"
# Ten years: expiry and retention in ms must stay below 2^53.
KEY_TTL_MOST_S: Final = 10 * 365 * 86_400
# The similarity (difflib, at most 1) from which a variable's name counts as a misspelt setting.
MISTAKEN: Final = 0.85
NAMESPACE_CHARS_MAX: Final = TOPIC_CHARS_MAX - max(map(len, internal_topics("")))


class SettingsError(ValueError):
    """One or more settings are wrong; each line of the text names one, the reason, and what to set."""


Read = Callable[[str], Any]


def setting(default: Any, help: str, read: Read, *, secret: bool = False) -> Any:
    """Make a dataclass field that is a setting: its default, its description, and the reader of its text.

    `read` raises ValueError with what would be right ("an integer of 1 or more"). A secret is never shown, and may
    stand in a file that the variable `<name>_FILE` names.
    """
    return field(default=default, repr=not secret, metadata={"help": help, "read": read, "secret": secret})


# Stricter than int(), which also takes 8_000, +8 and digits of other scripts.
_INTEGER: Final = re.compile(r"[0-9]{1,18}")


def integer(least: int, most: int | None = None) -> Read:
    """Make a reader of a decimal integer within bounds, both inclusive."""
    wanted = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"

    def read(text: str) -> int:
        if _INTEGER.fullmatch(text.strip()) is None:
            raise ValueError(wanted)
        number = int(text)
        if number < least or number > (math.inf if most is None else most):
            raise ValueError(wanted)
        return number

    return read


def matching(pattern: Any, wanted: str) -> Read:
    """Make a reader of a text that matches a compiled regular expression as a whole."""

    def read(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError(wanted)
        return text

    return read


# A host name or an address (IPv6 with or without brackets), no URL, and one server only.
_HOST: Final = re.compile(r"[\w.-]+|\[?[0-9A-Fa-f:.]+(%[\w.-]+)?\]?")
_PORT: Final = re.compile(r"[0-9]{1,5}")


def servers(text: str) -> str:
    """Read `host:port[,host:port…]`."""
    for server in text.split(","):
        host, _, port = server.strip().rpartition(":")
        if not (_HOST.fullmatch(host) and _PORT.fullmatch(port) and 0 < int(port) < 65536):
            raise ValueError("host:port, several separated by commas")
    return text


def namespace(text: str) -> str:
    """Read a prefix of topic names. It may consist of dots: Kafka refuses only the names "." and ".."."""
    if not all(map(TOPIC.fullmatch, internal_topics(text))):
        raise ValueError(f"1 to {NAMESPACE_CHARS_MAX} of letters, digits, '.', '_' and '-'")
    return text


def one_of(*choices: str) -> Read:
    """Make a reader of one of several words."""
    return matching(re.compile("|".join(map(re.escape, choices))), f"one of {', '.join(choices)}")


def switch(text: str) -> bool:
    """Read true or false."""
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def printable(text: str) -> str:
    """Read a text without control characters."""
    if not text.isprintable():
        raise ValueError("printable characters only")
    return text


# Mechanisms of both aiokafka and the job's kafka-clients that need only a name and a password.
PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Settings on which the service and the job must agree."""

    kafka: str = setting("127.0.0.1:9092", "Kafka's bootstrap servers, host:port separated by commas", servers)
    kafka_security_protocol: str = setting("PLAINTEXT", f"{', '.join(PROTOCOLS[:-1])} or SASL_SSL", one_of(*PROTOCOLS))
    kafka_sasl_mechanism: str = setting("", f"{', '.join(MECHANISMS[:-1])} or PLAIN", one_of(*MECHANISMS))
    kafka_sasl_username: str = setting("", "user name for SASL", printable)
    kafka_sasl_password: str = setting("", "password for SASL", printable, secret=True)
    kafka_ssl_cafile: str = setting(
        "", "PEM file of the authorities that sign the brokers' certificates; empty: the system's", str
    )
    kafka_ssl_certfile: str = setting("", "PEM file of the client's own certificate and its chain, for mutual TLS", str)
    kafka_ssl_keyfile: str = setting("", "PEM file of that certificate's key (PKCS #8, not encrypted)", str)
    kafka_ssl_check_hostname: bool = setting(
        True, "whether a broker's certificate must be for the name it is reached by (endpoint identification)", switch
    )
    namespace: str = setting(
        "fencepost",
        "prefix of the internal topics, the transactional ids and the keys in Redis",
        namespace,
    )
    key_ttl_s: int = setting(
        86_400, "key retention: for how long a key is remembered, in seconds", integer(1, KEY_TTL_MOST_S)
    )
    transaction_timeout_ms: int = setting(
        10_000, "Kafka aborts a transaction that is open for longer, in milliseconds", integer(1_000, 900_000)
    )
    request_timeout_ms: int = setting(
        10_000, "deadline of a request, and of each call to Kafka, in milliseconds", integer(100, 900_000)
    )
    rules: str = setting(
        "", "path of a TOML file with rules for topics, callers, sources and schemas; empty for none", str
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read all settings from `FENCEPOST_<NAME>`. Raises SettingsError with a line for each that is wrong."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        wrong: dict[str, str] = {}  # by the variable's name
        for item in fields(cls):
            name, secret = PREFIX + item.name.upper(), item.metadata["secret"]
            try:
                text = _secret(environ, name) if secret else environ.get(name, "")
                if text:
                    values[item.name] = item.metadata["read"](text)
            except SettingsError as error:
                wrong[name] = str(error)
            except ValueError as error:
                wrong[name] = f"{name if secret else f'{name}={text!r}'} is wrong: set {error}"
        wrong |= cls._misnamed(environ)
        settings = cls(**values)
        # A conflict with a setting that is wrong itself is not reported.
        fitting = [line for line in settings.conflicts() if not any(name in line for name in wrong)]
        if wrong or fitting:
            raise SettingsError("\n".join([*wrong.values(), *fitting]))
        return settings

    @classmethod
    def _misnamed(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Find variables that look like misspelt settings, and what to set instead of each."""
        known = [name.removeprefix(PREFIX) for name in cls.variables()]
        wrong: dict[str, str] = {}
        for name in environ:
            ours = name.removeprefix(PREFIX)
            if environ[name] and ours not in (name, *known) and (meant := get_close_matches(ours, known, 1, MISTAKEN)):
                wrong[name] = f"{name} is no setting: set {PREFIX}{meant[0]} instead"
        return wrong

    @classmethod
    def variables(cls) -> dict[str, str]:
        """List all environment variables that are read, with their descriptions."""
        found: dict[str, str] = {}
        for item in fields(cls):
            name = PREFIX + item.name.upper()
            found[name] = item.metadata["help"]
            if item.metadata["secret"]:
                found[name + FILE] = f"a file that has {name}, instead of it: a mounted secret"
        return found

    def conflicts(self) -> list[str]:
        """Find settings that contradict each other: a line for each, which says what to set."""
        wrong = [*self._sasl_conflicts(), *self._tls_conflicts()]
        if self.key_ttl_s < self.least_key_ttl_s:
            wrong.append(
                f"{PREFIX}KEY_TTL_S={self.key_ttl_s} is too short: a key must outlive ten times the request and the "
                f"transaction timeout together; set {self.least_key_ttl_s} or more, or shorter timeouts"
            )
        return wrong

    @property
    def least_key_ttl_s(self) -> int:
        """The shortest retention of a key: ten times the request and the transaction timeout together, in seconds."""
        return math.ceil(10 * (self.request_timeout_ms + self.transaction_timeout_ms) / 1000)

    @property
    def kafka_sasl(self) -> bool:
        return self.kafka_security_protocol.startswith("SASL_")

    @property
    def kafka_tls(self) -> bool:
        return self.kafka_security_protocol.endswith("SSL")

    def _sasl_conflicts(self) -> Iterator[str]:
        protocol = f"{PREFIX}KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol}"
        for name in ("kafka_sasl_mechanism", "kafka_sasl_username", "kafka_sasl_password"):
            variable, given = PREFIX + name.upper(), bool(getattr(self, name))
            if self.kafka_sasl and not given:
                yield f"{protocol} needs {variable}: set it"
            elif given and not self.kafka_sasl:
                yield f"{variable} means nothing with {protocol}: set SASL_SSL there, or leave {variable} empty"

    def _tls_conflicts(self) -> Iterator[str]:
        if self.kafka_tls:
            yield from tls_faults("KAFKA_SSL", self.kafka_ssl_cafile, self.kafka_ssl_certfile, self.kafka_ssl_keyfile)
            return
        protocol = f"{PREFIX}KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol}"
        for name in ("kafka_ssl_cafile", "kafka_ssl_certfile", "kafka_ssl_keyfile"):
            if getattr(self, name):
                variable = PREFIX + name.upper()
                yield f"{variable} means nothing with {protocol}: set SSL or SASL_SSL there, or leave {variable} empty"


def _secret(environ: Mapping[str, str], name: str) -> str:
    """Read a secret from its variable or from the file in `<name>_FILE`, without a final newline."""
    text, path = environ.get(name, ""), environ.get(name + FILE, "")
    if not path:
        return text
    if text:
        raise SettingsError(f"{name} and {name}{FILE} are both set: set one of them")
    try:
        text = Path(path).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name}{FILE}={path!r} cannot be read ({_why(error)}): set a file that has it") from None
    if not text:
        raise SettingsError(f"{name}{FILE}={path!r} is empty: put the secret into it")
    return text


# ----------------------------------------------------------------------------------------------------------- TLS


def tls_context(cafile: str, certfile: str, keyfile: str, check_hostname: bool = True) -> ssl.SSLContext:
    """Make a client's TLS context; it trusts the system's CAs if `cafile` is empty. Raises OSError."""
    context = ssl.create_default_context(cafile=cafile or None)
    context.check_hostname = check_hostname
    if certfile:
        context.load_cert_chain(certfile, keyfile, password="")
    return context


def tls_faults(names: str, cafile: str, certfile: str, keyfile: str) -> Iterator[str]:
    """Find what is wrong with the files of `<names>_CAFILE`, `_CERTFILE` and `_KEYFILE`, a line each."""
    cert, key = f"{PREFIX}{names}_CERTFILE", f"{PREFIX}{names}_KEYFILE"
    try:
        tls_context(cafile, "", "")
    except OSError as error:
        yield f"{PREFIX}{names}_CAFILE={cafile!r} cannot be used ({_why(error)}): set a PEM file of certificates"
    if bool(certfile) != bool(keyfile):
        given, missing = (cert, key) if certfile else (key, cert)
        yield f"{given} needs {missing}: set both, or neither"
    elif certfile:
        try:
            tls_context("", certfile, keyfile)
            if _PKCS8 not in Path(keyfile).read_text(encoding="ascii"):  # kafka-clients reads no other format
                yield f"{key}={keyfile!r} is not PKCS #8: set what `openssl pkcs8 -topk8 -nocrypt` makes of it"
        except (OSError, ValueError) as error:
            yield (
                f"{cert}={certfile!r} and {key}={keyfile!r} cannot be used ({_why(error)}): "
                "set PEM files of a certificate and of its key, not encrypted"
            )


_PKCS8: Final = "-----BEGIN PRIVATE KEY-----"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
