"""The benchmarks on a small size: they measure real work, and their page has the results."""

from collections import Counter
from html import unescape
from pathlib import Path

import pytest

from deploy.console import StackError
from deploy.places import ROOT
from deploy.stack import Kafka, Redis
from tests.bench import against, checks, parts, post, recovery, report, results, rows, wrk
from tests.bench.redis_servers import DeployedRedis, described, jemalloc
from tests.bench.rows import Goal, NotRealWork, Row
from tests.bench.stage import Stage
from tests.conftest import MakeTopic
from tests.revisions import Checkout, unpack


@pytest.fixture
def stage(tmp_path: Path, kafka: Kafka, redis: Redis) -> Stage:
    try:
        wrk.find()
    except StackError as error:
        pytest.skip(str(error))
    return Stage(tmp_path, kafka, redis, tmp_path / "results", "quick")


def test_post_is_measured_checked_and_shown(stage: Stage, make_topic: MakeTopic) -> None:
    found = post.measure(stage)
    # The JIT compiler of a broker may have nothing to do.
    assert all(row.median > 0 or row.unit == "%" for row in found)
    assert [str(row.goal) for row in found if row.goal] == ["≥ 2", "≤ 50", "≥ 1.3"]
    results.keep(stage.results, "post", results.describe(stage), found)
    report.write(stage.results, ("post",))
    page = unescape((stage.results / "results.html").read_text())
    assert all(row.name in page for row in found)
    assert "://" not in page, "the page is to stand alone"
    (kept,) = results.read(stage.results)
    assert kept["commit"]
    assert {row["name"]: row["median"] for row in kept["rows"]}.keys() == {row.name for row in found}

    # The same work with other claims has no number: one answer more, or records that are not at their coordinates.
    (topic,) = [name for name in stage.kafka.topics() if name.startswith("b-") and name.endswith("-events")]
    namespace = topic.removesuffix("-events")
    with pytest.raises(NotRealWork, match="were answered"):
        checks.exactly_once(stage.kafka.bootstrap, namespace, [topic], 10**9, 0)
    with pytest.raises(NotRealWork, match="places have none"):
        checks.exactly_once(stage.kafka.bootstrap, namespace, [make_topic()], 0, 0)


@pytest.mark.long
def test_two_services_are_measured_in_turn_and_held_to_the_floors(stage: Stage) -> None:
    plan = against.Plan.of(["HEAD", "--quick", "--rows", "one,replay", "--rounds", "2"])
    itself = Checkout(ROOT, "itself")
    found = against.measure(stage, itself, itself, plan)
    assert {row.name.partition(":")[0]: str(row.goal) for row in found if row.goal} == {
        "one client": "≤ 1.08",
        "replays, 256 connections": "≥ 0.9",
    }
    assert all(len(row.values) == 2 and row.median > 0 for row in found)


def test_a_floor_for_all_rates_leaves_that_of_times() -> None:
    plan = against.Plan.of(["HEAD", "--least", "0.97"])
    assert {name: str(plan.goal_of(load)) for name, load in against.LOADS.items()} == {
        **dict.fromkeys(against.LOADS, "≥ 0.97"),
        "one": "≤ 1.08",
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is no git history here to unpack a revision from")
def test_a_revision_is_unpacked_without_what_is_not_committed(tmp_path: Path) -> None:
    found = unpack("HEAD", tmp_path / "other")
    assert (found.root / "service" / "app.py").exists()
    assert not (found.root / ".venv").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    with pytest.raises(StackError, match="nowhere"):
        unpack("nowhere", tmp_path / "another")


def test_a_goal_is_held_by_the_median() -> None:
    row = Row("p99", "ms", [10.0, 80.0, 20.0], Goal(most=50.0))
    assert (row.median, row.quartiles, row.met) == (20.0, (15.0, 50.0), True)
    assert "met" in report.as_text([row])
    assert Row("ratio", "x", [1.9, 1.9], Goal(least=2.0)).met is False


def test_growth_is_told_by_the_worst_doubling() -> None:
    *points, worst = rows.growth("cost", "µs", {1: [1.0], 4: [4.0], 8: [12.0]}, "work")
    assert [(point.at, point.median) for point in points] == [(1, 1.0), (4, 4.0), (8, 12.0)]
    assert worst.median == pytest.approx(3.0)
    assert worst.met is False


def test_a_sample_belongs_to_its_leaf_most_part() -> None:
    stacks = parts.parse(
        "main (service/__main__.py);run (uvicorn/server.py);Runner.run (asyncio/runners.py) 3\n"
        "run (uvicorn/server.py);Writer._claim (service/pipeline/writer.py);"
        "RedisKeys._send (service/claims/redis_store.py);x (<string>) 2\n"
        "run (uvicorn/server.py);Slot.write (service/slots/slot.py);encode_ledger (service/contract/wire/ledger.py) 4\n"
        "run (uvicorn/server.py);do (aiokafka/producer/sender.py);wait (asyncio/tasks.py) 5\n"
    )
    found: Counter[str] = Counter()
    for stack, samples in stacks.items():
        found[parts.part_of(stack)] += samples
    assert found == {parts.LOOP: 3, "claim": 2, "queue and path": 4, "Kafka": 5}


def test_a_result_says_on_which_allocator_it_was_measured(tmp_path: Path, redis: Redis) -> None:
    built_for = described(redis).rpartition(", ")[2]  # libc in the wheel, jemalloc in a package
    with DeployedRedis(tmp_path) as deployed:
        found = described(deployed).rpartition(", ")[2]
    assert found == ("jemalloc" if built_for == "libc" and jemalloc() else built_for)


def test_a_lease_that_is_taken_while_keys_are_counted_is_no_key(
    own_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_redis.client() as store:
        store.mset({f"{{n:0}}k{number}": b"" for number in range(20)})
        size = store.dbsize

        def dbsize_after_another_lease() -> int:
            if store.set("{n:0}l/3", b"", nx=True):
                assert size() == 21
            return int(size())

        monkeypatch.setattr(store, "dbsize", dbsize_after_another_lease)
        assert recovery.keys_of_events(store, "n") == 20
