"""A broker that demands TLS and SASL, a Redis with TLS, and the certificates for both."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports it from here
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from deploy.stack import Kafka, Redis, StackError, free_port
from service.contract import SharedSettings
from service.contract.wire.names import findings_topic

# Characters that a careless configuration would not escape, or would reveal.
PASSWORD: Final = 'pa"ss\\wo,r=d $1'
USER: Final = "fencepost"
DAYS: Final = 2
_ANSWER_S: Final = 10.0
_CLOSED_S: Final = 5.0

Acl = tuple[ResourceType, str, ResourcePatternType, tuple[AclOperation, ...]]


@contextlib.asynccontextmanager
async def sockets_closed() -> AsyncIterator[None]:
    """Wait at the end until no more files and sockets are open than at the beginning.

    aiokafka does not wait for its bootstrap connection, and a TLS connection stays open until the broker has closed it
    too: a loop that ends before leaves it to the garbage collector, which warns in a later test.
    """
    before = _open_files()
    try:
        yield
    finally:
        async with asyncio.timeout(_CLOSED_S):
            while _open_files() > before:  # noqa: ASYNC110 - of this nobody tells
                await asyncio.sleep(0.001)


def _open_files() -> int:
    return len([*Path("/dev/fd").iterdir()])


@dataclass(frozen=True)
class Certificate:
    """PEM files of a certificate and its key, and one file with both."""

    certfile: Path
    keyfile: Path
    both: Path


class Authority:
    """Signs certificates, with openssl."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl on PATH to make certificates with (on Debian or Ubuntu: apt-get install openssl)")
        self._folder = folder
        folder.mkdir(parents=True)
        self.cafile, self._keyfile = folder / "ca.crt", folder / "ca.key"
        self._openssl("-x509", "-keyout", self._keyfile, "-out", self.cafile, "-subj", "/CN=Test Authority")

    def issue(self, name: str, *names: str, days: int = DAYS) -> Certificate:
        """Make a certificate for a subject, and for a server's names ("DNS:localhost"), valid for `days`."""
        made = Certificate(*(self._folder / f"{name}.{kind}" for kind in ("crt", "key", "pem")))
        signed = ("-x509", "-CA", self.cafile, "-CAkey", self._keyfile, "-subj", f"/CN={name}")
        more = ("-addext", f"subjectAltName={','.join(names)}") if names else ()
        plain = ("-addext", "basicConstraints=critical,CA:FALSE")
        self._openssl(*signed, *more, *plain, "-keyout", made.keyfile, "-out", made.certfile, days=days)
        made.both.write_text(made.keyfile.read_text() + made.certfile.read_text())
        return made

    def _openssl(self, *arguments: str | Path, days: int = DAYS) -> None:
        kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", str(days))
        subprocess.run(["openssl", "req", *kind, *map(str, arguments)], check=True, capture_output=True, timeout=30)


# Settings for which the doctor has findings, and which do no harm without faults.
CARELESS: Final = {
    "unclean.leader.election.enable": "true",
    "transaction.partition.verification.enable": "false",
    "transaction.max.timeout.ms": "5000",
    "transactional.id.expiration.ms": "3600000",
    "connections.max.reauth.ms": "3000",
}


class SecuredKafka(Kafka):
    """One broker with three listeners: PLAINTEXT for the tests (a super user), SASL_SSL, and mutual TLS.

    Its certificate is for `localhost` and not for 127.0.0.1. Users of the other listeners may do only what ACLs allow.
    A fourth listener, PLAINTEXT too, advertises a closed port. The broker has careless settings too.
    """

    def __init__(self, folder: Path, authority: Authority) -> None:
        super().__init__(folder)
        self.authority = authority
        self.sasl_port, self.tls_port, self.astray_port = free_port(), free_port(), free_port()
        server = authority.issue("broker", "DNS:localhost")
        plain, secure = f"PLAINTEXT://{self.bootstrap}", f"SASL_SSL://{self.secured},SSL://localhost:{self.tls_port}"
        # Java properties take a backslash as an escape, and so does JAAS.
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"').replace("\\", "\\\\")
        sasl = "listener.name.sasl_ssl"
        modules = "org.apache.kafka.common.security"
        self.settings = {
            "listeners": f"{plain},{secure},ASTRAY://{self.astray},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"{plain},{secure},ASTRAY://127.0.0.1:1",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,ASTRAY:PLAINTEXT,CONTROLLER:PLAINTEXT,"
            "SASL_SSL:SASL_SSL,SSL:SSL",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(server.both),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(authority.cafile),
            "listener.name.ssl.ssl.client.auth": "required",
            f"{sasl}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            f"{sasl}.scram-sha-512.sasl.jaas.config": f"{modules}.scram.ScramLoginModule required;",
            f"{sasl}.plain.sasl.jaas.config": f'{modules}.plain.PlainLoginModule required user_{USER}="{quoted}";',
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            **CARELESS,
        }

    @property
    def secured(self) -> str:
        """The address for clients with a password."""
        return f"localhost:{self.sasl_port}"

    @property
    def mutual(self) -> str:
        """The address for clients with a certificate."""
        return f"localhost:{self.tls_port}"

    @property
    def astray(self) -> str:
        """The address of the listener that advertises a closed port."""
        return f"127.0.0.1:{self.astray_port}"

    def start(self) -> None:
        super().start()
        self.add_user(USER, PASSWORD)

    def add_user(self, name: str, password: str) -> None:
        """Create a user for SCRAM-SHA-512."""
        secret = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        upsertion = UserScramCredentialUpsertion(name, secret, password.encode())
        admin = self.admin()  # its requests in flight end with it
        for done in admin.alter_user_scram_credentials([upsertion]).values():
            done.result(_ANSWER_S)

    def allow(self, user: str, *acls: Acl) -> None:
        """Let a user do what each of the ACLs names."""
        admin = self.admin()
        for done in admin.create_acls(bindings_of(user, *acls)).values():
            done.result(_ANSWER_S)

    def environment(self, user: str = USER, password: str = PASSWORD) -> dict[str, str]:
        """Return the settings by which service and job use the SASL_SSL listener."""
        return {
            "FENCEPOST_KAFKA": self.secured,
            "FENCEPOST_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "FENCEPOST_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "FENCEPOST_KAFKA_SASL_USERNAME": user,
            "FENCEPOST_KAFKA_SASL_PASSWORD": password,
            "FENCEPOST_KAFKA_SSL_CAFILE": str(self.authority.cafile),
        }

    def with_certificate(self, name: str) -> SharedSettings:
        """Return the settings by which a client uses the mutual TLS listener, as the principal `CN=<name>`."""
        mine = self.authority.issue(name)
        return SharedSettings(
            kafka=self.mutual,
            kafka_security_protocol="SSL",
            kafka_ssl_cafile=str(self.authority.cafile),
            kafka_ssl_certfile=str(mine.certfile),
            kafka_ssl_keyfile=str(mine.keyfile),
        )


