"""Tests that the service uses few private names of its libraries, each with its reason and a test that pins it."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Final

import pytest

from deploy.places import ROOT
from tests.unit.test_private_names import is_private

# The private names of aiokafka, redis-py and uvicorn that are used or overridden. Their number only shrinks.
REASONS: Final = {
    "_brokers": "of aiokafka's ClusterMetadata: its `update_metadata` drops all topics that are not in a response",
    "_client": "of aiokafka's consumer, which has no parameter for its client",
    "_coordinator": "of aiokafka's consumer, which has no method for its member and generation in the group",
    "_last_action": "of aiokafka's connection, which closes itself where it seems idle",
    "_maybe_wait_metadata": "of aiokafka's client, whose consumer calls it before it assigns partitions",
    "_partitions": "of aiokafka's ClusterMetadata, as `_brokers`",
    "_requests": "of aiokafka's connection: responses come in the order of all requests, of both kinds",
    "_start_asgi_task": "of uvicorn's protocol, which has no other place where the next pipelined request starts",
}
LIBRARIES: Final = {"aiokafka", "redis", "uvicorn"}
# Of namedtuple, documented; and of asyncio's Semaphore, for a `repr`.
_OTHERS: Final = {"_asdict", "_fields", "_replace", "_value"}


def of_others(module: ast.Module) -> set[str]:
    """List the private names that a module takes from objects of other modules."""
    own, taken = set(), set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name) if is_of_self(node):
                own.add(name)
            case ast.Attribute(attr=name) if is_private(name):
                taken.add(name)
    return taken - own


def is_of_self(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def private_names(kind: type) -> set[str]:
    """List the private names of a class: its methods, and the attributes that they read or set."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_of_self(node)}
    return {name for name in functions | attributes if is_private(name)}


def inherited(kind: type) -> set[str]:
    """List the private names that a class of the service shares with a class of a library that it extends."""
    theirs = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]
    return private_names(kind) & set[str]().union(*map(private_names, theirs))


def classes_of_service() -> Iterator[type]:
    for path in sorted((ROOT / "service").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name == "__main__.py" or not any(library in path.read_text() for library in LIBRARIES):
            continue
        module = importlib.import_module(name.removesuffix(".__init__"))
        yield from (kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == name)


def used() -> set[str]:
    taken = [of_others(ast.parse(path.read_text())) for path in (ROOT / "service").rglob("*.py")]
    return set[str]().union(*taken, *map(inherited, classes_of_service())) - _OTHERS


def test_the_service_uses_no_other_private_name_of_a_library() -> None:
    assert used() == REASONS.keys()


@pytest.mark.parametrize("name", REASONS)
def test_each_private_name_of_a_library_is_pinned(name: str) -> None:
    """A version of the library that has the name no more fails a test, and not a service."""
    pins = [path.read_text() for path in (ROOT / "tests/unit").rglob("test_*_pins.py")]
    assert any(re.search(rf"\b{name}\b", text) for text in pins)


def test_a_private_name_is_found_by_its_use_and_by_its_override() -> None:
    assert of_others(ast.parse("class A:\n  _b = 1\n\na._b, self._d, super()._e\na._c = 1")) == {"_c"}

    class Session(importlib.import_module("aiokafka.client").AIOKafkaClient):  # type: ignore[misc]
        def _get_conn(self) -> None:
            self._own = self._conns

    assert inherited(Session) == {"_get_conn", "_conns"}
