"""The settings that the service and the job share, and how a setting is read from the environment."""

import math
import os
import re
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from service.contract.wire.names import TOPIC, TOPIC_CHARS_MAX, internal_topics

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
        raise ValueError("printable characters only, without a line break")
    return text


def is_bare(text: str) -> bool:
    """Check that a text has no blanks, line breaks or control characters: urllib.parse passes over some of them."""
    return text.isprintable() and " " not in text


PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
# Mechanisms of both aiokafka and the job's kafka-clients. The last needs a source of tokens, the others a password.
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", OAUTHBEARER)
# The settings of each source of tokens; the first of a source names it.
TOKEN_SOURCES: Final = {
    "kafka_oauth_token_url": (
        "kafka_oauth_client_id",
        "kafka_oauth_client_secret",
        "kafka_oauth_scope",
        "kafka_oauth_cafile",
    ),
    "kafka_oauth_token_file": (),
    "kafka_oauth_aws_region": (),
}
_ENDPOINT: Final = "https://host:port/path (or http://), without user and password"
_EXTENSION: Final = re.compile(r"(?!auth=)[A-Za-z]{1,100}=[\x21-\x2b\x2d-\x7e]{1,1000}")


def token_url(text: str) -> str:
    """Read the address of a token endpoint. A password in it would be shown in messages."""
    try:
        parts = urlsplit(text)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # its text may contain a part of a password
        raise ValueError(_ENDPOINT) from None
    if wrong or "@" in parts.netloc or parts.fragment or not is_bare(text):
        raise ValueError(_ENDPOINT)
    return text


