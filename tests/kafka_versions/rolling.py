"""Replaces the brokers of an older Kafka by the newest, one after the other, under load.

    python -m tests.kafka_versions.rolling            from the oldest release that has a lock
    python -m tests.kafka_versions.rolling 4.3

Three brokers, and two processes of the service that write for clients which repeat their requests, and for processors
which commit their group's offsets. After the last broker, metadata.version and transaction.version 2 (KIP-890)
are finalized, which each process uses on its later connections. In the end the checker of the fault tests reads
everything, and posts every key again; each order has one invoice.

Exit status: 0 if every event is there once, else 1.
"""

import argparse
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from deploy import console
from deploy.console import StackError
from deploy.install import jars
from deploy.stack import Kafka
from service.cli.check_brokers import RELEASES
from tests import broker_classes
from tests.faults.cluster import Cluster
from tests.faults.wire import Broker
from tests.faults.world import World
from tests.kafka_versions import LOCKS, broker_of, running

KEYS_PER_S: Final = 120.0
CLIENTS: Final = 12
# Members of a consumer group, which commit its offsets with what they write.
PROCESSORS: Final = 2
# Acknowledged events between two steps.
EACH: Final = 500
ACKED_S: Final = 120.0
CHECK_S: Final = 900.0
TRANSACTION_VERSION: Final = 2
_UPDATE_FEATURES: Final = 57
_UPDATE_FEATURES_VERSION: Final = 2
_UPGRADE: Final = 1
_TIMEOUT_MS: Final = 10_000


def run_as(release: str) -> None:
    """Let brokers that start from now on be of this release."""
    jars.LOCKS["kafka"] = LOCKS[release]
    broker_classes.use()


def finalize(broker: Kafka, levels: dict[str, int]) -> None:
    """Finalize features of the cluster (KIP-584). Raises StackError if Kafka refuses one of them."""
    updates = b"".join(
        struct.pack(f">B{len(name)}shbB", len(name) + 1, name.encode(), level, _UPGRADE, 0)
        for name, level in levels.items()
    )
    request = b"\0" + struct.pack(">iB", _TIMEOUT_MS, len(levels) + 1) + updates + b"\0\0"  # the header's tags first
    host, _, port = broker.bootstrap.partition(":")
    with Broker(host, int(port)) as connection:
        answer = connection.ask(_UPDATE_FEATURES, _UPDATE_FEATURES_VERSION, request)
    _, error = struct.unpack_from(">ih", answer, 1)
    if error:
        raise StackError(f"Kafka answers error {error} to the features {levels}: {answer!r}")


def restart(world: World, broker: Kafka) -> None:
    """Stop a broker and start it as the present release, and wait for events acknowledged since."""
    broker.stop()
    broker.start()
    world.cluster.heal()
    world.wait_acked(EACH, ACKED_S)


def play(world: World, oldest: str, newest: str, say: Callable[[str], None]) -> Iterator[str]:
    """Replace each broker, and finalize the features, under load; then check. Yields what is wrong."""
    world.start_services(2, kafka_transactions="auto")
    load = world.start_load("rolling", clients=CLIENTS, keys_per_s=KEYS_PER_S)
    processing = world.start_processors(PROCESSORS)
    world.wait_acked(EACH, ACKED_S)
    say(f"{load.acked} events acknowledged by Kafka {broker_of(LOCKS[oldest])}")
    run_as(newest)
    for broker in world.cluster.brokers:
        restart(world, broker)
        say(f"{broker.name} is of Kafka {broker_of(LOCKS[newest])}: {load.acked} events acknowledged")
    # A controller older than 4.0 keeps no transaction.version of a broker: those that registered with it do so again.
    for broker in world.cluster.brokers[:-1]:
        restart(world, broker)
    levels = {"metadata.version": next(level for level, name in RELEASES.items() if name == newest)}
    levels["transaction.version"] = TRANSACTION_VERSION
    finalize(world.cluster.brokers[0], levels)
    world.wait_acked(EACH, ACKED_S)
    say(f"{', '.join(f'{name}={level}' for name, level in levels.items())}: {load.acked} events acknowledged")
    for service in world.services:
        service.kill()
        service.start()
    world.wait_acked(EACH, ACKED_S)
    load.stop()
    yield from processing.finish()
    say(
        f"{processing.orders} orders, each with one invoice: {processing.count('written')} batches with offsets, "
        f"{processing.count('replayed')} replays, {processing.count('dropped')} refused; the longest time without a "
        f"committed offset was {processing.longest_s:.1f} s"
    )
    yield from [*load.mistakes, *load.hanging, *world.bugs()]
    verdict = world.check(timeout_s=CHECK_S)
    say(
        f"{verdict.keys} keys, {verdict.acknowledged} acknowledged, {verdict.records} records: {verdict.lost} lost, "
        f"{verdict.duplicates} duplicates; the longest wait for an answer was {load.longest_s:.1f} s"
    )
    yield from (f"{kind}: {text}" for kind, text in verdict.violations)


def main() -> int:
    newest = running()
    older = [release for release in LOCKS if release != newest]
    parser = argparse.ArgumentParser(prog="python -m tests.kafka_versions.rolling")
    parser.add_argument("release", nargs="?", choices=older, default=older[0])
    release = parser.parse_args().release
    jars.ensure(jars.read_lock("kafka", LOCKS[release]))
    run_as(release)
    folder = Path(tempfile.mkdtemp(prefix="fencepost-rolling-"))
    with Cluster(folder / "cluster", 3) as cluster, World(folder / "world", cluster) as world:
        wrong = list(play(world, release, newest, console.say))
    for text in wrong:
        console.say(console.red(text))
    if wrong:
        console.say(f"see {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    console.run(main)
