"""Unpacks packages of another Debian release into a folder, with the libraries that they need.

Their programs run with their own C library, so the release need not be this machine's.
"""

import shutil
import subprocess
from pathlib import Path


class NotHere(Exception):
    """A program cannot be fetched on this machine."""


def unpack(folder: Path, suite: str, package: str) -> None:
    """Download a package with its dependencies, and unpack them into `folder`. Raises NotHere."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NotHere("Debian's packages need apt-get and dpkg-deb")
    _download(folder, suite, package)
    for packed in (folder / "cache" / "archives").glob("*.deb"):
        run(["dpkg-deb", "-x", str(packed), str(folder)])


def _download(folder: Path, suite: str, package: str) -> None:
    """Download a package and its dependencies from a Debian release, apart from what is installed on this machine."""
    targets = run(["apt-get", "indextargets", "--format", "$(SITE) $(ORIGIN) $(LABEL)"])
    sites = [line.split()[0] for line in targets.splitlines() if line.endswith(" Debian Debian")]
    if not sites:
        raise NotHere("no Debian mirror is configured, or apt-get update has not run yet")
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    suites = dict.fromkeys((suite.removesuffix("-backports"), suite))
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources.write_text("".join(f"deb [signed-by={keyring}] {sites[0]} {each} main\n" for each in suites))
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "--quiet", *(f"--option={key}={value}" for key, value in options.items())]
    run([*apt, "update"])
    install = ["install", "--download-only", "--yes", "--no-install-recommends", "--target-release", suite, package]
    run([*apt, *install])


def run(command: list[str]) -> str:
    """Run a command; returns its output. Raises NotHere with the last line of its error."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotHere(str(error)) from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotHere(f"{' '.join(command[:2])} failed: {lines[-1] if lines else done.returncode}")
    return done.stdout
