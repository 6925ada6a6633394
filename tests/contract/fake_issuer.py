"""An issuer of tokens in this process, with the paths of Keycloak: realms, their keys, and client credentials."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import parse_qs

import httpx

from tests.http_server import Handler, HttpServer
from tests.unit.identity.signing import Signer, key_set

SECRET = "secret"


class Realm(Protocol):
    """A realm of an issuer, as the tests use it: its clients get tokens, and its keys change."""

    @property
    def issuer(self) -> str:
        """What its tokens have as `iss`."""

    @property
    def jwks_url(self) -> str:
        """Where its keys are."""

    def token(self, client: str) -> str:
        """Get a token by the client's credentials."""

    def add_key(self) -> None:
        """Sign with a new key from now on; the old one stays published."""

    def withdraw_old_keys(self) -> None:
        """Publish only the key that signs now."""


class IssuerUnderTest(Protocol):
    """Makes realms."""

    def realm(self, name: str, clients: Mapping[str, "Client"]) -> Realm:
        """Make a realm with clients, by their ids."""


class Client:
    """A client of a realm: the audience of its tokens, their topics, and their life in seconds."""

    def __init__(self, audience: str = "fencepost", topics: Sequence[str] = ("*",), life_s: int = 300) -> None:
        self.audience = audience
        self.topics = [*topics]
        self.life_s = life_s


def client_credentials(issuer: str, client: str) -> str:
    """Get a token from the endpoint that Keycloak has below an issuer (RFC 6749, section 4.4)."""
    form = {"grant_type": "client_credentials", "client_id": client, "client_secret": SECRET}
    answer = httpx.post(f"{issuer}/protocol/openid-connect/token", data=form, timeout=30.0, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["access_token"])


class FakeRealm:
    """A realm of the fake."""

    def __init__(self, issuer: str, clients: Mapping[str, Client]) -> None:
        self.issuer = issuer
        self.clients = clients
        self.signers = [Signer.new("k0", "RS256")]
        self.fetches = 0

    @property
    def jwks_url(self) -> str:
        return f"{self.issuer}/protocol/openid-connect/certs"

    def token(self, client: str) -> str:
        return client_credentials(self.issuer, client)

    def add_key(self) -> None:
        self.signers.append(Signer.new(f"k{len(self.signers)}-{id(self)}", "RS256"))

    def withdraw_old_keys(self) -> None:
        del self.signers[:-1]

    def answer(self, path: str, form: Mapping[str, Sequence[str]]) -> tuple[int, bytes]:
        """Answer a request below the realm."""
        if path == "openid-configuration":
            return 200, json.dumps({"issuer": self.issuer, "jwks_uri": self.jwks_url}).encode()
        if path == "certs":
            self.fetches += 1
            return 200, key_set(*self.signers)
        client = self.clients.get(form["client_id"][0])
        if client is None or form["client_secret"] != [SECRET]:
            return 401, b"{}"
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": [client.audience, "account"],
            "sub": f"service-account-{form['client_id'][0]}",
            "azp": form["client_id"][0],
            "typ": "Bearer",
            "jti": uuid.uuid4().hex,
            "iat": now,
            "exp": now + client.life_s,
            "topics": client.topics,
        }
        return 200, json.dumps({"access_token": self.signers[-1].sign(claims, {"typ": "JWT"})}).encode()


class FakeIssuer(HttpServer):
    """An issuer on a free port. `closes`: it closes connections in place of answers."""

    def __init__(self) -> None:
        self.closes = False
        self._realms: dict[str, FakeRealm] = {}
        issuer = self

        class RealmHandler(Handler):
            def respond(self, body: bytes) -> None:
                if issuer.closes:
                    self.close_connection = True
                    return
                _, realms, name, *_, last = self.path.split("/")
                status, content = (
                    issuer._realms[name].answer(last, parse_qs(body.decode())) if realms == "realms" else (404, b"")
                )
                self.answer(status, content)

        super().__init__(RealmHandler)

    def realm(self, name: str, clients: Mapping[str, Client]) -> FakeRealm:
        realm = FakeRealm(f"{self.url}/realms/{name}", clients)
        self._realms[name] = realm
        return realm
