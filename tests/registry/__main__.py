"""`python -m tests.registry`: fetches Apicurio Registry, and runs the tests that need a real Schema Registry."""

import os
import sys

import pytest

from deploy import console
from deploy.install import jars
from tests.registry import LOCK, TESTS


def main() -> int:
    jars.ensure(jars.read_lock("registry", LOCK))
    os.environ["TEST_REGISTRY"] = "1"
    return pytest.main([*TESTS, *sys.argv[1:]])


if __name__ == "__main__":
    console.run(main)
