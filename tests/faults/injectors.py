"""Injectors of faults that end by themselves: the soak draws from them, and rows of the matrix consist of them.

An injector is a function of the world and a random source: it injects a fault, waits, ends the fault, and returns when
all is repaired. Injectors of one `part` never run at the same time. Modules `injectors_*.py` of this folder may add
more.
"""

import contextlib
import importlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import redis as redis_client
from confluent_kafka import KafkaException

from deploy.stack import Kafka
from tests.faults.load import ANSWER_S, HANGING_S
from tests.faults.network import Direction
from tests.faults.proxy import Do
from tests.faults.wire import Broker
from tests.faults.world import START_S, Odd, World

# As in the manifest: while Kafka or Redis are unreachable, a stop waits for deadlines, slots and the journal in turn.
GRACE_S: Final = 90.0
# A client settles a request within this time, or notes that it hangs: other faults of the group may keep Kafka
# unreachable for several starts of all brokers.
REQUEST_S: Final = HANGING_S + ANSWER_S

Part = Literal["service", "store", "broker", "client", "network", "clock"]
Inject = Callable[[World, random.Random], None]


@dataclass(frozen=True)
class Injector:
    """`weight`: how often it is drawn, relative to others. `available`: whether this machine and world allow it."""

    name: str
    part: Part
    inject: Inject
    weight: int = 2
    available: Callable[[World], bool] = lambda _: True


INJECTORS: Final[dict[str, Injector]] = {}


def injector(
    part: Part, weight: int = 2, available: Callable[[World], bool] = lambda _: True
) -> Callable[[Inject], Inject]:
    """Register an injector for the soak; its name is that of the function."""

    def add(inject: Inject) -> Inject:
        name = inject.__name__.replace("_", "-")
        assert name not in INJECTORS, f"two injectors are called {name}"
        INJECTORS[name] = Injector(name, part, inject, weight, available)
        return inject

    return add


def load_injectors() -> dict[str, Injector]:
    """Load the injectors of all modules."""
    for path in sorted(Path(__file__).parent.glob("injectors_*.py")):
        importlib.import_module(f"tests.faults.{path.stem}")
    return INJECTORS


# ------------------------------------------------------------------------------------------------- the service


@injector("service", weight=4)
def service_killed(world: World, rng: random.Random) -> None:
    service = rng.choice(world.services)
    service.kill()
    time.sleep(rng.uniform(0, 2))
    service.start(timeout_s=START_S)


@injector("service")
def all_services_killed(world: World, rng: random.Random) -> None:
    for service in world.services:
        service.kill()
    for service in world.services:
        service.start(wait_ready=False)
    for service in world.services:
        service.wait_ready(START_S)


@injector("service", weight=4)
def service_paused(world: World, rng: random.Random) -> None:
    """Pause a process, for less or for more than its lease."""
    service = rng.choice(world.services)
    service.pause()
    time.sleep(rng.choice((0.3, 0.9, 1.5, 4.0)) * rng.uniform(0.9, 1.1))
    service.resume()


@injector("service")
def service_stopped(world: World, rng: random.Random) -> None:
    service = rng.choice(world.services)
    service.stop(GRACE_S)
    assert service.exit_code == 0, f"{service.name} ended with {service.exit_code}"
    service.start(timeout_s=START_S)


@injector("service")
def service_replaced(world: World, rng: random.Random) -> None:
    """Replace a process by another one, which is ready before the old one is stopped."""
    old = rng.choice([each for each in world.services if world.odd is None or each is not world.odd.service])
    world.start_services(1)
    world.retire(old)
    old.stop(GRACE_S)


# --------------------------------------------------------------------------------------------------- the store


@injector("store", weight=4)
def redis_flushed(world: World, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 3))):
        world.redis.flush()
        time.sleep(rng.uniform(0, 0.5))


@injector("store")
def redis_asleep(world: World, rng: random.Random) -> None:
    sleep(world, rng.uniform(0.3, 3.0))


