"""`python -m tests.faults hanging --kills N`: brokers and services killed amid commits, and what stays open afterwards.

No client asks for anything after a kill, and the processes of the service that are started again have nothing to write:
traffic would end what hangs, and hide it. Every partition must be readable to its end by `read_committed`, and what was
acknowledged must be there, once, and be answered the same again. `--service` runs the service of another tree;
`results/hanging.md` keeps a line for each tree and number of brokers.

How a marker is lost: a broker that starts takes the leadership of its earlier life, and loads the transactions of its
coordinators. Then its registration in this life is published, which withdraws all leaders until it is unfenced. A
transaction that is loaded between the two is completed without markers (KAFKA-20734).
"""

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # its stubs forget the latter

from deploy import places
from deploy.stack import Process
from tests.faults import history
from tests.faults.cluster import Cluster
from tests.faults.results import RESULTS, machine, revision, table, update
from tests.faults.world import SETTLED_S, World

Partition = tuple[str, int]

# What the coordinator logs as it completes a transaction without a partition's markers.
SKIPPED: Final = "likely deleted already and hence can be skipped"
# What the service logs for each partition in which recovery has ended a hanging transaction.
ENDED: Final = "hanging transaction ended"
# Where the notes of the results begin.
NOTES: Final = "\n## "
DOWN_S: Final = 0.5
LOAD_S: Final = (0.5, 2.0)
POLL_S: Final = 0.5
ANSWER_S: Final = 10.0
# Several commits are under way at nearly every moment, each with several partitions.
TOPICS: Final = {"a": 12, "b": 12}
CLIENTS: Final = 48
KEYS_PER_S: Final = 2_000.0
SETTINGS: Final = {"FENCEPOST_SLOTS": "4", "FENCEPOST_SLOTS_MAX": "8"}
# Topics and partitions of each, beside those that are written to. Leaders are withdrawn one after the other, then the
# coordinators: the more partitions there are, the longer a coordinator completes transactions while there is no leader.
# Of three brokers each has as many, as there are three replicas of a third of the topics.
OTHERS: Final = (20, 20)
HEADS: Final = (
    "service",
    "kills",
    "of them with markers skipped",
    "transactions that lost markers",
    "partitions ended by recovery",
    "kills that left partitions standing",
    "partitions standing",
    "events acknowledged",
    "of them invisible behind what stands",
    "other violations",
    "measured",
)


class Kill(NamedTuple):
    """What one kill led to."""

    skipped: int  # transactions that were completed without the markers of some partitions
    ended: int  # partitions in which recovery wrote the missing markers
    standing: Mapping[Partition, int]  # the last stable offsets that stay behind the end
    settled_s: float  # until all partitions were readable to their ends
    acknowledged: int  # events
    invisible: int  # events that were acknowledged, and are behind what stands
    wrong: Sequence[str]


def standing(world: World) -> dict[Partition, int]:
    """The last stable offset of each partition that `read_committed` cannot read to its end now.

    Raises:
        KafkaException: not every partition has a leader yet.
    """
    admin = world.cluster.admin()
    topics = admin.list_topics(timeout=ANSWER_S).topics
    partitions = [
        TopicPartition(name, number) for name in [*world.topics, world.ledger] for number in topics[name].partitions
    ]
    stable, ends = (
        _offsets(admin, partitions, level) for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
    )
    return {partition: stable[partition] for partition, end in ends.items() if stable[partition] < end}


def _offsets(admin: AdminClient, partitions: Sequence[TopicPartition], level: IsolationLevel) -> dict[Partition, int]:
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = admin.list_offsets(dict.fromkeys(partitions, latest), isolation_level=level)
    return {(each.topic, each.partition): future.result(ANSWER_S).offset for each, future in asked.items()}


def wait_until_readable(world: World) -> tuple[dict[Partition, int], float]:
    """What still stands when everything has had its time to be settled; and how long the wait was, in seconds."""
    begun = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun
        try:
            left = standing(world)
        except KafkaException:
            if waited_s > SETTLED_S + ANSWER_S:
                raise
        else:
            if not left or waited_s > SETTLED_S:
                return left, waited_s
        time.sleep(POLL_S)


