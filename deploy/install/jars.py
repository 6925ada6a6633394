"""Installs the jars of the broker and of Spark: locked by checksum, fetched once, kept in the user's cache."""

import contextlib
import fcntl
import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy import places
from deploy.console import StackError, progress
from deploy.install.fetchers import Fetcher, FetchError, fetchers

LOCKS = {"kafka": Path(__file__).with_name("kafka.lock"), "spark": places.ROOT / "spark" / "engine" / "jars.lock"}


@dataclass(frozen=True)
class Jar:
    """One line of a lock file, and the folder (kind) that its jar belongs to."""

    kind: str
    group: str
    artifact: str
    version: str
    sha256: str
    classifier: str = ""
    type: str = "jar"

    @property
    def file(self) -> str:
        return f"{self.artifact}-{self.version}{self.classifier and f'-{self.classifier}'}.{self.type}"

    @property
    def path(self) -> Path:
        return places.jars(self.kind) / self.file

    def is_right(self, path: Path) -> bool:
        """Check whether the file at `path` is this jar, by its checksum."""
        return path.is_file() and _sha256(path) == self.sha256


def read_lock(kind: str, path: Path) -> list[Jar]:
    """Read the jars of a lock file: lines of `sha256  group:artifact:version[:classifier:type]`, and comments.

    Raises:
        StackError: a line is neither.
    """
    jars = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            checksum, name = line.split()
            group, artifact, version, *more = name.split(":")
            classifier, type = more or ("", "jar")
        except ValueError:
            raise StackError(f"{path}:{number}: expected `sha256  group:artifact:version`, got {line!r}") from None
        jars.append(Jar(kind, group, artifact, version, checksum, classifier, type))
    return jars


def locked(locks: Mapping[str, Path] = LOCKS) -> list[Jar]:
    """List every jar of every lock file."""
    return [jar for kind, path in locks.items() for jar in read_lock(kind, path)]


def ensure(jars: Sequence[Jar] | None = None, ways: Sequence[Fetcher] | None = None) -> None:
    """Fetch the jars that the cache lacks, all at once, and check their checksums.

    Args:
        jars: the wanted jars; default: all locked jars.
        ways: the fetchers, tried in this order; default: Maven and Ivy, if they are installed.

    Raises:
        StackError: all fetchers failed, or a jar has another checksum (then none is kept).
    """
    wanted = locked() if jars is None else jars
    if not _missing(wanted):
        return
    with _lock(places.cache()):
        missing = _missing(wanted)  # another process may have fetched them while this one waited for the lock
        if not missing:
            return
        with (
            progress(f"fetching {len(missing)} jars into {places.cache()}"),
            tempfile.TemporaryDirectory(prefix="fetch-", dir=places.cache()) as scratch,
        ):
            _fetch(missing, Path(scratch), fetchers() if ways is None else ways)
            _place(missing, Path(scratch))


def classpath(kind: str) -> str:
    """Make the class path of a kind from the lock file; other files in the folder are ignored."""
    return ":".join(str(jar.path) for jar in read_lock(kind, LOCKS[kind]))


def _missing(jars: Sequence[Jar]) -> list[Jar]:
    return [jar for jar in jars if not jar.is_right(jar.path)]


def _fetch(jars: Sequence[Jar], folder: Path, ways: Sequence[Fetcher]) -> None:
    """Fetch into `folder`/kind by the first fetcher that succeeds."""
    errors = []
    for way in ways:
        try:
            way(jars, folder)
        except FetchError as error:
            errors.append(str(error))
        else:
            return
    raise StackError("\n".join(errors) or "nothing here can fetch jars: please install Maven")


def _place(jars: Sequence[Jar], folder: Path) -> None:
    """Check all jars, then move each atomically into the cache."""
    wrong = [jar for jar in jars if not jar.is_right(folder / jar.kind / jar.file)]
    if wrong:
        raise StackError("\n".join(_complaint(jar, folder / jar.kind / jar.file) for jar in wrong))
    for jar in jars:
        jar.path.parent.mkdir(parents=True, exist_ok=True)
        (folder / jar.kind / jar.file).replace(jar.path)


def _complaint(jar: Jar, path: Path) -> str:
    got = f"sha256 {_sha256(path)}" if path.is_file() else "nothing"
    return f"{jar.group}:{jar.artifact}:{jar.version} was refused: expected sha256 {jar.sha256}, got {got}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache: one process at a time fetches into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
