"""A lake on S3: `python -m tests.s3` fetches what it needs, and runs the tests of it on a server with S3's protocol.

`./tests/run` leaves these tests out: a JVM of their own needs further jars on its class path.
"""

import os
from typing import Final

BUCKET: Final = "lakes"
WHY_NOT: Final = "it needs Spark with the jars for S3: python -m tests.s3 fetches them and runs this test"


def is_wanted() -> bool:
    """Check whether this run is to use S3."""
    return bool(os.environ.get("TEST_S3"))
