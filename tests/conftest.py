"""Fixtures for all tests: the real stack, started at its first use, and names that no other test has."""

import fnmatch
import gc
import os
import sys
import uuid
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import hypothesis
import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

from deploy import places
from deploy.install import java
from deploy.stack import Kafka, Redis
from deploy.stack.kafka import BRIEF
from tests import broker_classes, kafka_versions
from tests.minutes import MinutesByFolder, folder
from tests.secured import Authority, SecuredKafka, SecuredRedis

# WITHOUT_NATIVE: use the Python implementations only, as if there were no compiler; `tests/run` runs the fast tests so
# too.
if os.environ.get("WITHOUT_NATIVE"):
    sys.modules["service.native.bodies"] = None  # type: ignore[assignment] # an import of it fails

# No deadline: a busy machine would fail any test.
hypothesis.settings.register_profile("fencepost", deadline=None)
hypothesis.settings.load_profile("fencepost")

# The order of the folders: fast tests first, so that a mistake shows in seconds.
_ORDER = ("unit", "contract", "kubernetes", "model", "stack", "integration", "faults", "bench", "images", "spark")
# Folders whose tests run in one process, one after the other, because they load the machine.
_ALONE = ("faults", "bench", "images")
# Files of Spark that take 15 s or longer in a run, the longest first. The processes with Spark take them in this order
# and then the others, so that they end at the same time. The first one warms its JVM up: no story with open
# transactions, which time out. It has also taken the second and the third when another process begins to help, whose
# JVM is cold: test_planted_faults compiles the plans of a run.
LONG_SPARK_FILES: Final = (
    "test_runs",
    "test_changing_logs",
    "test_planted_faults",
    "test_generated",
    "test_growing_logs",
    "test_reconcile",
    "test_lake",
    "test_view",
    "test_sinks",
    "test_publish",
    "test_lifecycle",
    "test_changed_options",
    "test_wire_expressions",
    "test_classify",
    "test_cross_hour",
    "test_tls_and_sasl",
    "test_service",
    "test_report",
)

# The name that xdist gives the first process, which runs Spark (PYTEST_XDIST_WORKER).
FIRST_PROCESS: Final = "gw0"

# Variables of the caller that choose how the stack runs are kept.
_KEPT = ("FENCEPOST_CACHE", "FENCEPOST_REDIS_SERVER")


# Slow tests (`@pytest.mark.long`) run with `TEST_LONG=1 ./tests/run FOLDER`. In every run is a short version of each,
# or fast tests of its decisions.
LONG = bool(os.environ.get("TEST_LONG"))

# The time limit of a slow test that has no limit of its own. pyproject.toml has that of other tests.
LONG_LIMIT_S: Final = 1800


class MakeTopic(Protocol):
    """Creates a topic with a unique name, and returns the name."""

    def __call__(self, partitions: int = 1, config: Mapping[str, str] | None = None) -> str: ...


def pytest_configure(config: pytest.Config) -> None:
    """Remove the caller's settings from the environment, and let Spark use the stack's Java and this Python.

    Brokers run with the options of the fastest start, because tests start dozens of them. Requests to local servers use
    no proxy. Processes share the bytecode that the first one of them writes: each starts in half the time.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost", "::1")))
    for name in list(os.environ):
        if name.startswith((*places.OTHERS, "OTEL_")) and name not in _KEPT:
            del os.environ[name]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    kafka_versions.use()
    if home := java.find():
        os.environ["JAVA_HOME"] = str(home)
        broker_classes.use()
    Kafka.java_options = BRIEF
    if not hasattr(config, "workerinput"):  # a worker of xdist; the controller gets the reports of all tests
        config.pluginmanager.register(MinutesByFolder())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector, which leaves out the objects of the collected tests afterwards.

    These half a million objects last as long as the process, and each full collection would visit them all.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `long`, or give them their time limit if they are wanted. Sort by folder; in a folder,
    pytest's order stays, except that long files of Spark come last."""
    slow = [item for item in items if item.get_closest_marker("long")]
    if slow and not LONG:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    for item in slow:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_S))
    items.sort(key=lambda item: (_rank(folder(item.nodeid)), _rank_by_time(item.nodeid)))


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _rank_by_time(nodeid: str) -> int:
    """Rank a file by its time among the long files of Spark, from 1 for the shortest; 0 for other files."""
    name = Path(nodeid.partition("::")[0]).stem
    is_long = folder(nodeid) == "spark" and name in LONG_SPARK_FILES
    return len(LONG_SPARK_FILES) - LONG_SPARK_FILES.index(name) if is_long else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """With several processes, run all tests of a file in one of them."""
    return _FromBothEnds(config, log)


