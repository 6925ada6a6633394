"""`python -m tests.identity`: fetches Keycloak, and runs the tests that need a real issuer of tokens."""

import os
import sys

import pytest

from deploy import console
from deploy.install import jars
from tests.identity import LOCK, TESTS


def main() -> int:
    jars.ensure(jars.read_lock("identity", LOCK))
    os.environ["TEST_IDENTITY"] = "1"
    return pytest.main([*TESTS, *sys.argv[1:]])


if __name__ == "__main__":
    console.run(main)
