"""A lake on S3: `python -m tests.s3` fetches what it needs, and runs the tests of it on a server with S3's protocol.

`./tests/run` leaves these tests out: a JVM of their own needs further jars on its class path.
"""

import os
from pathlib import Path
from typing import Final

BUCKET: Final = "lakes"
LOCK: Final = Path(__file__).with_name("s3proxy.lock")
SERVERS: Final = ("moto", "s3proxy")
WHY_NOT: Final = "it needs Spark with the jars for S3: python -m tests.s3 fetches them and runs this test"


def wanted() -> str:
    """Return the name of the server that this run is to use; "" if the run is to use none."""
    return os.environ.get("TEST_S3", "")
