"""One cluster at a time for the rows and the soak: each leaves it as it found it, or has it dropped."""

from collections.abc import Iterator

import pytest

from tests.faults.matrix import Clusters


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    with Clusters(tmp_path_factory.mktemp("clusters")) as clusters:
        yield clusters
