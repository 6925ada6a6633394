"""`python -m tests.faults hanging --kills N`: brokers killed amid commits, and what stays open although nobody writes.

After each kill no client asks for anything any more: traffic would end what hangs, and hide it. Every partition must be
readable to its end by `read_committed`, and what was acknowledged must be there, once.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # its stubs forget the latter

from tests.faults.cluster import Cluster
from tests.faults.world import STABLE_S, World

# What the coordinator logs as it completes a transaction without a partition's markers (KAFKA-20734).
SKIPPED: Final = "likely deleted already and hence can be skipped"
DOWN_S: Final = 0.5
LOAD_S: Final = (0.2, 1.5)
# Transactions that are merely open have been aborted by then, and processes have had their deadlines.
QUIET_S: Final = 2 * STABLE_S
POLL_S: Final = 0.5
ANSWER_S: Final = 10.0


class Kill(NamedTuple):
    """One kill of all brokers: how many transactions were completed without markers, and what stayed open."""

    skipped: int
    standing: list[str]  # partitions whose last stable offset stays behind the end
    settled_s: float  # until all partitions were readable to their ends
    wrong: list[str]


def standing(world: World) -> list[str]:
    """The partitions that `read_committed` cannot read to their ends now."""
    admin = world.cluster.admin()
    try:
        topics = admin.list_topics(timeout=ANSWER_S).topics
        places = [
            TopicPartition(name, number) for name in [*world.topics, world.ledger] for number in topics[name].partitions
        ]
        stable, ends = (
            _offsets(admin, places, level) for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        )
    except (KafkaException, KeyError) as error:  # not everything has a leader yet
        return [repr(error)]
    return [
        f"{name}/{number}: {stable[name, number]} of {end}"
        for (name, number), end in ends.items()
        if stable[name, number] < end
    ]


def _offsets(admin: AdminClient, places: Sequence[TopicPartition], level: IsolationLevel) -> dict[tuple[str, int], int]:
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = admin.list_offsets(dict.fromkeys(places, latest), isolation_level=level)
    return {(place.topic, place.partition): future.result(ANSWER_S).offset for place, future in asked.items()}


def skipped(cluster: Cluster) -> int:
    return sum(broker.log.read_text(errors="replace").count(SKIPPED) for broker in cluster.brokers)


def kill(folder: Path, cluster: Cluster, rng: random.Random) -> Kill:
    """Two processes under load; every broker is killed, and started again, and nobody asks for anything any more."""
    with World(folder, cluster) as world:
        world.start_services(2)
        load = world.start_load(rng.random().hex())
        time.sleep(rng.uniform(*LOAD_S))
        before = skipped(cluster)
        cluster.kill()
        load.close()
        time.sleep(DOWN_S)
        cluster.start()
        begun = time.monotonic()
        while (left := standing(world)) and time.monotonic() < begun + QUIET_S:
            time.sleep(POLL_S)
        took_s = time.monotonic() - begun
        verdict = None if left else world.check(post_again=False)
        wrong = [] if verdict is None else [f"{kind}: {text}" for kind, text in verdict.violations]
        return Kill(skipped(cluster) - before, left, took_s, wrong + world.bugs())


def run(kills: int, brokers: int, seed: int, say: Callable[[str], None]) -> list[Kill]:
    """Kill brokers so many times; a kill that left anything standing is told at once."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="fencepost-hanging-"))
    done: list[Kill] = []
    with Cluster(folder / "cluster", brokers) as cluster:
        for number in range(kills):
            outcome = kill(folder / f"world-{number}", cluster, rng)
            done.append(outcome)
            say(
                f"kill {number + 1}: {outcome.skipped} partitions skipped, {len(outcome.standing)} standing, "
                f"readable after {outcome.settled_s:.1f} s {outcome.standing or ''} {outcome.wrong or ''}"
            )
    without_markers, hanging = sum(bool(each.skipped) for each in done), sum(bool(each.standing) for each in done)
    say(f"{kills} kills, {without_markers} with skipped markers, {hanging} left a partition standing")
    if not hanging and not any(each.wrong for each in done):
        shutil.rmtree(folder, ignore_errors=True)
    return done