def extensions(text: str) -> str:
    """Read SASL extensions (RFC 7628, section 3.1): `name=value`, several separated by commas."""
    if not all(map(_EXTENSION.fullmatch, text.split(","))):
        raise ValueError("name=value, several separated by commas; names of letters, and not auth")
    return text


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Settings on which the service and the job must agree."""

    kafka: str = setting("127.0.0.1:9092", "Kafka's bootstrap servers, host:port separated by commas", servers)
    kafka_security_protocol: str = setting("PLAINTEXT", f"{', '.join(PROTOCOLS[:-1])} or SASL_SSL", one_of(*PROTOCOLS))
    kafka_sasl_mechanism: str = setting("", f"{', '.join(MECHANISMS[:-1])} or {OAUTHBEARER}", one_of(*MECHANISMS))
    kafka_sasl_username: str = setting("", "user name for SASL", printable)
    kafka_sasl_password: str = setting("", "password for SASL", printable, secret=True)
    kafka_oauth_token_url: str = setting(
        "", "token endpoint for OAUTHBEARER, asked by the grant client_credentials", token_url
    )
    kafka_oauth_client_id: str = setting("", "client id at the token endpoint", printable)
    kafka_oauth_client_secret: str = setting("", "client secret at the token endpoint", printable, secret=True)
    kafka_oauth_scope: str = setting("", "scopes to ask for at the token endpoint, separated by spaces", printable)
    kafka_oauth_cafile: str = setting(
        "", "PEM file of the authorities that sign the token endpoint's certificate; empty: the system's", str
    )
    kafka_oauth_token_file: str = setting(
        "", "file that has the token for OAUTHBEARER, read at each login: a projected service account token", str
    )
    kafka_oauth_aws_region: str = setting(
        "",
        "AWS region of an Amazon MSK cluster: OAUTHBEARER by IAM, with the credentials that AWS's SDK finds (needs the "
        "extra `msk`)",
        matching(re.compile("[a-z0-9-]{1,40}"), "a region, such as eu-central-1"),
    )
    kafka_oauth_extensions: str = setting(
        "", "SASL extensions for OAUTHBEARER, as name=value,name=value (Confluent Cloud: logicalCluster=…)", extensions
    )
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
    # No setting: where secrets were read from files, the path by the setting's name.
    secret_files: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read all settings from `FENCEPOST_<NAME>`. Raises SettingsError with a line for each that is wrong."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        secret_files: dict[str, str] = {}
        wrong: dict[str, str] = {}  # by the variable's name
        for item in _settings_of(cls):
            name, secret = PREFIX + item.name.upper(), item.metadata["secret"]
            try:
                text = _secret(environ, name) if secret else environ.get(name, "")
                if text:
                    values[item.name] = item.metadata["read"](text)
                if secret and (path := environ.get(name + FILE, "")):
                    secret_files[item.name] = path
            except SettingsError as error:
                wrong[name] = str(error)
            except ValueError as error:
                wrong[name] = f"{name if secret else f'{name}={text!r}'} is wrong: set {error}"
        wrong |= cls._misnamed(environ)
        settings = cls(**values, secret_files=secret_files)
        # A conflict with a setting that is wrong itself is not reported.
        of_wrong = [re.compile(rf"{re.escape(name)}(?![A-Z_])") for name in wrong]  # not KAFKA in KAFKA_SSL_CAFILE
        fitting = [line for line in settings.conflicts() if not any(name.search(line) for name in of_wrong)]
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
        for item in _settings_of(cls):
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

    def secret(self, name: str) -> str:
        """Return a secret as it is now: read again if it stands in a file. Raises SettingsError."""
        if (path := self.secret_files.get(name)) is None:
            return str(getattr(self, name))
        variable = PREFIX + name.upper()
        try:
            return str(_reader_of(type(self), name)(_secret_in(variable, path)))
        except SettingsError:
            raise
        except ValueError as error:
            raise SettingsError(f"{variable}{FILE}={path!r} is wrong: set {error}") from None

    @property
    def timeouts_ms(self) -> int:
        """The request and the transaction timeout together, ms: from the arrival of a request to its outcome."""
        return self.request_timeout_ms + self.transaction_timeout_ms

    @property
    def least_key_ttl_s(self) -> int:
        """The shortest retention of a key: ten times the request and the transaction timeout together, in seconds."""
        return math.ceil(10 * self.timeouts_ms / 1000)

    @property
    def kafka_sasl(self) -> bool:
        return self.kafka_security_protocol.startswith("SASL_")

    @property
    def kafka_tls(self) -> bool:
        return self.kafka_security_protocol.endswith("SSL")

    @property
    def kafka_oauth(self) -> bool:
        return self.kafka_sasl and self.kafka_sasl_mechanism == OAUTHBEARER

    @property
    def kafka_oauth_extensions_by_name(self) -> dict[str, str]:
        pairs = self.kafka_oauth_extensions.split(",") if self.kafka_oauth_extensions else []
        return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}

    def _sasl_conflicts(self) -> Iterator[str]:
        protocol = f"{PREFIX}KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol}"
        for name in ("kafka_sasl_mechanism", "kafka_sasl_username", "kafka_sasl_password"):
            variable, given = PREFIX + name.upper(), bool(getattr(self, name))
            needless = self.kafka_oauth and name != "kafka_sasl_mechanism"
            if self.kafka_sasl and not given and not needless:
                yield f"{protocol} needs {variable}: set it"
            elif given and not self.kafka_sasl:
                yield f"{variable} means nothing with {protocol}: set SASL_SSL there, or leave {variable} empty"
            elif given and needless:
                mechanism = f"{PREFIX}KAFKA_SASL_MECHANISM={OAUTHBEARER}"
                yield f"{variable} means nothing with {mechanism}: leave {variable} empty"
        yield from self._oauth_conflicts()

    def _oauth_conflicts(self) -> Iterator[str]:
        mechanism = f"{PREFIX}KAFKA_SASL_MECHANISM={OAUTHBEARER}"
        names = [*TOKEN_SOURCES, *TOKEN_SOURCES["kafka_oauth_token_url"], "kafka_oauth_extensions"]
        given = [name for name in names if getattr(self, name)]
        if not self.kafka_oauth:
            for variable in (PREFIX + name.upper() for name in given):
                yield f"{variable} means nothing without {mechanism}: set that, or leave {variable} empty"
            return
        sources = [name for name in TOKEN_SOURCES if name in given]
        if len(sources) != 1:
            choice = ", ".join(PREFIX + name.upper() for name in TOKEN_SOURCES)
            yield f"{mechanism} needs one source of tokens{' and has several' if sources else ''}: set one of {choice}"
            return
        yield from self._token_url_conflicts(sources[0], given)
        if path := self.kafka_oauth_token_file:
            try:
                Path(path).read_bytes()
            except OSError as error:
                variable = f"{PREFIX}KAFKA_OAUTH_TOKEN_FILE={path!r}"
                yield f"{variable} cannot be read ({_why(error)}): set a file that has the token"

    def _token_url_conflicts(self, source: str, given: Collection[str]) -> Iterator[str]:
        """Find what conflicts among the settings of a token endpoint, if that is the `source` of tokens."""
        url = f"{PREFIX}KAFKA_OAUTH_TOKEN_URL"
        for name in TOKEN_SOURCES["kafka_oauth_token_url"]:
            variable = PREFIX + name.upper()
            if source != "kafka_oauth_token_url" and name in given:
                yield f"{variable} means nothing without {url}: leave {variable} empty"
            elif source == "kafka_oauth_token_url" and name not in given and name.startswith("kafka_oauth_client_"):
                yield f"{url} needs {variable}: set it"
        if not self.kafka_oauth_token_url or not self.kafka_oauth_cafile:
            return
        if urlsplit(self.kafka_oauth_token_url).scheme == "https":
            yield from tls_faults("KAFKA_OAUTH", self.kafka_oauth_cafile, "", "")
        else:
            yield f"{PREFIX}KAFKA_OAUTH_CAFILE means nothing without TLS: set {url}=https://…, or leave it empty"

    def _tls_conflicts(self) -> Iterator[str]:
        if self.kafka_tls:
            yield from tls_faults("KAFKA_SSL", self.kafka_ssl_cafile, self.kafka_ssl_certfile, self.kafka_ssl_keyfile)
            return
        protocol = f"{PREFIX}KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol}"
        for name in ("kafka_ssl_cafile", "kafka_ssl_certfile", "kafka_ssl_keyfile"):
            if getattr(self, name):
                variable = PREFIX + name.upper()
                yield f"{variable} means nothing with {protocol}: set SSL or SASL_SSL there, or leave {variable} empty"


def _settings_of(cls: type[SharedSettings]) -> list[Field[Any]]:
    """List the fields that are settings."""
    return [item for item in fields(cls) if item.metadata]


def _reader_of(cls: type[SharedSettings], name: str) -> Read:
    read: Read = next(item for item in fields(cls) if item.name == name).metadata["read"]
    return read


def _secret(environ: Mapping[str, str], name: str) -> str:
    """Read a secret from its variable or from the file in `<name>_FILE`, without a final newline."""
    text, path = environ.get(name, ""), environ.get(name + FILE, "")
    if not path:
        return text
    if text:
        raise SettingsError(f"{name} and {name}{FILE} are both set: set one of them")
    return _secret_in(name, path)


def _secret_in(name: str, path: str) -> str:
    """Read the secret of a variable from a file, without a final newline."""
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
    yield from cafile_faults(f"{PREFIX}{names}_CAFILE", cafile)
    if bool(certfile) != bool(keyfile):
        given, missing = (cert, key) if certfile else (key, cert)
        yield f"{given} needs {missing}: set both, or neither"
    elif certfile:
        try:
            tls_context("", certfile, keyfile)
            if _PKCS8 not in Path(keyfile).read_text(encoding="ascii"):  # kafka-clients reads no other format
                yield f"{key}={keyfile!r} is not PKCS #8: set what `openssl pkcs8 -topk8 -nocrypt` makes of it"
        except (OSError, ValueError) as error:
            yield _pair_fault(cert, certfile, key, keyfile, error)


def cafile_faults(name: str, cafile: str) -> Iterator[str]:
    """Find what is wrong with a file of authorities that a variable names; "" stands for the system's."""
    try:
        tls_context(cafile, "", "")
    except OSError as error:
        yield f"{name}={cafile!r} cannot be used ({_why(error)}): set a PEM file of certificates"


def server_tls_faults(cert: str, certfile: str, key: str, keyfile: str) -> Iterator[str]:
    """Find what is wrong with a server's certificate and its key; `cert` and `key` are the variables that name them."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError) as error:
        yield _pair_fault(cert, certfile, key, keyfile, error)


def _pair_fault(cert: str, certfile: str, key: str, keyfile: str, error: Exception) -> str:
    return (
        f"{cert}={certfile!r} and {key}={keyfile!r} cannot be used ({_why(error)}): "
        "set PEM files of a certificate and of its key, not encrypted"
    )


_PKCS8: Final = "-----BEGIN PRIVATE KEY-----"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
