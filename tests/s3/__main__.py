"""`python -m tests.s3`: fetches the jars for S3, builds the log store, and runs the tests of a lake on S3."""

import os
import sys

import pytest

from deploy import console
from deploy.install import s3


def main() -> int:
    s3.ensure()
    os.environ["TEST_S3"] = "1"
    return pytest.main(["tests/s3", *sys.argv[1:]])


if __name__ == "__main__":
    console.run(main)
