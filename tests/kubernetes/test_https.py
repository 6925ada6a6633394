"""Tests the components for HTTPS by the pods, and for the network access to an issuer of callers' tokens."""

from pathlib import Path

import pytest

from service.core.settings import Settings
from tests.kubernetes.rendering import HERE, Rendered, container_of, render_with
from tests.kubernetes.test_code import OF_SERVICE, open_ports, selects
from tests.kubernetes.test_labels import lacking
from tests.kubernetes.test_schemas import VERSIONS, check
from tests.kubernetes.test_secured import secret_of
from tests.secured import Authority

FILES = {"FENCEPOST_HTTP_TLS_CERTFILE": "tls.crt", "FENCEPOST_HTTP_TLS_KEYFILE": "tls.key"}


@pytest.fixture(scope="module")
def with_issuer(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered("prod", render_with("prod", tmp_path_factory.mktemp("issuer"), "issuer"))


def test_the_certificate_and_its_key_come_from_a_secret_of_kubernetes_own_type(https: Rendered) -> None:
    spec = https.one("Deployment")["spec"]["template"]["spec"]
    container = container_of({"spec": spec})
    environ = https.settings(container)
    assert set(environ) <= OF_SERVICE
    for variable, key in FILES.items():  # the keys of a secret of type kubernetes.io/tls
        assert secret_of(container["volumeMounts"], spec["volumes"], environ[variable]) == ("fencepost-https", key)


def test_the_settings_are_right_together(https: Rendered, authority: Authority, tmp_path: Path) -> None:
    """As the pods read them, with local files instead of the mounted ones."""
    certificate = authority.issue("pod", "DNS:fencepost.fencepost.svc")
    environ = https.settings(container_of(https.one("Deployment")["spec"]["template"]))
    files = dict(zip(FILES, map(str, (certificate.certfile, certificate.keyfile)), strict=True))
    rules = tmp_path / "rules.toml"
    rules.touch()
    own = {name: value for name, value in environ.items() if value}
    settings = Settings.from_env({**own, **files, "FENCEPOST_INSTANCE": "pod", "FENCEPOST_RULES": str(rules)})
    assert settings.http_tls is not None
    assert settings.management_port


def test_probes_and_scrapes_go_to_the_port_without_tls_and_callers_to_the_other(https: Rendered) -> None:
    container = container_of(https.one("Deployment")["spec"]["template"])
    assert {container[name]["httpGet"]["port"] for name in container if name.endswith("Probe")} == {"management"}
    assert [each["port"] for each in https.one("ServiceMonitor")["spec"]["endpoints"]] == ["management"]
    ports = {each["name"]: (each["port"], each["targetPort"]) for each in https.one("Service")["spec"]["ports"]}
    assert ports == {"https": (443, "http"), "management": (8001, "management")}


def test_without_a_management_port_the_component_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="livenessProbe"):
        render_with("prod", tmp_path, "https")


def test_the_service_alone_may_reach_the_issuer(with_issuer: Rendered) -> None:
    assert open_ports(with_issuer, "fencepost-issuer") == {8443}
    policy = with_issuer.one("NetworkPolicy", "fencepost-issuer")["spec"]
    pods = {name: pod["metadata"]["labels"] for name, pod in with_issuer.pods()}
    assert [name for name, labels in pods.items() if selects(policy["podSelector"], labels)] == ["Deployment/fencepost"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(https: Rendered, with_issuer: Rendered, version: str) -> None:
    for found in (*https.objects, with_issuer.one("NetworkPolicy", "fencepost-issuer")):
        check(found, version)
    assert lacking(https) == lacking(with_issuer) == {}


def test_the_overlay_names_the_components() -> None:
    text = (HERE / "overlays" / "prod" / "kustomization.yaml").read_text()
    assert all(f"# - ../../components/{name} " in text for name in ("https", "issuer"))
