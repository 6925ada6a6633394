"""Tests `./tests/run`: the tests without service.native, and the kept results."""

import ast
import subprocess
from pathlib import Path

from deploy.places import ROOT

RUN = (ROOT / "tests" / "run").read_text().replace("\\\n", " ")


def uses_native(module: Path) -> bool:
    """Check whether a module imports service.native, for which there is an implementation in Python too."""
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.ImportFrom(module="service", names=names) if any(each.name == "native" for each in names):
                return True
            case ast.ImportFrom(module=str(name)) if name.startswith("service.native"):
                return True
    return False


def test_every_module_that_uses_service_native_is_tested_without_it_too() -> None:
    line = next(line for line in RUN.splitlines() if line.strip().startswith("WITHOUT_NATIVE=1"))
    targets = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {line.partition('--quiet')[2]}"], capture_output=True, text=True, check=True
    ).stdout.split()
    modules = {path for path in (ROOT / "service").glob("*/*.py") if uses_native(path)}
    assert "records" in {path.stem for path in modules}
    for module in modules:
        folder = f"tests/unit/{module.parent.name}"
        assert {folder, f"{folder}/test_{module.stem}.py"} & set(targets), module
    assert "tests/unit/native" in targets
    assert all((ROOT / target).exists() for target in targets if target.startswith("tests/"))


def test_the_results_that_a_run_keeps_are_ignored_by_git() -> None:
    kept = [word for word in RUN.split() if word.endswith(".xml")]
    assert len(kept) == 2
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {f"{name.partition('/')[0]}/" for name in kept} <= set(ignored)