def sleep(world: World, seconds: float) -> None:
    """Run DEBUG SLEEP: the server answers nobody, and runs later the commands that it got meanwhile."""
    with redis_client.Redis.from_url(world.redis.url, socket_timeout=60, retry=None) as store:
        store.execute_command("DEBUG", "SLEEP", f"{seconds:.2f}")


@injector("store")
def redis_paused(world: World, rng: random.Random) -> None:
    world.redis.pause()
    time.sleep(rng.uniform(0.3, 3.0))
    world.redis.resume()


@injector("store")
def redis_restarted_empty(world: World, rng: random.Random) -> None:
    world.redis.kill()
    dump(world).unlink(missing_ok=True)
    time.sleep(rng.uniform(0, 1))
    world.redis.start()


@injector("store")
def redis_restarted_from_an_old_dump(world: World, rng: random.Random) -> None:
    save(world)
    time.sleep(rng.uniform(0.1, 2))
    world.redis.kill()
    world.redis.start()


def save(world: World) -> None:
    with world.redis.client() as store:
        store.save()


def dump(world: World) -> Path:
    return world.redis.folder / "dump.rdb"


@injector("store", available=lambda world: world.replica is not None)
def redis_failed_over(world: World, rng: random.Random) -> None:
    """Promote the replica after the primary was killed; the old primary comes back as a replica."""
    world.redis.kill()
    world.promote()
    time.sleep(rng.uniform(0, 1))
    come_back(world)


@injector("store", available=lambda world: world.replica is not None)
def redis_failed_over_with_lost_claims(world: World, rng: random.Random) -> None:
    """Promote a replica that lags: the last answers of the primary are lost."""
    world.link.hold()
    time.sleep(rng.uniform(0.2, 2))
    world.redis.kill()
    world.promote()
    come_back(world)


def come_back(world: World) -> None:
    """Let the old primary follow the new one."""
    assert world.replica is not None
    if not world.replica.running:
        world.replica.start()
    world.follow()


# ------------------------------------------------------------------------------------------------- the brokers


@injector("broker")
def broker_killed(world: World, rng: random.Random) -> None:
    broker = rng.choice(world.cluster.brokers)
    broker.kill()
    time.sleep(rng.uniform(0, 6))
    world.cluster.heal()


@injector("broker")
def broker_paused(world: World, rng: random.Random) -> None:
    """Pause a broker, for less or for more than its session."""
    broker = rng.choice(world.cluster.brokers)
    broker.pause()
    time.sleep(rng.choice((0.5, 3.0, 8.0)) * rng.uniform(0.9, 1.1))
    broker.resume()
    world.cluster.heal()


@injector("broker", weight=1)
def broker_restarted(world: World, rng: random.Random) -> None:
    rng.choice(world.cluster.brokers).stop()
    world.cluster.heal()


@injector("broker", weight=1, available=lambda world: len(world.cluster.brokers) > 1)
def two_brokers_killed(world: World, rng: random.Random) -> None:
    for broker in rng.sample(world.cluster.brokers, 2):
        broker.kill()
    time.sleep(rng.uniform(0, 4))
    world.cluster.heal()


@injector("broker", weight=3)
def brokers_killed_amid_commits(world: World, rng: random.Random) -> None:
    """Kill one broker or all during commits, and start them at once: coordinators may load before leaders are known.

    Then it completes transactions without the markers of those partitions (KAFKA-20734).
    """
    killed = world.cluster.brokers if rng.random() < 0.5 else [rng.choice(world.cluster.brokers)]
    commit = world.cluster.proxy.plan("EndTxn", "hold") if world.proxied else None
    if commit is not None:
        with contextlib.suppress(AssertionError):  # nothing commits while another fault lasts
            commit.wait(2)
        world.cluster.proxy.let_go(commit)
    time.sleep(rng.uniform(0, 0.02))
    for broker in killed:
        broker.kill()
    time.sleep(rng.uniform(0, 0.5))
    world.cluster.heal()


