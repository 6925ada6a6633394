"""Tests the names that applications import."""

import importlib

import pytest

from service import fencepost


def test_every_name_is_that_of_a_module() -> None:
    for part in ("client", "reader", "group_reader"):
        module = importlib.import_module(f"service.fencepost.{part}")
        assert set(module.__all__) <= set(fencepost.__all__)
        assert all(getattr(fencepost, name) is getattr(module, name) for name in module.__all__)
    assert set(fencepost.__all__) <= set(dir(fencepost))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'follow'"):
        fencepost.__getattr__("follow")
