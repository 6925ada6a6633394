"""Tests every rendered object against the schema of Kubernetes or its operator: no unknown and no misspelt field."""

from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate import SchemaNotFoundError, ValidationError

from tests.kubernetes.rendering import Object, Rendered
from tests.kubernetes.schemas import CUSTOM, of_custom

# The oldest version with all used fields (preStop's sleep), and the newest version with schemas.
VERSIONS: Final = ("1.30", "1.37")


def check(found: Object, version: str) -> None:
    """Raise ValidationError if the object does not match its schema."""
    name = found["apiVersion"], found["kind"]
    if name in CUSTOM:
        jsonschema.Draft202012Validator(of_custom(*name)).validate(found)
        return
    try:
        kubernetes_validate.validate(dict(found), version, strict=True)
    except SchemaNotFoundError:
        pytest.fail(f"no schema for {name}")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_of_an_overlay_fits_its_schema(rendered: Rendered, version: str) -> None:
    for found in rendered.objects:
        check(found, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_with_the_spark_operator_fits_its_schema(operated: Rendered, version: str) -> None:
    for found in operated.objects:
        check(found, version)


def test_a_misspelt_field_is_found(prod: Rendered) -> None:
    for kind, wrong in (("Deployment", ValidationError), ("ServiceMonitor", jsonschema.ValidationError)):
        found = dict(prod.one(kind))
        check(found, VERSIONS[-1])
        spec: dict[str, Any] = {**found["spec"], "replica": 3}
        with pytest.raises(wrong):
            check({**found, "spec": spec}, VERSIONS[-1])


def test_names_are_used_once(rendered: Rendered) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in rendered.objects]
    assert len(names) == len(set(names))


def test_all_is_in_the_overlays_namespace(rendered: Rendered) -> None:
    (namespace,) = rendered.of("Namespace")
    outside = {(found["kind"], found["metadata"].get("namespace")) for found in rendered.objects}
    assert outside == {(kind, namespace) for kind, _ in outside if kind != "Namespace"} | {("Namespace", None)}
