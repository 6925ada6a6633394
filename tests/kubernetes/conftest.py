"""Each overlay rendered once."""

from functools import cache

import pytest

from tests.kubernetes.rendering import HERE, Rendered, render, render_with_spark_operator

OVERLAYS = ("dev", "prod")


@cache
def _overlay(name: str) -> Rendered:
    return Rendered(name, render(HERE / "overlays" / name))


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """Each of the overlays."""
    return _overlay(request.param)


@pytest.fixture
def prod() -> Rendered:
    """The overlay with monitoring."""
    return _overlay("prod")


@pytest.fixture(scope="session")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The production overlay with the Spark Operator in the place of the CronJob."""
    return Rendered("spark-operator", render_with_spark_operator("prod", tmp_path_factory.mktemp("operated")))
