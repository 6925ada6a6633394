"""Tests that only the suites `contract` and `model` use private names of the product, with listed exceptions."""

import ast
import re
from collections.abc import Iterator

from deploy.places import ROOT

# How many private names of the product the files of a folder still use, each counted once for a file. The numbers only
# shrink: lower one when a use is removed; a test that needs another name wants a public name or a parameter.
ALLOWED: dict[str, int] = {
    "integration": 1,
    "kubernetes": 2,
    "spark": 3,
    "unit": 8,
    "unit/claims": 3,
    "unit/core": 2,
    "unit/events": 2,
    "unit/http": 7,
    "unit/kafka": 15,
    "unit/pipeline": 22,
    "unit/slots": 7,
}
# Pins are about the private names of libraries; mutants leave out a rule from inside.
_FREE = re.compile(r"contract/|model/|.*_pins\.py|integration/faulty\.py|spark/mutants\.py")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """List every name that a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def used(tree: ast.AST) -> Iterator[str]:
    """List every name that is taken from another object or module, or patched there by its text."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=names):
                yield from (each.name for each in names)
            case (
                ast.Call(args=[_, ast.Constant(value=str(text)), *_])
                | ast.Call(args=[ast.Constant(value=str(text)), *_])
            ):
                yield text.rpartition(".")[2]


def reached(test: str, product: set[str]) -> set[str]:
    """Return the product's private names that a test's source uses."""
    return {name for name in used(ast.parse(test)) if is_private(name) and name in product}


def product_names() -> set[str]:
    files = [path for half in ("service", "spark") for path in (ROOT / half).rglob("*.py")]
    return {name for path in files for name in defined(ast.parse(path.read_text())) if is_private(name)}


def test_a_private_name_is_found_however_it_is_reached() -> None:
    product = {"_a", "_b", "_c", "_d"}
    text = "from service.x import _a\ny._b.z\nmonkeypatch.setattr(y, '_c', 1)\nself._d\ny._e\ny.__dict__\n"
    assert reached(text, product) == {"_a", "_b", "_c"}
    assert reached("monkeypatch.setattr('service.x._a', 1)", product) == {"_a"}


def uses() -> list[tuple[str, str, str]]:
    """List folder, file and private name for each use in a test."""
    product = product_names()
    files = {str(path.relative_to(ROOT / "tests")): path for path in sorted((ROOT / "tests").rglob("*.py"))}
    return [
        (file.rpartition("/")[0], file, name)
        for file, path in files.items()
        if not _FREE.match(file)
        for name in sorted(reached(path.read_text(), product))
    ]


def test_tests_reach_for_no_more_private_names_than_they_did() -> None:
    found = uses()
    for folder in sorted({folder for folder, _, _ in found}):
        names = [f"{file}: {name}" for where, file, name in found if where == folder]
        assert len(names) <= ALLOWED.get(folder, 0), f"{folder}: go by public names instead of\n" + "\n".join(names)
