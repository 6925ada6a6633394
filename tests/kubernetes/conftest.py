"""Renders each overlay once."""

from functools import cache

import pytest

from tests.kubernetes.rendering import HERE, Rendered, render, render_with

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
def managed(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The production overlay with a management port."""
    return Rendered("management", render_with("prod", tmp_path_factory.mktemp("managed"), "management-port"))


@pytest.fixture(scope="session")
def https(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The production overlay with HTTPS by the pods, and a management port."""
    return Rendered("https", render_with("prod", tmp_path_factory.mktemp("https"), "management-port", "https"))


@pytest.fixture(scope="session")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The production overlay with the Spark Operator instead of the CronJob."""
    return Rendered("spark-operator", render_with("prod", tmp_path_factory.mktemp("operated"), "spark-operator"))


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The production overlay with an audit that goes on, instead of the CronJob, and TLS to Kafka."""
    scratch = tmp_path_factory.mktemp("followed")
    return Rendered("follow", render_with("prod", scratch, "kafka-sasl-tls", first=["follow"]))


@pytest.fixture(scope="session", params=OVERLAYS)
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """Each of the overlays with TLS and passwords, to Kafka and to Redis."""
    scratch = tmp_path_factory.mktemp("secured")
    return Rendered(request.param, render_with(request.param, scratch, "kafka-sasl-tls", "redis-tls"))


@pytest.fixture(scope="session")
def secured_operated(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The production overlay with the Spark Operator and TLS."""
    scratch = tmp_path_factory.mktemp("secured-operated")
    return Rendered("operated", render_with("prod", scratch, "spark-operator", "kafka-sasl-tls", "redis-tls"))