class _FromBothEnds(LoadScopeScheduling):  # type: ignore[misc]
    """Give the first process files from the end of the list, where those of Spark are, and the others from the start.

    As long as other files are left only the first process runs Spark, because each JVM with Spark takes minutes of
    processor time to warm up. Then a second one helps, also from the end, if enough of Spark's long files are left.
    """

    _HELPED_FILES: Final = 4
    _LAST_TESTS: Final = 2  # as many are left when xdist gives a process more work

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._helper: WorkerController | None = None

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if folder(nodeid) in _ALONE else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is self._helper or _runs_spark(node):
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if _runs_spark(node) or not self.workqueue or not all(map(_is_spark, self.workqueue)):
            super()._reschedule(node)
            return
        if self._pending_of(self.assigned_work[node]) > self._LAST_TESTS:
            return  # it is not the next one without work
        if self._helper is None and sum(_rank_by_time(scope) > 0 for scope in self.workqueue) >= self._HELPED_FILES:
            self._helper = node
        if node is self._helper:
            super()._reschedule(node)
        else:
            node.shutdown()


def _runs_spark(node: WorkerController) -> bool:
    return bool(node.gateway.id == FIRST_PROCESS)


def _is_spark(scope: str) -> bool:
    return folder(scope) == "spark"


def top_level(root: Path) -> set[str]:
    """List the files and folders in `root` that its .gitignore does not name."""
    ignored = {line.strip("/") for line in (root / ".gitignore").read_text().splitlines()}
    return {path.name for path in root.iterdir() if not any(fnmatch.fnmatch(path.name, each) for each in ignored)}


@pytest.fixture(scope="session", autouse=True)
def _top_level_stays() -> Iterator[None]:
    """Check that no test leaves a file in the project's top folder, such as one that a server saves there."""
    before = top_level(places.ROOT)
    yield
    left = sorted(top_level(places.ROOT) - before)
    assert not left, f"a test left {', '.join(left)} in {places.ROOT}"


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """The broker of the whole run. A test that stops, kills or pauses a broker starts its own."""
    # The log cleaner looks for work five times a second instead of every 15 s, because a test waits for it.
    with Kafka(tmp_path_factory.mktemp("kafka"), settings={"log.cleaner.backoff.ms": "200"}) as broker:
        yield broker


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """The Redis of the whole run. A test that flushes, stops or pauses a server uses `own_redis`."""
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def older_redis(tmp_path_factory: pytest.TempPathFactory, redis: Redis) -> Iterator[Redis]:
    """A Redis without MSETEX, like servers before Valkey 9.1 and Redis 8.4."""
    args = ["--rename-command", "MSETEX", "NONE-SUCH"] if "msetex" in _commands(redis) else []
    with Redis(tmp_path_factory.mktemp("older-redis"), args=args) as server:
        yield server


def _commands(redis: Redis) -> str:
    """List every command that a server knows."""
    with redis.client() as client:
        return str(
            client.eval(
                "local all = {} for _, c in ipairs(redis.call('COMMAND')) do all[#all + 1] = c[1] end return all", 0
            )
        )


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs the certificates of the two secured servers."""
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="session")
def secured_kafka(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[SecuredKafka]:
    """A broker with TLS, passwords and certificates, whose ACLs deny everything that they do not name."""
    with SecuredKafka(tmp_path_factory.mktemp("secured-kafka"), authority) as broker:
        yield broker


@pytest.fixture(scope="session")
def secured_redis(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[SecuredRedis]:
    """A Redis with TLS."""
    with SecuredRedis(tmp_path_factory.mktemp("secured-redis"), authority) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Redis]:
    """A Redis for one test alone."""
    with Redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def namespace() -> str:
    """A unique namespace (FENCEPOST_NAMESPACE)."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def make_topic(kafka: Kafka) -> MakeTopic:
    """Creates topics with unique names on the run's broker. Records are kept however old their timestamps are."""

    def make(partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = f"topic-{uuid.uuid4().hex[:12]}"
        kafka.create_topic(name, partitions=partitions, config={"retention.ms": "-1", **(config or {})})
        return name

    return make
