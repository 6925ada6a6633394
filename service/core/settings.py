"""The service's settings: environment variables with the prefix FENCEPOST_, checked against each other at start."""

import ipaddress
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from service.contract import PREFIX, SharedSettings, integer, matching, one_of, setting, tls_context, tls_faults
from service.contract.settings import cafile_faults, is_bare, printable, server_tls_faults, switch
from service.contract.wire.names import INSTANCE
from service.core.redis_address import is_tls, kind_of, redis_address

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
# The largest event, below a topic's default max.message.bytes (1,048,588).
EVENT_BYTES_MAX: Final = 1_000_000
# Memory of a waiting event beside its own bytes: objects, its future, its share of the connection.
WAITING_BYTES: Final = 2_000
# Ledger bytes of a group: half of the ledger's max.message.bytes, so that one more entry always fits.
GROUP_LEDGER_BYTES_MAX: Final = 512 * 1024
# Bytes of a group's events: a broker takes as many well within the transaction timeout.
GROUP_EVENT_BYTES_MAX: Final = 8 * 1024 * 1024

# Topic names whose guarantee is cached. Clients may send any names.
TOPICS_MAX: Final = 10_000

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")
_HOST_NAME: Final = re.compile(r"[\w.-]+")
_REGISTRY: Final = (
    "http://host:port/path or https://…, with user and password in variables of their own, FENCEPOST_REGISTRY_USERNAME…"
)


def token(text: str) -> str:
    """Read a bearer token (RFC 6750, section 2.1)."""
    if _TOKEN.fullmatch(text) is None:
        raise ValueError("letters, digits and -._~+/=")
    return text


