"""`python -m tests.s3`: fetches the jars for S3, builds the log store, and runs the tests of a lake on S3."""

import os
import sys
from typing import Final

import pytest

from deploy import console
from deploy.install import s3

# The tests of the log store have JVMs of their own, and come first: once PySpark has a session, it explains the errors
# of any JVM by that of its session.
IN_ORDER: Final = ("tests/s3/test_log_store.py", "tests/s3/test_lake.py")


def main() -> int:
    s3.ensure()
    os.environ["TEST_S3"] = "1"
    return pytest.main([*IN_ORDER, *sys.argv[1:]])


if __name__ == "__main__":
    console.run(main)
