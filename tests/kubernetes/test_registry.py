"""Tests the components for a Schema Registry: settings, the mounted secret, and network access to the registry only."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.core.settings import Settings
from tests.kubernetes.rendering import HERE, Rendered, container_of, render_with
from tests.kubernetes.test_code import OF_SERVICE, open_ports, selects
from tests.kubernetes.test_labels import lacking
from tests.kubernetes.test_schemas import VERSIONS, check
from tests.kubernetes.test_secured import secret_of


@pytest.fixture(scope="module")
def with_registry(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered("prod", render_with("prod", tmp_path_factory.mktemp("registry"), "schema-registry"))


def test_the_service_takes_the_address_and_may_alone_reach_it(with_registry: Rendered, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.touch()
    environ = with_registry.settings(container_of(with_registry.one("Deployment")["spec"]["template"]))
    own = {name: value for name, value in environ.items() if value}
    settings = Settings.from_env({**own, "FENCEPOST_INSTANCE": "pod", "FENCEPOST_RULES": str(rules)})
    assert settings.registry == environ["FENCEPOST_REGISTRY"]
    assert open_ports(with_registry, "fencepost-schema-registry") == {urlsplit(settings.registry).port}
    policy = with_registry.one("NetworkPolicy", "fencepost-schema-registry")["spec"]
    pods = {name: pod["metadata"]["labels"] for name, pod in with_registry.pods()}
    assert [name for name, labels in pods.items() if selects(policy["podSelector"], labels)] == ["Deployment/fencepost"]


def test_with_tls_the_password_and_the_certificates_come_from_a_secret(tmp_path: Path) -> None:
    made = Rendered("prod", render_with("prod", tmp_path, "schema-registry", "schema-registry-tls"))
    spec = made.one("Deployment")["spec"]["template"]["spec"]
    container = container_of({"spec": spec})
    environ = made.settings(container)
    assert set(environ) <= OF_SERVICE
    assert environ["FENCEPOST_REGISTRY"].startswith("https://")
    assert open_ports(made, "fencepost-schema-registry") == {urlsplit(environ["FENCEPOST_REGISTRY"]).port}
    for variable, key in {
        "FENCEPOST_REGISTRY_PASSWORD_FILE": "password",
        "FENCEPOST_REGISTRY_CAFILE": "ca.crt",
    }.items():
        found = secret_of(container["volumeMounts"], spec["volumes"], environ[variable])
        assert found == ("fencepost-registry", key)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(with_registry: Rendered, version: str) -> None:
    for found in with_registry.objects:
        check(found, version)
    assert lacking(with_registry) == {}


def test_the_image_has_what_it_needs_and_the_overlay_names_the_components() -> None:
    assert "--extra registry" in (HERE.parents[1] / "Dockerfile").read_text()
    text = (HERE / "overlays" / "prod" / "kustomization.yaml").read_text()
    assert all(f"# - ../../components/{name} " in text for name in ("schema-registry", "schema-registry-tls"))
