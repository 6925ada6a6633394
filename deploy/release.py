"""Prints a release's part of the changelog, after a check of every version: `python -m deploy.release v0.1.0`."""

import re
import sys
import tomllib
from collections.abc import Mapping
from typing import Final

import yaml

from deploy.console import StackError, run, say
from deploy.places import ROOT

CHANGELOG: Final = ROOT / "deploy" / "CHANGELOG.md"
UNRELEASED: Final = "Unreleased"
_HEADING: Final = re.compile(r"^## (.+)$", re.MULTILINE)


def version() -> str:
    """Return the version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def versions() -> Mapping[str, str]:
    """Return what else names the version, by file and field."""
    found = {}
    overlay = ROOT / "deploy" / "kubernetes" / "overlays" / "prod" / "kustomization.yaml"
    body = yaml.safe_load(overlay.read_text())
    for image in body["images"]:
        found[f"{overlay.relative_to(ROOT)} {image['newName']}"] = str(image["newTag"])
    for each in body["labels"]:
        found[f"{overlay.relative_to(ROOT)} labels"] = str(each["pairs"]["app.kubernetes.io/version"])
    chart = ROOT / "deploy" / "helm" / "fencepost" / "Chart.yaml"
    fields = yaml.safe_load(chart.read_text())
    return found | {f"{chart.relative_to(ROOT)} {name}": str(fields[name]) for name in ("version", "appVersion")}


def sections(text: str) -> Mapping[str, str]:
    """Return the sections of a changelog, by their headings' versions."""
    parts = _HEADING.split(text)[1:]
    return {title: body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}


def notes(tag: str) -> str:
    """Return the notes of the release with this tag.

    Raises:
        StackError: the tag, the versions and the changelog do not agree; the text names each difference.
    """
    wanted = tag.removeprefix("v")
    faults = [] if tag.startswith("v") else [f"the tag {tag} does not begin with v"]
    faults += [f"pyproject.toml has version {version()}: set {wanted}"] if version() != wanted else []
    faults += [f"{where} has version {found}: set {wanted}" for where, found in versions().items() if found != wanted]
    changes = sections(CHANGELOG.read_text(encoding="utf-8"))
    if wanted not in changes:
        faults.append(f"deploy/CHANGELOG.md has no section {wanted}: name {UNRELEASED} so")
    if faults:
        raise StackError("\n".join(faults))
    return changes[wanted]


def main() -> int:
    if len(sys.argv) != 2:
        raise StackError("give the tag of the release: python -m deploy.release v0.1.0")
    say(notes(sys.argv[1]))
    return 0


if __name__ == "__main__":
    run(main)
