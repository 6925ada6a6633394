"""Rows in which one clock jumps by an hour under load, and back."""

from typing import Final

from deploy.stack import Process
from tests.faults.clock import Clock, lacking
from tests.faults.matrix import row
from tests.faults.world import World

HOUR_S: Final = 3600
MEANWHILE: Final = 60  # events acknowledged while the clock is wrong


def jump(world: World, clock: Clock, shift_s: int) -> None:
    """Shift a clock under load, wait for acknowledged events, and set it right again."""
    world.start_load()
    clock.shift(shift_s)
    world.wait_acked(MEANWHILE)
    clock.shift(0)


def clock_of(server: Process) -> Clock:
    """Give a running server a clock of its own, by a restart."""
    server.stop()
    clock = Clock(server)
    server.start()
    return clock


def of_a_service(world: World, shift_s: int) -> None:
    world.start_services(1)
    odd = world.service()
    clock = Clock(odd)
    odd.start()
    jump(world, clock, shift_s)


def of_redis(world: World, shift_s: int) -> None:
    clock = clock_of(world.redis)
    world.start_services(2)
    jump(world, clock, shift_s)


def of_the_broker(world: World, shift_s: int) -> None:
    broker = world.cluster.brokers[0]
    clock = clock_of(broker)

    def put_back() -> None:
        broker.stop()
        clock.remove()
        broker.start()

    world.exits.callback(put_back)
    world.start_services(2)
    jump(world, clock, shift_s)


@row("one process's clock an hour ahead, then right again", services=0, load=False, lacking=lacking)
def service_clock_ahead(world: World) -> None:
    of_a_service(world, HOUR_S)


@row("one process's clock an hour behind, then right again", services=0, load=False, lacking=lacking)
def service_clock_behind(world: World) -> None:
    of_a_service(world, -HOUR_S)


@row("Redis's clock an hour ahead, then right again", services=0, load=False, lacking=lacking)
def redis_clock_ahead(world: World) -> None:
    of_redis(world, HOUR_S)


@row("Redis's clock an hour behind, then right again", services=0, load=False, lacking=lacking)
def redis_clock_behind(world: World) -> None:
    of_redis(world, -HOUR_S)


@row("the broker's clock an hour ahead, then right again", services=0, load=False, lacking=lacking)
def broker_clock_ahead(world: World) -> None:
    of_the_broker(world, HOUR_S)


@row("the broker's clock an hour behind, then right again", services=0, load=False, lacking=lacking)
def broker_clock_behind(world: World) -> None:
    of_the_broker(world, -HOUR_S)