def invisible(folder: Path, left: Mapping[Partition, int]) -> int:
    """How many events that clients were told of, by their logs, are not before these last stable offsets."""
    told = {
        (fields["topic"], fields["partition"], fields["offset"])
        for tries in history.read(folder).values()
        for each in tries
        for result in each.results
        if result.type == "ok"
        for fields in [json.loads(result.told)]
    }
    return sum(left.get((topic, partition), offset + 1) <= offset for topic, partition, offset in told)


def skipped(cluster: Cluster) -> int:
    return _logged(SKIPPED, cluster.brokers)


def _logged(text: str, processes: Sequence[Process]) -> int:
    return sum(process.log.read_text(errors="replace").count(text) for process in processes)


def kill(folder: Path, cluster: Cluster, rng: random.Random, project: Path) -> Kill:
    """Two processes under load; they and every broker are killed, and started again, and nobody asks for anything."""
    with World(folder, cluster, settings=SETTINGS, topics=TOPICS, project=project) as world:
        world.start_services(2)
        load = world.start_load(rng.random().hex(), clients=CLIENTS, keys_per_s=KEYS_PER_S)
        time.sleep(rng.uniform(*LOAD_S))
        before = skipped(cluster)
        cluster.kill()
        for service in world.services:
            service.kill()
        load.close()
        time.sleep(DOWN_S)
        cluster.start()
        world.heal()
        left, settled_s = wait_until_readable(world)
        wrong = world.bugs()
        if not left:
            wrong += [f"{kind}: {text}" for kind, text in world.check().violations]
        return Kill(
            skipped(cluster) - before,
            _logged(ENDED, world.services),
            left,
            settled_s,
            load.acked,
            invisible(world.history, left) if left else 0,
            wrong,
        )


def run(
    kills: int,
    brokers: int,
    seed: int,
    say: Callable[[str], None],
    *,
    project: Path = places.ROOT,
    until_standing: int | None = None,
) -> list[Kill]:
    """Kill so many times, or until so many partitions have stood; the result's line is written."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="fencepost-hanging-"))
    done: list[Kill] = []
    with Cluster(folder / "cluster", brokers) as cluster:
        for number in range(OTHERS[0] // brokers):
            cluster.create_topic(f"other-{number}", OTHERS[1])
        while len(done) < kills and (until_standing is None or _stood(done) < until_standing):
            outcome = kill(folder / f"world-{len(done)}", cluster, rng, project)
            done.append(outcome)
            say(_line(len(done), outcome))
    say(f"{len(done)} kills, {sum(bool(each.skipped) for each in done)} with skipped markers, {_stood(done)} standing")
    if any(each.standing or each.wrong for each in done):
        say(f"see {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    write(project, brokers, done)
    return done


def _stood(done: Sequence[Kill]) -> int:
    return sum(len(each.standing) for each in done)


def _line(number: int, outcome: Kill) -> str:
    left = ", ".join(f"{topic}/{partition} from {offset}" for (topic, partition), offset in outcome.standing.items())
    return (
        f"kill {number}: {outcome.skipped} transactions lost markers, {outcome.ended} partitions ended by recovery, "
        f"{len(outcome.standing)} standing"
        f"{f' ({left}), {outcome.invisible} of {outcome.acknowledged} acknowledged are behind them' if left else ''}, "
        f"after {outcome.settled_s:.1f} s {list(outcome.wrong[:5]) or ''}"
    )


def write(project: Path, brokers: int, done: Sequence[Kill], path: Path = RESULTS / "hanging.md") -> None:
    """The results, with the line of this tree and number of brokers made anew; notes below the table stay."""
    cells = [
        f"{len(done)}",
        f"{sum(bool(each.skipped) for each in done)}",
        f"{sum(each.skipped for each in done)}",
        f"{sum(each.ended for each in done)}",
        f"{sum(bool(each.standing) for each in done)}",
        f"{_stood(done)}",
        f"{sum(each.acknowledged for each in done):,}",
        f"{sum(each.invisible for each in done):,}",
        f"{sum(len(each.wrong) for each in done)}",
        machine(),
    ]
    lines = update(path, HEADS, {f"{revision(project)}, {brokers} broker(s)": cells})
    _, heading, notes = path.read_text().partition(NOTES) if path.exists() else ("", "", "")
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "# Brokers and services killed amid commits\n\n`python -m tests.faults hanging --kills N [--brokers 3] "
        "[--service TREE]` makes its line anew: the service of that tree, started again after each kill without "
        "traffic.\n\n" + table(HEADS, lines) + heading + notes
    )
