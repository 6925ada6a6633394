"""The archive of the classes of a run's JVM: when it is recorded, and when it is used."""

import os
import time
from pathlib import Path

import pytest

from spark.engine import class_data, jars
from spark.engine.jvm import Py4JError

RELEASE = 'JAVA_VERSION="17.0.15"\n'


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An installation of a Java, and of the jars of lock and Spark."""
    for folder in ("java/bin", "jars", "spark"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "java" / "bin" / "java").touch()
    (tmp_path / "java" / "release").write_text(RELEASE)
    names = jars.locked()
    for path in (*(tmp_path / "jars" / name for name in names), tmp_path / "spark" / "core.jar"):
        path.write_bytes(b"jar")
    monkeypatch.setattr(jars, "of_spark", lambda: sorted((tmp_path / "spark").glob("*.jar")))
    return {"JAVA_HOME": str(tmp_path / "java"), "FENCEPOST_JARS": str(tmp_path / "jars")}


def archive(environ: dict[str, str]) -> Path:
    found = class_data.archive(environ)
    assert found is not None
    return found


class Jvm:
    """In place of a session, whose JVM writes an archive, or a part of it and then fails."""

    def __init__(self, options: str, *, fails: bool = False) -> None:
        self.conf = {"spark.driver.extraJavaOptions": options}
        self.fails = fails
        self.has_dumped = False

    def dump(self, path: str) -> None:
        self.has_dumped = True
        Path(path).write_bytes(b"cl" if self.fails else b"classes")
        if self.fails:
            raise Py4JError("no space left")


def record(jvm: Jvm, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_data, "dump_classes", lambda spark, path: jvm.dump(path))
    class_data.record(jvm, environ)  # type: ignore[arg-type]


def test_the_first_small_run_records_the_archive_and_the_next_ones_use_it(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert class_data.options(environ) == ""
    options = class_data.options_or_recording(environ)
    assert "RecordDynamicDumpInfo" in options
    old, others = (archive(environ).with_name(f"classes-{name}.jsa") for name in ("old", "others"))
    for path in (old, others):
        path.touch()
    os.utime(old, (0, time.time() - class_data.OTHERS_KEPT_S - 1))
    record(Jvm(options), environ, monkeypatch)
    assert set(archive(environ).parent.glob("classes*")) == {archive(environ), others}
    assert f'"-XX:SharedArchiveFile={archive(environ)}"' in class_data.options(environ)
    assert class_data.options_or_recording(environ) == class_data.options(environ)
    jvm = Jvm(class_data.options(environ))
    record(jvm, environ, monkeypatch)
    assert not jvm.has_dumped


def test_an_archive_that_is_not_whole_is_not_kept(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    record(Jvm(class_data.options_or_recording(environ), fails=True), environ, monkeypatch)
    assert not list(archive(environ).parent.glob("classes*"))
    assert class_data.options(environ) == ""


def test_an_archive_is_of_one_java_and_its_jars(environ: dict[str, str], tmp_path: Path) -> None:
    archive(environ).touch()
    assert class_data.options(environ)
    (tmp_path / "java" / "release").write_text(RELEASE.replace("15", "16"))
    assert class_data.options(environ) == ""
    (tmp_path / "java" / "release").write_text(RELEASE)
    assert class_data.options(environ)
    (tmp_path / "spark" / "core.jar").write_bytes(b"another")
    assert class_data.options(environ) == ""


def test_nothing_is_recorded_where_it_cannot_be_kept(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert class_data.options_or_recording(environ) == ""
    (tmp_path / "java" / "release").unlink()
    assert class_data.archive(environ) is None
    assert class_data.options_or_recording(environ) == ""
    monkeypatch.setenv("PATH", "")
    assert class_data.archive({**environ, "JAVA_HOME": ""}) is None