def bindings_of(user: str, *acls: Acl) -> list[AclBinding]:
    """Make the bindings that let a user do what each of the ACLs names."""
    return [
        AclBinding(kind, name, pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
        for kind, name, pattern, operations in acls
        for operation in operations
    ]


def acls_of_service(namespace: str, topics: str) -> list[Acl]:
    """Return the ACLs of the service in the README: for its own topics and ids, and topics that begin with `topics`."""
    prefixed = ResourcePatternType.PREFIXED
    a = AclOperation
    own = (a.DESCRIBE, a.DESCRIBE_CONFIGS, a.CREATE, a.ALTER, a.READ, a.WRITE)
    return [
        (ResourceType.TOPIC, f"{namespace}.", prefixed, own),
        (ResourceType.TRANSACTIONAL_ID, f"{namespace}.slot.", prefixed, (a.DESCRIBE, a.WRITE)),
        (ResourceType.TOPIC, topics, prefixed, (a.DESCRIBE, a.DESCRIBE_CONFIGS, a.READ, a.WRITE)),
    ]


def acls_of_job(namespace: str, topics: str) -> list[Acl]:
    """Return the ACLs of the audit in the README."""
    prefixed = ResourcePatternType.PREFIXED
    a = AclOperation
    readable = [
        (ResourceType.TOPIC, name, prefixed, (a.DESCRIBE, a.DESCRIBE_CONFIGS, a.READ))
        for name in (f"{namespace}.", topics)
    ]
    return [
        *readable,
        (ResourceType.TOPIC, findings_topic(namespace), ResourcePatternType.LITERAL, (a.CREATE, a.WRITE)),
    ]


class SecuredRedis(Redis):
    """A real server behind TLS: its own if it was built with TLS, else a TLS proxy before it."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        super().__init__(folder)
        self.authority = authority
        self.tls_port = free_port()
        self._certificate = authority.issue("redis", "DNS:localhost")
        self._front: _Front | None = None
        self.native = False

    @property
    def secured(self) -> str:
        """The URL for TLS."""
        return f"rediss://localhost:{self.tls_port}/0"

    def environment(self) -> dict[str, str]:
        return {"FENCEPOST_REDIS": self.secured, "FENCEPOST_REDIS_CAFILE": str(self.authority.cafile)}

    def start(self) -> None:
        files = ["--tls-cert-file", str(self._certificate.certfile), "--tls-key-file", str(self._certificate.keyfile)]
        files += ["--tls-ca-cert-file", str(self.authority.cafile), "--tls-auth-clients", "no"]
        self.args = ["--tls-port", str(self.tls_port), *files]
        try:
            super().start()
            self.native = True
        except StackError:  # built without TLS, as that of the wheel is
            self.args = []
            super().start()
            self._front = _Front(self.tls_port, self.port, self._certificate)

    def stop(self, timeout_s: float = _ANSWER_S) -> None:
        if self._front is not None:
            self._front.close()
        super().stop(timeout_s)


class _Front:
    """A proxy that ends TLS, as stunnel does."""

    def __init__(self, port: int, upstream: int, certificate: Certificate) -> None:
        self._port, self._upstream = port, upstream
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate.certfile, certificate.keyfile)
        self._loop = asyncio.new_event_loop()
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._serving.wait(_ANSWER_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_ANSWER_S)
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", self._port, ssl=self._context)
        self._serving.set()
        await self._stop.wait()
        server.close()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        finally:
            back.close()
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()
