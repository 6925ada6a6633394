"""Tests the component for traces: a setting of the service, and network access to the collector only."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.core.settings import Settings
from tests.kubernetes.rendering import HERE, Rendered, container_of, render_with
from tests.kubernetes.test_code import open_ports
from tests.kubernetes.test_schemas import VERSIONS, check


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered("prod", render_with("prod", tmp_path_factory.mktemp("traced"), "tracing"))


def test_the_service_takes_it_and_may_reach_the_collector_alone(traced: Rendered, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.touch()
    environ = traced.settings(container_of(traced.one("Deployment")["spec"]["template"]))
    own = {name: value for name, value in environ.items() if name.startswith("FENCEPOST_") and value}
    settings = Settings.from_env({**own, "FENCEPOST_INSTANCE": "pod", "FENCEPOST_RULES": str(rules)})
    assert settings.tracing == "otlp"
    assert {name for name in environ if not name.startswith("FENCEPOST_")} == {"OTEL_EXPORTER_OTLP_ENDPOINT"}
    assert open_ports(traced, "fencepost-traces") == {urlsplit(environ["OTEL_EXPORTER_OTLP_ENDPOINT"]).port}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(traced: Rendered, version: str) -> None:
    for found in traced.objects:
        check(found, version)


def test_the_image_has_what_it_needs_and_the_overlay_names_it() -> None:
    assert "--extra tracing" in (HERE.parents[1] / "Dockerfile").read_text()
    assert "# - ../../components/tracing " in (HERE / "overlays" / "prod" / "kustomization.yaml").read_text()
