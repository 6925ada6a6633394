"""Tests that pods keep to the restricted profile of the Pod Security Standards, and have a read-only root."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.rendering import Object, Rendered, without

# The used kinds of volumes that the profile allows.
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
FORBIDDEN_IN_PODS = ("hostNetwork", "hostPID", "hostIPC", "hostUsers")


def breaches(template: Object) -> Iterator[str]:
    """List the faults of a pod."""
    pod = template["spec"]
    yield from (name for name in FORBIDDEN_IN_PODS if pod.get(name))
    yield from (volume["name"] for volume in pod.get("volumes", ()) if not set(volume) - {"name"} <= VOLUMES)
    if pod.get("automountServiceAccountToken") is not False:
        yield "has a token"
    of_pod = pod.get("securityContext", {})
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        yield from of_container(container, of_pod)


def of_container(container: Object, of_pod: dict[str, Any]) -> Iterator[str]:
    own: dict[str, Any] = container.get("securityContext", {})
    both = {**of_pod, **own}
    if both.get("runAsNonRoot") is not True or not both.get("runAsUser") or not both.get("runAsGroup"):
        yield "may be root"
    if both.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "may get privileges"
    if own.get("capabilities") != {"drop": ["ALL"]}:
        yield "has capabilities"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "may write its root"
    if "memory" not in container["resources"]["limits"] or not {"cpu", "memory"} <= set(
        container["resources"]["requests"]
    ):
        yield "has no bounds"


def test_every_pod_is_restricted(rendered: Rendered, followed: Rendered) -> None:
    pods = dict(rendered.pods()) | dict(followed.pods())
    assert {"Deployment/fencepost", "CronJob/fencepost-audit", "Deployment/fencepost-audit"} <= set(pods)
    assert {name: list(breaches(pod)) for name, pod in pods.items()} == {name: [] for name in pods}


def test_the_pods_of_the_spark_operator_are_restricted(operated: Rendered) -> None:
    template = operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]
    for side in (template["driver"], template["executor"]):
        bounded = {"limits": {"memory": side["memory"]}, "requests": {"memory": side["memory"], "cpu": side["cores"]}}
        assert list(of_container({**side, "resources": bounded}, side["podSecurityContext"])) == []


def test_the_namespace_enforces_it(rendered: Rendered) -> None:
    (namespace,) = rendered.of("Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize(
    ("path", "breach"),
    [
        (("spec", "automountServiceAccountToken"), "has a token"),
        (("spec", "securityContext", "runAsNonRoot"), "may be root"),
        (("spec", "securityContext", "seccompProfile"), "no seccomp profile"),
        (("spec", "containers", 0, "securityContext", "allowPrivilegeEscalation"), "may get privileges"),
        (("spec", "containers", 0, "securityContext", "capabilities"), "has capabilities"),
        (("spec", "containers", 0, "securityContext", "readOnlyRootFilesystem"), "may write its root"),
        (("spec", "containers", 0, "resources", "limits", "memory"), "has no bounds"),
    ],
)
def test_a_breach_is_found(prod: Rendered, path: tuple[str | int, ...], breach: str) -> None:
    template = prod.one("Deployment")["spec"]["template"]
    assert list(breaches(without(template, *path))) == [breach]


def test_no_account_has_a_token_but_sparks_driver(rendered: Rendered, operated: Rendered) -> None:
    with_token = [
        name
        for each in (rendered, operated)
        for name, account in each.of("ServiceAccount").items()
        if account.get("automountServiceAccountToken") is not False
    ]
    assert with_token == ["fencepost-audit-driver"]


def test_only_sparks_driver_has_a_role(rendered: Rendered, operated: Rendered) -> None:
    assert not any(found["kind"].endswith(("Role", "RoleBinding")) for found in rendered.objects)
    (binding,) = operated.of("RoleBinding").values()
    assert [subject["name"] for subject in binding["subjects"]] == ["fencepost-audit-driver"]
