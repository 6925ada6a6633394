"""One server with S3's protocol, two JVMs that commit to it, and one Spark session with the jars for S3."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from deploy import places
from spark.engine.session import open_session
from tests.s3 import BUCKET, WHY_NOT, backends, wanted
from tests.s3.server import Server
from tests.s3.writers import Writer
from tests.spark.conftest import audit as audit
from tests.spark.conftest import history as history
from tests.spark.runs import BRIEF_JAVA_OPTIONS, interpreted


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not wanted():
        pytest.skip(WHY_NOT)
    with backends.running(wanted(), tmp_path_factory.mktemp("s3")) as backend:
        running = Server(backend)
        yield running
        running.stop()


@pytest.fixture(scope="session")
def writers(server: Server) -> Iterator[tuple[Writer, Writer]]:
    with Writer(server.settings()) as first, Writer(server.settings()) as second:
        yield first, second


@pytest.fixture(scope="session")
def spark(server: Server) -> Iterator[SparkSession]:
    """The session that the job opens for a lake on S3."""
    environ = {"FENCEPOST_JARS": str(places.jars("spark"))}
    session = open_session(environ, BRIEF_JAVA_OPTIONS, [f"s3a://{BUCKET}"])
    for name, value in server.settings().items():
        session.sparkContext._jsc.hadoopConfiguration().set(name, value)
    with interpreted(session):
        yield session
    session.stop()


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """The URL of a lake that no other test has."""
    return f"s3a://{BUCKET}/{tmp_path.name}/lake"
