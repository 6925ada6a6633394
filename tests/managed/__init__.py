"""A broker as a managed Kafka has it: logins by tokens or passwords that must be repeated, and a token endpoint.

The broker checks tokens as in production: by signature (RS256), audience and end, with the keys of a JWKS file.
"""

import base64
import json
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote_plus

from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports it from here
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from deploy.stack import Kafka, free_port
from tests.http_server import Handler, HttpServer
from tests.secured import Acl, bindings_of

AUDIENCE: Final = "kafka"
ISSUER: Final = "test"
# The service's principals: the subject of the tokens, and the user with a password.
SUBJECT: Final = "fencepost-client"
USER: Final = "fencepost-user"
SECRET: Final = "a secret+/ of a client"
PASSWORD: Final = "a password"
_ANSWER_S: Final = 10.0
_MODULES: Final = "org.apache.kafka.common.security"


class Issuer:
    """Signs tokens with a key of its own, with openssl; `jwks` is the file with its public key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._key, self.jwks = folder / "issuer.pem", folder / "jwks.json"
        self._id = uuid.uuid4().hex
        self._openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(self._key))
        modulus = self._openssl("rsa", "-in", str(self._key), "-noout", "-modulus").decode().strip().partition("=")[2]
        public = {"kty": "RSA", "use": "sig", "alg": "RS256", "kid": self._id, "e": "AQAB"}
        self.jwks.write_text(json.dumps({"keys": [{**public, "n": _base64(bytes.fromhex(modulus)).decode()}]}))

    def token(self, life_s: float, subject: str = SUBJECT, audience: str = AUDIENCE) -> str:
        """Sign a token that ends in `life_s`."""
        now = time.time()
        times = {"iat": int(now), "exp": round(now + life_s)}
        claims = {"iss": ISSUER, "sub": subject, "aud": audience, "scope": "kafka", **times}
        head = {"alg": "RS256", "typ": "JWT", "kid": self._id}
        signed = b".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        signature = self._openssl("dgst", "-sha256", "-sign", str(self._key), content=signed)
        return b".".join((signed, _base64(signature))).decode()

    def _openssl(self, *arguments: str, content: bytes = b"") -> bytes:
        command = ["openssl", *arguments]
        return subprocess.run(command, input=content, check=True, capture_output=True, timeout=30).stdout


class TokenEndpoint(HttpServer):
    """A token endpoint for the grant `client_credentials`. `refusing` and `away` make it fail."""

    def __init__(self, issuer: Issuer, life_s: float) -> None:
        self.issued = 0
        self.refusing = self.away = False
        self._issuer, self._life_s = issuer, life_s
        super().__init__(type("Handler", (_Handler,), {"endpoint": self}))

    @property
    def token_url(self) -> str:
        return f"{self.url}/token"

    def answer(self, login: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """Answer a request by its Authorization header and its body."""
        if self.away:
            return 503, {}
        scheme, _, encoded = login.partition(" ")
        client_id, _, secret = base64.b64decode(encoded).decode().partition(":") if scheme == "Basic" else ("", "", "")
        if self.refusing or (unquote_plus(client_id), unquote_plus(secret)) != (SUBJECT, SECRET):
            return 401, {"error": "invalid_client"}
        if form.get("grant_type") != ["client_credentials"] or form.get("scope") != ["kafka"]:
            return 400, {"error": "invalid_request"}
        self.issued += 1
        return 200, {
            "access_token": self._issuer.token(self._life_s),
            "token_type": "Bearer",
            "expires_in": int(self._life_s),
        }


class _Handler(Handler):
    endpoint: TokenEndpoint

    def respond(self, body: bytes) -> None:
        status, answer = self.endpoint.answer(self.headers.get("Authorization", ""), parse_qs(body.decode()))
        self.answer(status, json.dumps(answer).encode())


class ManagedKafka(Kafka):
    """One broker with two listeners: PLAINTEXT for the tests (a super user), and MANAGED for logins.

    MANAGED takes OAUTHBEARER and SCRAM-SHA-512, and ends connections that have not logged in for `reauth_ms`.
    """

    def __init__(self, folder: Path, issuer: Issuer, reauth_ms: int) -> None:
        super().__init__(folder)
        self.login_port = free_port()
        keys = issuer.jwks.absolute().as_uri()
        allowed = "-Dorg.apache.kafka.sasl.oauthbearer.allowed"
        self.java_options = [*Kafka.java_options, f"{allowed}.urls={keys}", f"{allowed}.files={issuer.jwks.absolute()}"]
        ways, listener = f"PLAINTEXT://{self.bootstrap},MANAGED://{self.logins}", "listener.name.managed"
        self.settings = {
            "listeners": f"{ways},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": ways,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,MANAGED:SASL_PLAINTEXT",
            f"{listener}.sasl.enabled.mechanisms": "OAUTHBEARER,SCRAM-SHA-512",
            f"{listener}.scram-sha-512.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
            f"{listener}.oauthbearer.sasl.jaas.config": f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required;",
            f"{listener}.oauthbearer.sasl.server.callback.handler.class": (
                f"{_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            ),
            "sasl.oauthbearer.jwks.endpoint.url": keys,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "connections.max.reauth.ms": str(reauth_ms),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }

    @property
    def logins(self) -> str:
        """The address of the listener MANAGED."""
        return f"127.0.0.1:{self.login_port}"

    def set_password(self, password: str) -> None:
        """Create the user with a password for SCRAM-SHA-512, or change the password."""
        secret = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        admin = self.admin()  # its requests in flight end with it
        for done in admin.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(USER, secret, password.encode())]
        ).values():
            done.result(_ANSWER_S)

    def allow(self, user: str, *acls: Acl) -> None:
        admin = self.admin()
        for done in admin.create_acls(bindings_of(user, *acls)).values():
            done.result(_ANSWER_S)

    def by_token(self, endpoint: TokenEndpoint) -> dict[str, str]:
        """Return the settings of a service that logs in by the tokens of an endpoint."""
        return {
            "FENCEPOST_KAFKA": self.logins,
            "FENCEPOST_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "FENCEPOST_KAFKA_SASL_MECHANISM": "OAUTHBEARER",
            "FENCEPOST_KAFKA_OAUTH_TOKEN_URL": endpoint.token_url,
            "FENCEPOST_KAFKA_OAUTH_CLIENT_ID": SUBJECT,
            "FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET": SECRET,
            "FENCEPOST_KAFKA_OAUTH_SCOPE": "kafka",
        }

    def by_file(self, path: Path) -> dict[str, str]:
        """Return the settings of a service that logs in by the token in a file."""
        return {
            "FENCEPOST_KAFKA": self.logins,
            "FENCEPOST_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "FENCEPOST_KAFKA_SASL_MECHANISM": "OAUTHBEARER",
            "FENCEPOST_KAFKA_OAUTH_TOKEN_FILE": str(path),
        }

    def by_password(self, path: Path) -> dict[str, str]:
        """Return the settings of a service that logs in by the password in a file."""
        return {
            "FENCEPOST_KAFKA": self.logins,
            "FENCEPOST_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "FENCEPOST_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "FENCEPOST_KAFKA_SASL_USERNAME": USER,
            "FENCEPOST_KAFKA_SASL_PASSWORD_FILE": str(path),
        }


def _base64(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")
