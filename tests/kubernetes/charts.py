"""Runs Helm on the chart, and compares its objects with those of an overlay."""

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.places import ROOT
from tests import go_tools
from tests.kubernetes.rendering import Object

CHART: Final = ROOT / "deploy" / "helm" / "fencepost"
NAMESPACE: Final = "fencepost"
# A Helm that is not built by its makefile takes 1.20 for the version of a cluster that it does not ask.
KUBERNETES: Final = "1.30.0"

# Labels and annotations that differ between Helm and Kustomize, and the checksum by which Helm replaces pods where
# Kustomize gives a ConfigMap another name.
_OWN: Final = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "checksum/config",
    "fencepost/runbook",
    "helm.sh/chart",
    "helm.sh/resource-policy",
}
# A name with the hash that Kustomize adds, of its own alphabet.
_HASHED: Final = re.compile(r"(fencepost(?:-rules|-redis)?)-[2456789bcdfghkmt]{10}")


def values(name: str) -> Path:
    """Return the file of values `ci/NAME-values.yaml`."""
    return CHART / "ci" / f"{name}-values.yaml"


def helm(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run Helm; skips the test if there is none."""
    command = [go_tools.have("helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@cache
def template(*files: Path, release: str = "fencepost") -> tuple[Object, ...]:
    """Render the chart with these files of values, as an installation would."""
    done = try_template(CHART, *files, release=release)
    assert done.returncode == 0, done.stderr
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def try_template(chart: Path, *files: Path, release: str = "fencepost") -> "subprocess.CompletedProcess[str]":
    """Run `helm template`."""
    options = [part for file in files for part in ("--values", str(file))]
    return helm("template", release, chart, "--namespace", NAMESPACE, "--kube-version", KUBERNETES, *options)


def comparable(objects: Iterable[Object]) -> dict[str, Any]:
    """Return objects by kind and name, without what Helm and Kustomize do in ways of their own, and the namespace."""
    found = {}
    for each in objects:
        body = _comparable(each)
        body["metadata"].pop("namespace", None)
        if each["kind"] != "Namespace":
            found[f"{body['kind']}/{body['metadata']['name']}"] = body
    return found


def _comparable(part: Any) -> Any:
    if isinstance(part, str):
        hashed = _HASHED.fullmatch(part)
        return hashed[1] if hashed else part
    if isinstance(part, list):
        return [_comparable(each) for each in part]
    if not isinstance(part, dict):
        return part
    made = {name: _comparable(each) for name, each in part.items() if name not in _OWN}
    return {name: each for name, each in made.items() if each or name not in ("annotations", "labels", "matchLabels")}
