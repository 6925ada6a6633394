"""Tests that every object has the labels that Kubernetes recommends."""

from typing import Final

from tests.kubernetes.rendering import Rendered

# https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/
RECOMMENDED: Final = {f"app.kubernetes.io/{name}" for name in ("instance", "managed-by", "name", "part-of", "version")}


def lacking(rendered: Rendered) -> dict[str, set[str]]:
    """Return the labels that objects and pods lack, by kind and name."""
    found = {
        f"{each['kind']}/{each['metadata']['name']}": RECOMMENDED - set(each["metadata"].get("labels", ()))
        for each in rendered.objects
        if each["kind"] != "Namespace"
    }
    for name, pod in rendered.pods():
        found[f"pods of {name}"] = {*RECOMMENDED, "app.kubernetes.io/component"} - set(pod["metadata"]["labels"])
    return {name: labels for name, labels in found.items() if labels}


def test_every_object_and_pod_has_the_recommended_labels(
    rendered: Rendered, operated: Rendered, followed: Rendered
) -> None:
    assert lacking(rendered) == {}
    assert lacking(followed) == {}
    assert lacking(operated) == {}


def test_the_version_is_the_images_tag(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        (container,) = pod["spec"]["containers"]
        assert pod["metadata"]["labels"]["app.kubernetes.io/version"] == container["image"].rpartition(":")[2], name
