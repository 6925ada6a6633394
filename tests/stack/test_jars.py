"""Tests that jars are taken only with the locked checksum, complete, and by their exact names."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.console import StackError
from deploy.install import fetchers, jars
from deploy.install.fetchers import Artifact, FetchError
from deploy.install.jars import Jar
from spark.engine.jars import S3_LOCK, find_s3, locked, log_store, needs_s3
from spark.errors import CannotRun
from tests import kafka_versions

GOOD = b"the right bytes"
OLDER = Path(kafka_versions.__file__).parent


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_CACHE", str(tmp_path / "cache"))


def _jar(artifact: str, content: bytes = GOOD) -> Jar:
    return Jar("kafka", "org.example", artifact, "1.0", hashlib.sha256(content).hexdigest())


class Brings:
    """A fetcher that returns the same bytes for every jar, and counts its calls."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.fetched: list[str] = []

    def __call__(self, artifacts: Sequence[Artifact], folder: Path) -> None:
        for each in artifacts:
            target = folder / each.kind / f"{each.artifact}-{each.version}.jar"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(self.content)
            self.fetched.append(each.artifact)


def fails(artifacts: Sequence[Artifact], folder: Path) -> None:
    raise FetchError("the line is dead")


def test_a_jar_is_fetched_once(tmp_path: Path) -> None:
    way = Brings(GOOD)
    jars.ensure([_jar("a")], [way])
    jars.ensure([_jar("a"), _jar("b")], [way])
    assert way.fetched == ["a", "b"]
    assert _jar("a").path == tmp_path / "cache" / "jars" / "kafka" / "a-1.0.jar"
    assert _jar("a").path.read_bytes() == GOOD


def test_a_jar_with_another_checksum_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"org\.example:b:1\.0 was refused: expected sha256 [0-9a-f]{64}, got sha256"):
        jars.ensure([_jar("a"), _jar("b", b"other bytes")], [Brings(GOOD)])
    assert list((tmp_path / "cache").rglob("*.jar")) == []


def test_a_damaged_jar_in_the_cache_is_fetched_anew() -> None:
    jars.ensure([_jar("a")], [Brings(GOOD)])
    _jar("a").path.write_bytes(b"half of")
    jars.ensure([_jar("a")], [Brings(GOOD)])
    assert _jar("a").path.read_bytes() == GOOD


def test_the_next_way_is_tried_when_onefails() -> None:
    jars.ensure([_jar("a")], [fails, Brings(GOOD)])
    assert _jar("a").path.read_bytes() == GOOD


def test_when_every_wayfails_the_error_says_why() -> None:
    with pytest.raises(StackError, match="the line is dead"):
        jars.ensure([_jar("a")], [fails])


def test_the_lock_files_name_both_kinds_and_no_jar_twice() -> None:
    names = [(jar.kind, jar.file) for jar in jars.locked()]
    assert len(names) == len(set(names))
    assert ("kafka", "kafka_2.13-4.4.0.jar") in names
    assert ("spark", "delta-spark_4.2_2.13-4.4.0.jar") in names


def test_each_supported_kafka_has_one_lock_and_the_stacks_is_the_newest() -> None:
    releases = [tuple(map(int, release.split("."))) for release in kafka_versions.LOCKS]
    assert kafka_versions.LOCKS.keys() == {*(path.stem for path in OLDER.glob("*.lock")), kafka_versions.running()}
    assert max(releases) == releases[-1] == tuple(map(int, kafka_versions.running().split(".")))
    for lock in kafka_versions.LOCKS.values():
        files = [jar.file for jar in jars.read_lock("kafka", lock)]
        assert len(files) == len(set(files)), lock


def test_a_lock_file_with_a_bad_line_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    lock.write_text("# fine\nnot a line\n")
    with pytest.raises(StackError, match=r"x\.lock:2"):
        jars.read_lock("kafka", lock)


def test_hadoop_aws_is_of_the_hadoop_in_pyspark() -> None:
    ivy = fetchers.ivy_jar()
    assert ivy is not None
    (hadoop,) = ivy.parent.glob("hadoop-client-api-*.jar")
    (aws,) = [jar for jar in jars.read_lock("spark", S3_LOCK) if jar.artifact == "hadoop-aws"]
    assert hadoop.name == f"hadoop-client-api-{aws.version}.jar"


def test_a_url_on_s3_needs_the_jars_of_its_lock_and_the_log_store_of_its_source(tmp_path: Path) -> None:
    assert needs_s3(["lake", "S3A://bucket/report"])
    assert not needs_s3(["/s3a:/lake", "hdfs://name/lake"])
    for name in locked(S3_LOCK):
        (tmp_path / name).touch()
    (tmp_path / log_store("000000000000")).touch()
    with pytest.raises(CannotRun, match=rf"missing in [^:]*: {log_store()}; run python -m deploy.install.s3 once"):
        find_s3({"FENCEPOST_JARS": str(tmp_path)})
    (tmp_path / log_store()).touch()
    assert len(find_s3({"FENCEPOST_JARS": str(tmp_path)})) == len(locked(S3_LOCK)) + 1