def own_host(text: str) -> str:
    """Read the name or the address (IPv6 without brackets) to listen on."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if _HOST_NAME.fullmatch(text) is None:
            raise ValueError("a host name or an address without a port, such as 0.0.0.0 or ::") from None
    return text


def registry_url(text: str) -> str:
    """Read the address of a Schema Registry. A password in it would be shown in messages."""
    try:
        parts = urlsplit(text)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # its text may contain a part of a password
        raise ValueError(_REGISTRY) from None
    if wrong or "@" in parts.netloc or parts.query or parts.fragment or not is_bare(text):
        raise ValueError(_REGISTRY)
    return text.rstrip("/")


def _are_here(*packages: str) -> bool:
    try:
        return all(find_spec(name) for name in packages)
    except ModuleNotFoundError:  # not even the packages that these are in
        return False


class HttpTls(NamedTuple):
    """How the service speaks TLS with its clients; without `client_cafile` no client has a certificate."""

    certfile: str
    keyfile: str
    least_version: ssl.TLSVersion
    client_cafile: str
    client_required: bool

    @property
    def files(self) -> list[str]:
        """The files that are read again when they change."""
        return [file for file in (self.certfile, self.keyfile, self.client_cafile) if file]


@dataclass(frozen=True, kw_only=True)
class Settings(SharedSettings):
    """All settings of the service; the table in service/README.md is generated from this class."""

    redis: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis (6.2 or newer, noeviction) as a URL: redis://host:port/db, redis+sentinel://host:port,…/name/db or "
        "redis+cluster://host:port,…; rediss://, rediss+… for TLS",
        redis_address,
        secret=True,
    )
    redis_sentinel_username: str = setting("", "user name for the sentinels, which have users of their own", printable)
    redis_sentinel_password: str = setting("", "password for the sentinels", printable, secret=True)
    redis_cafile: str = setting(
        "", "PEM file of the authorities that sign Redis's certificate; empty: the system's", str
    )
    redis_certfile: str = setting("", "PEM file of the client's own certificate and its chain, for mutual TLS", str)
    redis_keyfile: str = setting("", "PEM file of that certificate's key (PKCS #8, not encrypted)", str)
    registry: str = setting(
        "",
        "Schema Registry (Confluent's API) as a URL, with its path; empty for none (needs the extra `registry`)",
        registry_url,
    )
    registry_username: str = setting("", "user name for the Schema Registry", printable)
    registry_password: str = setting("", "password for the Schema Registry", printable, secret=True)
    registry_token: str = setting("", "bearer token for the Schema Registry, instead of a password", token, secret=True)
    registry_cafile: str = setting(
        "", "PEM file of the authorities that sign the registry's certificate; empty: the system's", str
    )
    registry_certfile: str = setting("", "PEM file of the client's own certificate and its chain, for mutual TLS", str)
    registry_keyfile: str = setting("", "PEM file of that certificate's key (PKCS #8, not encrypted)", str)
    registry_register: bool = setting(
        True, "whether schemas that produce requests bring are registered, if the registry does not have them", switch
    )
    host: str = setting("127.0.0.1", "address to listen on", own_host)
    port: int = setting(8000, "port to listen on", integer(1, 65535))
    management_port: int = setting(
        0,
        "port for health, readiness, metrics and documentation, which PORT does not serve then; 0: PORT serves all",
        integer(0, 65535),
    )
    management_host: str = setting("", "address to listen on for them; empty: that of HOST", own_host)
    transport: str = setting(
        "direct",
        "how POSTs of events reach the app: asgi (a route of it, seen by middleware and instrumentation), or direct "
        "(below ASGI, for less CPU a request)",
        one_of("direct", "asgi"),
    )
    http_tls_certfile: str = setting(
        "", "PEM file of the certificate for HTTPS and its chain; empty for HTTP without TLS", str
    )
    http_tls_keyfile: str = setting("", "PEM file of that certificate's key (not encrypted)", str)
    http_tls_min_version: str = setting(
        "1.2", "least version of TLS that clients may use, 1.2 or 1.3", one_of("1.2", "1.3")
    )
    http_tls_client_cafile: str = setting(
        "", "PEM file of the authorities that sign clients' certificates (mutual TLS); empty: none is asked for", str
    )
    http_tls_client_auth: str = setting(
        "required",
        "whether each client must have such a certificate: required, or optional",
        one_of("required", "optional"),
    )
    instance: str = setting(
        "",
        "this process's name in headers and logs, stable over restarts; host:port where it is empty",
        matching(INSTANCE, "1 to 64 of letters, digits, '.', '_', ':' and '-'"),
    )
    slots: int = setting(4, "slots (long-lived producers) wanted by this process", integer(1, 4096))
    slots_max: int = setting(64, "slots in the whole namespace: the ledger's number of partitions", integer(1, 4096))
    lease_ttl_ms: int = setting(
        3_000, "a process that is silent for longer loses its slots, in milliseconds", integer(300, 60_000)
    )
    queue_events_max: int = setting(20_000, "events that may wait in this process; one more is 503", integer(1))
    queue_bytes_max: int = setting(
        64 * 1024 * 1024,
        "bytes of events that may wait in this process, each with 2,000 for itself; twice as many in bodies",
        integer(EVENT_BYTES_MAX + WAITING_BYTES),
    )
    log_format: str = setting(
        "auto",
        "form of the log: json, console, or auto (console on a terminal)",
        one_of("auto", "json", "console"),
    )
    log_keys: str = setting(
        "hashed", "idempotency keys in the log: hashed (as the event's id) or plain", one_of("hashed", "plain")
    )
    tracing: str = setting(
        "off",
        "off, or otlp: spans to where the standard OTEL_* variables say (needs the extra `tracing`)",
        one_of("off", "otlp"),
    )
    body_bytes_max: int = setting(8 * 1024 * 1024, "largest body of a request, in bytes", integer(1_000))

    compression: str = setting(
        "none",
        f"codec of the events in Kafka: {', '.join(COMPRESSIONS)}; it runs on the event loop",
        one_of(*COMPRESSIONS),
    )
    kafka_transactions: str = setting(
        "1",
        "version of Kafka's transactions: 1, or auto: 2 where the brokers have finalized it (KIP-890). With 2 a slot "
        "changes its producer id, and what hangs under a former one is ended only with Alter on the cluster "
        "(PROTOCOL.md, Limits)",
        one_of("1", "auto"),
    )

    @property
    def bodies_bytes_max(self) -> int:
        """Bytes of bodies in memory at once: more than the queue takes, as parts of them may be refused."""
        return max(self.body_bytes_max, 2 * self.queue_bytes_max)

    @property
    def name(self) -> str:
        """The name of this process: as set, else host:port."""
        return self.instance or f"{self.host}:{self.port}"

    def conflicts(self) -> list[str]:
        wrong = super().conflicts()
        if self.slots > self.slots_max:
            wrong.append(
                f"{PREFIX}SLOTS={self.slots} is more than {PREFIX}SLOTS_MAX={self.slots_max}: "
                f"set {PREFIX}SLOTS to {self.slots_max} or less"
            )
        if INSTANCE.fullmatch(self.name) is None:
            wrong.append(f"{PREFIX}INSTANCE is needed: {self.name!r} (from host:port) is not a name; set it")
        wrong += self._redis_conflicts()
        wrong += self._registry_conflicts()
        if self.kafka_oauth_aws_region and not _are_here("aws_msk_iam_sasl_signer"):
            wrong.append(f"{PREFIX}KAFKA_OAUTH_AWS_REGION needs packages that are not here: install fencepost[msk]")
        wrong += self._http_tls_conflicts()
        wrong += self._management_conflicts()
        if self.tracing != "off" and not _are_here("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
            wrong.append(f"{PREFIX}TRACING={self.tracing} needs packages that are not here: install fencepost[tracing]")
        return wrong

    @property
    def redis_sentinel_login(self) -> tuple[str, str]:
        """User name and password for the sentinels, empty where they ask for none."""
        return self.redis_sentinel_username, self.redis_sentinel_password

    @property
    def http_tls(self) -> "HttpTls | None":
        """Return the settings of HTTPS; None for HTTP without TLS."""
        if not self.http_tls_certfile:
            return None
        return HttpTls(
            self.http_tls_certfile,
            self.http_tls_keyfile,
            ssl.TLSVersion.TLSv1_3 if self.http_tls_min_version == "1.3" else ssl.TLSVersion.TLSv1_2,
            self.http_tls_client_cafile,
            self.http_tls_client_auth == "required",
        )

    @property
    def redis_tls(self) -> ssl.SSLContext | None:
        """Make the TLS context for Redis; None for a connection without TLS. Raises OSError."""
        if not is_tls(self.redis):
            return None
        return tls_context(self.redis_cafile, self.redis_certfile, self.redis_keyfile)

    @property
    def registry_tls(self) -> ssl.SSLContext | None:
        """Make the TLS context for the Schema Registry; None for a connection without TLS. Raises OSError."""
        if urlsplit(self.registry).scheme != "https":
            return None
        return tls_context(self.registry_cafile, self.registry_certfile, self.registry_keyfile)

    def _registry_conflicts(self) -> Iterator[str]:
        url, tls = f"{PREFIX}REGISTRY", urlsplit(self.registry).scheme == "https"
        files = ("registry_cafile", "registry_certfile", "registry_keyfile")
        for name in ("registry_username", "registry_password", "registry_token", *files):
            variable, given = PREFIX + name.upper(), bool(getattr(self, name))
            if given and not self.registry:
                yield f"{variable} means nothing without {url}: set that, or leave {variable} empty"
            elif given and not tls and name in files:
                yield f"{variable} means nothing without TLS: set {url}=https://…, or leave {variable} empty"
        if bool(self.registry_username) != bool(self.registry_password):
            yield f"{url}_USERNAME and {url}_PASSWORD go together: set both, or neither"
        if self.registry_token and self.registry_password:
            yield f"{url}_TOKEN and {url}_PASSWORD are both set: set one of them"
        if tls:
            yield from tls_faults("REGISTRY", self.registry_cafile, self.registry_certfile, self.registry_keyfile)
        if self.registry and not _are_here("fastavro", "google.protobuf", "grpc_tools", "httpx"):
            yield f"{url} needs packages that are not here: install fencepost[registry]"

    def _management_conflicts(self) -> Iterator[str]:
        if self.management_port == self.port:
            yield f"{PREFIX}MANAGEMENT_PORT={self.management_port} is {PREFIX}PORT too: set another, or 0 for one port"
        if self.management_host and not self.management_port:
            yield (
                f"{PREFIX}MANAGEMENT_HOST means nothing without a port: set {PREFIX}MANAGEMENT_PORT, or leave "
                f"{PREFIX}MANAGEMENT_HOST empty"
            )

    def _http_tls_conflicts(self) -> Iterator[str]:
        cert, key, ca = (f"{PREFIX}HTTP_TLS_{name}" for name in ("CERTFILE", "KEYFILE", "CLIENT_CAFILE"))
        if bool(self.http_tls_certfile) != bool(self.http_tls_keyfile):
            given, missing = (cert, key) if self.http_tls_certfile else (key, cert)
            yield f"{given} needs {missing}: set both, or neither"
            return
        if self.http_tls_client_cafile and not self.http_tls_certfile:
            yield f"{ca} means nothing without TLS: set {cert} and {key}, or leave {ca} empty"
        if self.http_tls_certfile:
            yield from server_tls_faults(cert, self.http_tls_certfile, key, self.http_tls_keyfile)
        if self.http_tls_client_cafile:
            yield from cafile_faults(ca, self.http_tls_client_cafile)

    def _redis_conflicts(self) -> Iterator[str]:
        sentinels = f"{PREFIX}REDIS=redis+sentinel://…"
        for name in ("redis_sentinel_username", "redis_sentinel_password"):
            if getattr(self, name) and kind_of(self.redis) != "sentinel":
                variable = PREFIX + name.upper()
                yield f"{variable} means nothing without sentinels: set {sentinels}, or leave {variable} empty"
        if self.redis_sentinel_username and not self.redis_sentinel_password:
            yield f"{PREFIX}REDIS_SENTINEL_USERNAME needs {PREFIX}REDIS_SENTINEL_PASSWORD: set it"
        if is_tls(self.redis):
            yield from tls_faults("REDIS", self.redis_cafile, self.redis_certfile, self.redis_keyfile)
            return
        for name in ("redis_cafile", "redis_certfile", "redis_keyfile"):
            if getattr(self, name):
                variable = PREFIX + name.upper()
                yield f"{variable} means nothing without TLS: set {PREFIX}REDIS=rediss://…, or leave {variable} empty"
