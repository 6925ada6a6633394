"""Rows that break processes of the service."""

import time

from tests.faults.matrix import row
from tests.faults.world import World


@row("a process killed with -9 under load", in_run=True)
def service_killed(world: World) -> None:
    world.services[0].kill()


@row("a process that stands still for three lease times", in_run=True)
def service_paused(world: World) -> None:
    world.services[0].pause()
    time.sleep(3.0)
    world.services[0].resume()
