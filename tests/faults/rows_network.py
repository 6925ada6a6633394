"""Rows that cut one of two processes off from its servers, or lose its packets."""

import time
from typing import Final

from tests.faults.matrix import row
from tests.faults.network import Direction, Network, lacking
from tests.faults.world import World

IDLE_S: Final = 6.0  # longer than the idle time after which a connection to Kafka is probed
FORGOTTEN_MOST_S: Final = 3.0  # of a request's five
CUT_S: Final = 7.0  # longer than a request's deadline, and than several leases


def behind_a_wire(world: World) -> Network:
    """Start two processes under load, one beside the servers and one in a network of its own."""
    peers = {"kafka": [broker.port for broker in world.cluster.brokers], "redis": [world.redis.port]}
    network = world.exits.enter_context(Network(world.folder, peers))
    world.start_services(1)
    far = world.service(argv_prefix=network.prefix)
    network.admit(far.port)
    far.start()
    world.start_load()
    return network


def cut(world: World, peer: str, direction: Direction = "both") -> None:
    network = behind_a_wire(world)
    network.cut(peer, direction=direction)
    time.sleep(CUT_S)
    assert network.dropped() > 0
    network.mend()


@row("one process cut off from Kafka for 7 s", services=0, load=False, lacking=lacking)
def cut_from_kafka(world: World) -> None:
    cut(world, "kafka")


@row("… only what it sends to Kafka is lost", services=0, load=False, lacking=lacking)
def requests_to_kafka_lost(world: World) -> None:
    cut(world, "kafka", "out")


@row("… only Kafka's replies are lost", services=0, load=False, lacking=lacking)
def replies_of_kafka_lost(world: World) -> None:
    cut(world, "kafka", "in")


@row("one process cut off from Redis for 7 s", services=0, load=False, lacking=lacking)
def cut_from_redis(world: World) -> None:
    cut(world, "redis")


@row("… only what it sends to Redis is lost", services=0, load=False, lacking=lacking)
def requests_to_redis_lost(world: World) -> None:
    cut(world, "redis", "out")


@row("… only Redis's replies are lost", services=0, load=False, lacking=lacking)
def replies_of_redis_lost(world: World) -> None:
    cut(world, "redis", "in")


@row("a firewall forgets one process's idle connections to Kafka", services=0, load=False, lacking=lacking)
def forgotten_by_a_firewall(world: World) -> None:
    peers = {"kafka": [broker.port for broker in world.cluster.brokers]}
    network = world.exits.enter_context(Network(world.folder, peers))
    world.start_services(1)
    load = world.start_load()
    far = world.service(argv_prefix=network.prefix)
    network.admit(far.port)
    far.start()
    time.sleep(IDLE_S)
    network.forget("kafka")
    began = time.monotonic()
    world.aim()
    load.send([world.ask("forgotten")], [far.name]).result(CUT_S)
    took_s = time.monotonic() - began
    assert network.dropped() > 0
    assert took_s < FORGOTTEN_MOST_S, f"answered after {took_s:.1f} s"
    world.notes.append(f"answered after {took_s:.1f} s")


@row("30 % of one process's packets to and from Kafka and Redis lost for 15 s", services=0, load=False, lacking=lacking)
def a_third_of_packets_lost(world: World) -> None:
    network = behind_a_wire(world)
    network.lose(0.3, "kafka", "redis")
    world.wait_acked(30)
    time.sleep(15.0)
    world.notes.append(f"{network.dropped()} packets lost")
    network.mend()
