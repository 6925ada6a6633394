"""`python -m tests.faults hanging --kills N`: kills brokers and services amid commits, and counts hanging transactions.

After a kill no client sends a request, and the restarted processes of the service have nothing to write, because
traffic would end the hanging transactions. Every partition must become readable to its end by `read_committed`;
acknowledged events must be there once, and get the same answer again. `--service` runs the service of another tree;
`results/hanging.md` has a line for each tree, number of brokers and version of Kafka.

How a marker is lost: a broker that starts takes over its earlier leadership, and loads the transactions of its
coordinators. Then its new registration is published, which withdraws all leaders until the broker is unfenced. A
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
from deploy.install import jars
from deploy.stack import Process
from tests.faults import history
from tests.faults.cluster import Cluster
from tests.faults.results import RESULTS, machine, revision, table, update
from tests.faults.world import SETTLED_S, World
from tests.kafka_versions import broker_of

Partition = tuple[str, int]

# The coordinator's log line about a transaction that is completed without a partition's markers.
SKIPPED: Final = "likely deleted already and hence can be skipped"
# The service's log line about a partition in which recovery has ended a hanging transaction.
ENDED: Final = "hanging transaction ended"
# The heading of the notes in the results.
NOTES: Final = "\n## "
DOWN_S: Final = 0.5
LOAD_S: Final = (0.5, 2.0)
POLL_S: Final = 0.5
ANSWER_S: Final = 10.0
# So that at nearly every moment several commits are in progress, each with several partitions.
TOPICS: Final = {"a": 12, "b": 12}
CLIENTS: Final = 48
KEYS_PER_S: Final = 2_000.0
SETTINGS: Final = {"FENCEPOST_SLOTS": "4", "FENCEPOST_SLOTS_MAX": "8"}
# Further topics, and the partitions of each. Leaders are withdrawn one after the other, then the coordinators: with
# more partitions a coordinator completes transactions without leaders for longer. With three brokers each has as many,
# because each topic has three replicas and there is a third of the topics.
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
    """The result of one kill."""

    skipped: int  # transactions that were completed without the markers of some partitions
    ended: int  # partitions in which recovery wrote the missing markers
    standing: Mapping[Partition, int]  # the last stable offsets that stay below the end
    settled_s: float  # until all partitions were readable to their ends
    acknowledged: int  # events
    invisible: int  # acknowledged events behind a last stable offset
    wrong: Sequence[str]


def standing(world: World) -> dict[Partition, int]:
    """Find the last stable offset of each partition that `read_committed` cannot read to its end now.

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
    """Wait for recovery; returns the partitions that are still blocked, and the seconds waited."""
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
    """Count the acknowledged events, by the clients' logs, that are not below these last stable offsets."""
    acknowledged = {
        (fields["topic"], fields["partition"], fields["offset"])
        for tries in history.read(folder).values()
        for each in tries
        for result in each.results
        if result.type == "ok"
        for fields in [json.loads(result.metadata)]
    }
    return sum(left.get((topic, partition), offset + 1) <= offset for topic, partition, offset in acknowledged)


def skipped(cluster: Cluster) -> int:
    return _logged(SKIPPED, cluster.brokers)


def _logged(text: str, processes: Sequence[Process]) -> int:
    return sum(process.log.read_text(errors="replace").count(text) for process in processes)


def kill(folder: Path, cluster: Cluster, rng: random.Random, project: Path) -> Kill:
    """Kill two processes under load and every broker, and start them again, without further requests."""
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
    """Kill this many times, or until this many partitions were blocked; writes the line of the result."""
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
    """Renew the line of this tree, brokers and Kafka in the results; notes below the table stay."""
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
    kafka = broker_of(jars.LOCKS["kafka"])
    lines = update(path, HEADS, {f"{revision(project)}, {brokers} broker(s), Kafka {kafka}": cells})
    _, heading, notes = path.read_text().partition(NOTES) if path.exists() else ("", "", "")
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "# Brokers and services killed amid commits\n\n`python -m tests.faults hanging --kills N [--brokers 3] "
        "[--service TREE]` renews its line. It runs the service of that tree, and starts it again after each kill, "
        "without traffic.\n\n" + table(HEADS, lines) + heading + notes
    )
