"""`python -m tests.s3`: fetches the jars for S3, builds the log store, and runs the tests of a lake on S3.

Usage: python -m tests.s3 [--server moto|s3proxy] [arguments of pytest]
"""

import argparse
import os
from typing import Final

import pytest

from deploy import console
from deploy.install import jars, s3
from tests.s3 import LOCK, SERVERS

# The tests of the log store have JVMs of their own, and come first: once PySpark has a session, it explains the errors
# of any JVM by that of its session.
IN_ORDER: Final = ("tests/s3/test_server.py", "tests/s3/test_log_store.py", "tests/s3/test_lake.py")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.s3", allow_abbrev=False)
    parser.add_argument("--server", choices=SERVERS, default=SERVERS[0], help="default: %(default)s")
    chosen, others = parser.parse_known_args()
    s3.ensure()
    if chosen.server == "s3proxy":
        jars.ensure(jars.read_lock("s3proxy", LOCK))
    os.environ["TEST_S3"] = chosen.server
    return pytest.main([*IN_ORDER, *others])


if __name__ == "__main__":
    console.run(main)