@injector("broker", weight=1)
def all_brokers_killed(world: World, rng: random.Random) -> None:
    world.cluster.kill()
    world.cluster.heal()


# -------------------------------------------------------------------------------------- other programs at the cluster


@injector("client", weight=3)
def transactional_ids_stolen(world: World, rng: random.Random) -> None:
    """Initialise the service's transactional ids, so that every slot's producer is fenced."""
    ids = world.transactional_ids()
    for transactional_id in rng.sample(ids, rng.randint(1, len(ids))):
        with contextlib.suppress(OSError, KafkaException, StopIteration, AssertionError):  # brokers may be unreachable
            steal(world.cluster.coordinator(transactional_id), transactional_id)


def steal(coordinator: Kafka, transactional_id: str) -> tuple[int, int]:
    """Send InitProducerId for a transactional id; returns the new producer id and epoch."""
    with Broker("127.0.0.1", coordinator.port) as broker:
        return broker.init_producer_id(transactional_id)


@injector("client")
def one_key_posted_by_many(world: World, rng: random.Random) -> None:
    """Post one key fifty times at once, to all processes."""
    assert world.load is not None
    request = world.ask(f"many-{rng.random()}")
    answers = world.load.send([request] * 50).result(REQUEST_S)
    places = {result.metadata for results in answers for result in results}
    assert len(places) == 1, places


# ------------------------------------------------------------------------------------------ requests to Kafka, one


def is_proxied(world: World) -> bool:
    return world.proxied


@injector("network", weight=4, available=is_proxied)
def kafka_request_or_reply_lost(world: World, rng: random.Random) -> None:
    """End or silence one connection to Kafka around one request of a chosen kind."""
    api = rng.choice(("Produce", "AddPartitionsToTxn", "EndTxn", "EndTxn", "InitProducerId"))
    do: Do = rng.choice(("cut", "cut-before", "drop-reply"))
    loss = world.cluster.proxy.plan(api, do, nth=rng.randint(1, 8))
    with contextlib.suppress(AssertionError):  # the kind may be rare: the fault then happens later
        loss.wait(5)


@injector("network", weight=2, available=is_proxied)
def kafka_request_late(world: World, rng: random.Random) -> None:
    """Hold one request, for less or for more than its deadline, and then send it on."""
    loss = world.cluster.proxy.plan(rng.choice(("Produce", "AddPartitionsToTxn", "EndTxn", "EndTxn")), "hold")
    with contextlib.suppress(AssertionError):
        loss.wait(5)
        time.sleep(rng.choice((0.5, 3.0, 7.0)))
    world.cluster.proxy.let_go(loss)


# ------------------------------------------------------------------------- the process with a network of its own


def has_odd(world: World) -> bool:
    return world.odd is not None


def odd(world: World) -> Odd:
    assert world.odd is not None
    return world.odd


@injector("network", available=has_odd)
def one_process_cut_off(world: World, rng: random.Random) -> None:
    """Cut one process off from Kafka, Redis or both, in one direction or both, for less or for more than its lease."""
    peers = rng.choice((("kafka",), ("redis",), ("kafka", "redis")))
    directions: tuple[Direction, ...] = ("both", "in", "out")
    odd(world).network.cut(*peers, direction=rng.choice(directions))
    time.sleep(rng.choice((0.5, 2.0, 7.0)))
    odd(world).network.mend()


@injector("network", available=has_odd)
def packets_lost(world: World, rng: random.Random) -> None:
    """Lose 30 % of one process's packets to and from Kafka and Redis."""
    odd(world).network.lose(0.3, "kafka", "redis")
    time.sleep(rng.uniform(2, 8))
    odd(world).network.mend()


@injector("clock", available=has_odd)
def clock_an_hour_off(world: World, rng: random.Random) -> None:
    odd(world).clock.shift(rng.choice((-3600, 3600)))
    time.sleep(rng.uniform(1, 6))
    odd(world).clock.shift(0)
