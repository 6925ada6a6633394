"""Renders the manifests as a cluster would get them, and finds objects in them."""

import copy
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy.places import ROOT

HERE: Final = ROOT / "deploy" / "kubernetes"

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """All objects of one overlay."""

    name: str
    objects: tuple[Object, ...]

    def of(self, kind: str) -> dict[str, Object]:
        """Return the objects of a kind, by name."""
        return {found["metadata"]["name"]: found for found in self.objects if found["kind"] == kind}

    def one(self, kind: str, name: str = "fencepost") -> Object:
        """Return the object of this kind and name."""
        return self.of(kind)[name]

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Return every pod template, with the name of the object that creates such pods."""
        for found in self.objects:
            path = _TEMPLATES.get(found["kind"])
            if path is not None:
                template: Any = found
                for step in path:
                    template = template[step]
                yield f"{found['kind']}/{found['metadata']['name']}", template

    def settings(self, container: Object) -> dict[str, str]:
        """Return the environment of a container; '' for values that are not in the manifests."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= self.of("ConfigMap")[source["configMapRef"]["name"]]["data"]
        return found | {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}


def container_of(template: Object) -> Any:
    """Return the one container of a pod's template."""
    (container,) = template["spec"]["containers"]
    return container


_TEMPLATES: Final = {
    "Deployment": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}


def render(folder: Path) -> tuple[Object, ...]:
    """Run `kustomize build` for a folder. Raises AssertionError with what it says if it fails."""
    if shutil.which("kustomize"):
        command = ["kustomize", "build"]
    elif shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    else:
        pytest.fail("neither kustomize nor kubectl is on PATH: please install kubectl 1.27 or newer")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def render_with(overlay: str, scratch: Path, *components: str, first: Sequence[str] = ()) -> tuple[Object, ...]:
    """Make an overlay with further components, which are in a comment of its own file; `first` come before its own."""
    folder, scratch = HERE / "overlays" / overlay, scratch.resolve()  # relative paths do not work over links
    before, more = ([str(HERE / "components" / name) for name in names] for names in (first, components))
    body = yaml.safe_load((folder / "kustomization.yaml").read_text())

    def moved(path: str) -> str:
        target = (folder / path).resolve()
        if target.is_dir():
            return os.path.relpath(target, scratch)
        shutil.copy(target, scratch / path)  # Kustomize reads no file outside of the folder
        return path

    body["resources"] = [moved(path) for path in body["resources"]]
    body["components"] = [moved(path) for path in [*before, *body.get("components", []), *more]]
    (scratch / "kustomization.yaml").write_text(yaml.safe_dump(body))
    return render(scratch)


def without(template: Object, *path: str | int) -> Object:
    """Return a copy without one object, for tests of the checks."""
    changed: Any = copy.deepcopy(template)
    place = changed
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return changed  # type: ignore[no-any-return]
