"""Tests the components by which callers outside the cluster reach the service: TLS, and the paths of the API only."""

import json
from typing import Any, Final

import jsonschema
import pytest
import yaml

from deploy.places import ROOT
from service.http.produce_v3 import V3_PREFIXES
from tests import go_tools
from tests.kubernetes.rendering import HERE, Object, Rendered, container_of, render_with
from tests.kubernetes.test_code import selects
from tests.kubernetes.test_labels import lacking
from tests.kubernetes.test_schemas import VERSIONS, check

# What operators and browsers in the cluster ask for, which would tell outsiders about the service.
INTERNAL: Final = {"/livez", "/readyz", "/startupz", "/metrics", "/docs", "/openapi.json"}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered("prod", render_with("prod", tmp_path_factory.mktemp("outside"), "ingress", "gateway"))


def prefixes(outside: Rendered, kind: str) -> set[str]:
    """Return the path prefixes that an Ingress or an HTTPRoute passes on."""
    spec = outside.one(kind)["spec"]
    (rule,) = spec["rules"]
    if kind == "Ingress":
        assert {path["pathType"] for path in rule["http"]["paths"]} == {"Prefix"}
        return {path["path"] for path in rule["http"]["paths"]}
    assert {match["path"]["type"] for match in rule["matches"]} == {"PathPrefix"}
    return {match["path"]["value"] for match in rule["matches"]}


def passes(path: str, allowed: set[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in allowed)


@pytest.mark.parametrize("kind", ["Ingress", "HTTPRoute"])
def test_every_path_of_the_api_is_passed_on_and_no_other(outside: Rendered, kind: str) -> None:
    documented = set(json.loads((ROOT / "service" / "http" / "openapi.json").read_text())["paths"])
    of_v3 = {path for path in documented if path.startswith("/v3")}
    paths = documented | {f"{prefix}{path}" for prefix in V3_PREFIXES for path in of_v3} | INTERNAL
    allowed = prefixes(outside, kind)
    assert {path for path in paths if not passes(path, allowed)} == INTERNAL
    assert all(any(passes(path, {prefix}) for path in paths) for prefix in allowed)


def test_callers_are_served_over_tls_only(outside: Rendered) -> None:
    ingress = outside.one("Ingress")["spec"]
    assert [rule["host"] for rule in ingress["rules"]] == [host for tls in ingress["tls"] for host in tls["hosts"]]
    assert all(tls["secretName"] for tls in ingress["tls"])
    (listener,) = outside.one("Gateway")["spec"]["listeners"]
    assert (listener["protocol"], listener["tls"]["mode"]) == ("HTTPS", "Terminate")
    assert [each["kind"] for each in listener["tls"]["certificateRefs"]] == ["Secret"]
    (parent,) = outside.one("HTTPRoute")["spec"]["parentRefs"]
    assert (parent["name"], parent["sectionName"]) == (outside.one("Gateway")["metadata"]["name"], listener["name"])
    assert outside.one("HTTPRoute")["spec"]["hostnames"] == [listener["hostname"]]


def test_both_lead_to_a_port_of_the_service(outside: Rendered) -> None:
    (port,) = outside.one("Service")["spec"]["ports"]
    for path in outside.one("Ingress")["spec"]["rules"][0]["http"]["paths"]:
        assert path["backend"]["service"] == {"name": "fencepost", "port": {"name": port["name"]}}
    (backend,) = outside.one("HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend == {"name": "fencepost", "port": port["port"]}


@pytest.mark.parametrize("policy", ["fencepost-ingress", "fencepost-gateway"])
def test_the_proxies_may_connect_to_the_service_alone(outside: Rendered, policy: str) -> None:
    spec: Any = outside.one("NetworkPolicy", policy)["spec"]
    pods: dict[str, Object] = dict(outside.pods())
    selected = [name for name, pod in pods.items() if selects(spec["podSelector"], pod["metadata"]["labels"])]
    assert selected == ["Deployment/fencepost"]
    (rule,) = spec["ingress"]
    assert rule["from"]
    (port,) = container_of(pods["Deployment/fencepost"])["ports"]
    assert [each["port"] for each in rule["ports"]] == [port["name"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(outside: Rendered, version: str) -> None:
    for kind in ("Gateway", "HTTPRoute", "Ingress", "NetworkPolicy"):
        for found in outside.of(kind).values():
            check(found, version)


@pytest.mark.parametrize("kind", ["Gateway", "HTTPRoute"])
def test_the_gateway_api_s_own_schema_allows_the_objects(outside: Rendered, kind: str) -> None:
    folder = go_tools.have("gateway-api") / "config" / "crd" / "standard"
    definition = yaml.safe_load((folder / f"gateway.networking.k8s.io_{kind.lower()}s.yaml").read_text())
    (schema,) = (each["schema"]["openAPIV3Schema"] for each in definition["spec"]["versions"] if each["name"] == "v1")
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(outside.one(kind))
    # The API server drops unknown fields, or refuses them.
    assert unknown(outside.one(kind), schema) == []
    assert unknown({"spec": {"hostname": "x"}}, schema) == ["spec.hostname"]


def unknown(found: Any, schema: Any, where: str = "") -> list[str]:
    """List the fields that a schema of a CustomResourceDefinition does not have."""
    if isinstance(found, list):
        return [name for each in found for name in unknown(each, schema.get("items", {}), where)]
    if not isinstance(found, dict) or "properties" not in schema:
        return []
    names: list[str] = []
    for name, each in found.items():
        own = schema["properties"].get(name)
        names += [f"{where}{name}"] if own is None else unknown(each, own, f"{where}{name}.")
    return names


def test_every_object_has_the_labels_and_the_overlay_names_the_components(outside: Rendered) -> None:
    assert lacking(outside) == {}
    text = (HERE / "overlays" / "prod" / "kustomization.yaml").read_text()
    assert all(f"# - ../../components/{name} " in text for name in ("ingress", "gateway"))
