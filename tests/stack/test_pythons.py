"""Tests which versions of Python the package says that it runs on."""

import re
import tomllib
from typing import Any, Final

import pytest
from packaging.markers import Marker

from deploy.places import ROOT
from tests import pythons

PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK: Final[dict[str, Any]] = tomllib.loads((ROOT / "uv.lock").read_text())


def test_the_classifiers_name_each_supported_version_and_no_other() -> None:
    named = [name for name in PROJECT["classifiers"] if name.startswith("Programming Language :: Python :: 3.")]
    assert [name.rpartition(" ")[2] for name in named] == pythons.supported()


def test_the_command_runs_tests_that_there_are() -> None:
    assert all((ROOT / each).exists() for each in pythons.TESTS)


def tags(wheel: str) -> tuple[set[str], set[str], set[str]]:
    """Return the Pythons, ABIs and platforms of a wheel, by its file name (PEP 425)."""
    python, abi, platform = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    return set(python.split(".")), set(abi.split(".")), set(platform.split("."))


def fits(wheel: str, minor: int, machine: str) -> bool:
    """Whether a wheel installs on Linux with glibc, on CPython 3.`minor` (with the GIL)."""
    pythons_, abis, platforms = tags(wheel)
    if not any(each == "any" or (each.startswith("manylinux") and each.endswith(machine)) for each in platforms):
        return False
    if f"cp3{minor}" in abis or (abis == {"none"} and pythons_ & {"py3", f"py3{minor}", f"cp3{minor}"}):
        return True
    stable = [int(each.removeprefix("cp3")) for each in pythons_ if each.startswith("cp3")]
    return "abi3" in abis and any(oldest <= minor for oldest in stable)


@pytest.mark.parametrize(
    ("wheel", "expected"),
    [
        ("a-1-cp314-cp314-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp315-abi3-manylinux_2_17_x86_64.whl", False),
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py3-none-musllinux_1_2_x86_64.whl", False),
        ("a-1-py3-none-manylinux2014_aarch64.whl", False),
    ],
)
def test_a_wheel_fits_by_its_tags(wheel: str, expected: bool) -> None:
    assert fits(wheel, 14, "x86_64") is expected


def installed(extra: str, version: str, machine: str) -> set[str]:
    """List the packages that an extra installs on Linux, by name, with all that they need."""
    packages: dict[str, list[dict[str, Any]]] = {}
    for each in LOCK["package"]:
        packages.setdefault(each["name"], []).append(each)
    environment = {
        "python_version": version,
        "python_full_version": f"{version}.0",
        "sys_platform": "linux",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }

    def wanted(needs: list[dict[str, str]]) -> list[str]:
        return [each["name"] for each in needs if "marker" not in each or Marker(each["marker"]).evaluate(environment)]

    (own,) = packages["fencepost"]
    todo = wanted(own["optional-dependencies"][extra])
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [each for package in packages[name] for each in wanted(package.get("dependencies", []))]
    return found


# Packages that are built from their sources, which need no compiler.
PURE: Final = {"pyspark"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_every_package_of_an_extra_has_a_wheel_for_each_python(extra: str, machine: str) -> None:
    wheels: dict[str, list[str]] = {}
    for package in LOCK["package"]:
        names = [re.sub(r".*/", "", each["url"]) for each in package.get("wheels", ())]
        wheels.setdefault(package["name"], []).extend(names)
    lacking = {
        (name, version)
        for version in pythons.supported()
        for name in installed(extra, version, machine) - PURE
        if not any(fits(wheel, int(version.removeprefix("3.")), machine) for wheel in wheels[name])
    }
    assert lacking == set()
