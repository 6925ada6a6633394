"""Tests the built and installed wheel: it is complete, and its compiled modules are used."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.pythons import supported, uv

ROOT = Path(__file__).parents[2]
HEADERS = Path(sysconfig.get_path("include"), "Python.h")
# The sources of the compiled modules, which a wheel must not have.
SOURCES = {".pyx", ".pxi", ".c"}

pytestmark = pytest.mark.skipif(shutil.which("cc") is None or not HEADERS.exists(), reason="nothing to compile with")


def run(*command: object, **environment: str) -> str:
    """Run a command in a folder with nothing to import; returns its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the project's wheel from a copy, with installed packages, without compiler optimisation."""
    tree = tmp_path_factory.mktemp("tree")
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("service", "spark"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree / name)
    build = f"import os; os.chdir({str(tree)!r}); from setuptools.build_meta import build_wheel; build_wheel('dist')"
    run(sys.executable, "-c", build, CFLAGS="-O0")
    (made,) = (tree / "dist").glob("*.whl")
    return made


def test_the_wheel_has_all_files_of_its_packages_but_the_cython_sources(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compiled = {f"service/native/{name}{suffix}" for name in ("bodies", "heads", "records")}
    files = [path for folder in ("service", "spark") for path in (ROOT / folder).rglob("*") if path.is_file()]
    ours = {f"{path.relative_to(ROOT)}" for path in files if path.suffix not in {*SOURCES, ".so", ".pyc", ".md"}}
    # What applications import has a name of its own.
    assert packed == {name.removeprefix("service/" * name.startswith("service/fencepost/")) for name in ours} | compiled


def test_its_metadata_name_authors_license_and_pythons(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert (metadata["Author"], metadata["License-Expression"]) == ("The Fencepost authors", "Apache-2.0")
    oldest, newest = supported()[0], supported()[-1]
    assert metadata["Requires-Python"] == f"<3.{int(newest.removeprefix('3.')) + 1},>={oldest}"


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_installed_it_runs_its_inner_loops_in_c(wheel: Path, installer: str, tmp_path: Path) -> None:
    """pip and uv set the times of files in different ways: nothing may depend on them."""
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    if installer == "uv":
        run(sys.executable, "-m", "venv", "--without-pip", venv)
        run(uv(), "pip", "install", "--quiet", "--no-deps", "--no-index", "--python", python, wheel)
    elif importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python has no pip to put into a venv")
    else:
        run(sys.executable, "-m", "venv", venv)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    said = run(python, "-c", "from service import native; print(native.COMPILED, native.__file__)")
    compiled, _, where = said.partition(" ")
    assert Path(where).is_relative_to(venv)
    assert compiled == "True"


# What an application reaches with an extra, in an environment with nothing else.
IMPORTS = {
    "reader": """
import importlib.util, sys
from fencepost import Bounds, Overtaken, Reader, ReaderPosition, ReaderStore, Record, Saved, id_of
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"service", "spark"}, loaded
assert not any(map(importlib.util.find_spec, ("fastapi", "redis", "pyspark", "msgspec", "uvicorn")))
print(Reader.__module__)
""",
    "client": """
import importlib.util, sys
from fencepost import AsyncClient, Client, Event, KeyExpired, Refused, SendError, Spool, Unsettled, Written
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"aiokafka", "service", "spark"}, loaded
assert not any(map(importlib.util.find_spec, ("aiokafka", "fastapi", "redis", "pyspark", "msgspec", "uvicorn")))
print(Client.__module__)
""",
    "none": """
import fencepost
assert {"Client", "Reader"} <= set(dir(fencepost))
for name in ("Client", "Reader", "GroupReader"):
    try:
        getattr(fencepost, name)
    except ImportError as error:
        print(error)
""",
}


@pytest.mark.parametrize(
    ("extra", "printed"),
    [
        ("reader", "fencepost.reader"),
        ("client", "fencepost.client.client"),
        (
            "none",
            "Client needs httpx: pip install 'fencepost[client]'\n"
            "Reader needs aiokafka: pip install 'fencepost[reader]'\n"
            "GroupReader needs aiokafka: pip install 'fencepost[client,reader]'",
        ),
    ],
)
def test_an_application_imports_fencepost_with_only_its_extra(
    wheel: Path, extra: str, printed: str, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    if extra != "none":
        locked = ("sync", "--quiet", "--frozen", "--no-dev", "--no-install-project", "--extra", extra)
        run(uv(), *locked, "--project", ROOT, "--python", python, UV_PROJECT_ENVIRONMENT=str(venv))
    run(uv(), "pip", "install", "--quiet", "--no-deps", "--no-index", "--python", python, wheel)
    assert run(python, "-c", IMPORTS[extra]) == printed
