"""Provides one cluster at a time for rows and soak. A test leaves the cluster healthy, or has it dropped."""

from collections.abc import Iterator

import pytest

from tests.faults.matrix import Clusters


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    with Clusters(tmp_path_factory.mktemp("clusters")) as clusters:
        yield clusters
