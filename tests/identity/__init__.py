"""Keycloak: `python -m tests.identity` fetches it and tests on it.

It keeps its realms in memory. `./tests/run` leaves it out: its archive has 150 MB, and its JVM takes most of a minute.
"""

import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from deploy import places
from deploy.console import StackError
from deploy.install import jars, java
from deploy.stack.ports import free_port
from deploy.stack.process import Process
from tests.contract.fake_issuer import SECRET, Client, client_credentials

LOCK: Final = Path(__file__).with_name("keycloak.lock")
WHY_NOT: Final = "it needs Keycloak, an archive of 180 MB: python -m tests.identity fetches it and runs this test"
TESTS: Final = ("tests/integration/test_identity.py",)
JAVA: Final = 17
_START_S: Final = 300.0
_ADMIN: Final = "admin"


def is_wanted() -> bool:
    """Check whether this run is to use the real issuer."""
    return bool(os.environ.get("TEST_IDENTITY"))


class Keycloak(Process):
    """One Keycloak, whose realms end with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("keycloak", folder)
        self.port = free_port()
        self._http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it in its development mode, and wait until it answers. Raises StackError."""
        home = java.find(JAVA)
        if home is None:
            raise StackError(f"Keycloak needs Java {JAVA} or newer: install one, or set JAVA_HOME to its folder")
        environment = {
            **places.hermetic_environment(),
            "JAVA_HOME": str(home),
            "JAVA_OPTS_KC_HEAP": "-Xms64m -Xmx512m",
            "JAVA_OPTS_APPEND": "-XX:TieredStopAtLevel=1",
            "KC_BOOTSTRAP_ADMIN_USERNAME": _ADMIN,
            "KC_BOOTSTRAP_ADMIN_PASSWORD": _ADMIN,
            "KC_DB": "dev-mem",
            "KC_CACHE": "local",
            "KC_HTTP_HOST": "127.0.0.1",
            "KC_HTTP_PORT": str(self.port),
            "KC_HEALTH_ENABLED": "false",
        }
        self.spawn([unpacked() / "bin" / "kc.sh", "start-dev"], env=environment)
        self.wait_until(self._answers, _START_S)

    def _answers(self) -> bool:
        try:
            return self._http.get("/realms/master").status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, timeout_s: float = 15.0) -> None:
        self._http.close()
        super().stop(timeout_s)

    def admin(self, method: str, path: str, body: object = None) -> Any:
        """Send a request to the administration's API, and return its answer."""
        form = {"grant_type": "password", "client_id": "admin-cli", "username": _ADMIN, "password": _ADMIN}
        login = self._http.post("/realms/master/protocol/openid-connect/token", data=form)
        login.raise_for_status()
        headers = {"authorization": f"Bearer {login.json()['access_token']}"}
        answer = self._http.request(method, f"/admin/realms{path}", json=body, headers=headers)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def realm(self, name: str, clients: Mapping[str, Client]) -> "KeycloakRealm":
        """Make a realm with clients, by their ids."""
        listed = [_client_of(id, client) for id, client in clients.items()]
        self.admin("POST", "", {"realm": name, "enabled": True, "sslRequired": "none", "clients": listed})
        return KeycloakRealm(self, name)


class KeycloakRealm:
    """A realm of Keycloak."""

    def __init__(self, keycloak: Keycloak, name: str) -> None:
        self._keycloak = keycloak
        self._name = name
        self._priority = 100

    @property
    def issuer(self) -> str:
        return f"{self._keycloak.url}/realms/{self._name}"

    @property
    def jwks_url(self) -> str:
        return f"{self.issuer}/protocol/openid-connect/certs"

    def token(self, client: str) -> str:
        return client_credentials(self.issuer, client)

    def add_key(self) -> None:
        self._priority += 100
        config = {"priority": [str(self._priority)], "keySize": ["2048"], "algorithm": ["RS256"]}
        component = {
            "name": f"key-{self._priority}",
            "providerId": "rsa-generated",
            "providerType": "org.keycloak.keys.KeyProvider",
            "config": config,
        }
        self._keycloak.admin("POST", f"/{self._name}/components", component)

    def withdraw_old_keys(self) -> None:
        listed = self._keycloak.admin("GET", f"/{self._name}/components?type=org.keycloak.keys.KeyProvider")
        for component in listed:
            of_signatures = component["providerId"] == "rsa-generated"
            if of_signatures and component["config"].get("priority") != [str(self._priority)]:
                self._keycloak.admin("DELETE", f"/{self._name}/components/{component['id']}")


def _client_of(id: str, client: Client) -> dict[str, Any]:
    """Describe a client with a service account, whose tokens have an audience and topics."""
    audience = {"included.custom.audience": client.audience, "access.token.claim": "true"}
    topics = {
        "claim.name": "topics",
        "claim.value": "[" + ", ".join(f'"{topic}"' for topic in client.topics) + "]",
        "jsonType.label": "JSON",
        "access.token.claim": "true",
    }
    mappers = {"oidc-audience-mapper": audience, "oidc-hardcoded-claim-mapper": topics}
    return {
        "clientId": id,
        "secret": SECRET,
        "protocol": "openid-connect",
        "publicClient": False,
        "serviceAccountsEnabled": True,
        "attributes": {"access.token.lifespan": str(client.life_s)},
        "protocolMappers": [
            {"name": mapper, "protocol": "openid-connect", "protocolMapper": mapper, "config": config}
            for mapper, config in mappers.items()
        ],
    }


def unpacked() -> Path:
    """Fetch the program unless it is in the cache, and return the folder in which it is unpacked."""
    (archive,) = jars.read_lock("identity", LOCK)
    jars.ensure([archive])
    target = archive.path.with_name(archive.sha256)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder, tarfile.open(archive.path) as content:
            content.extractall(folder, filter="data")
            (whole,) = Path(folder).iterdir()
            whole.rename(target)
    return target
