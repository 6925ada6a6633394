"""Rows with faults of the service's processes, at certain points of a write or at any."""

import re
import time

from deploy.stack import Service
from tests.faults.history import read
from tests.faults.matrix import row
from tests.faults.world import World
from tests.integration.conftest import plan_of
from tests.integration.plan import Fault, stopped

KILLED = -9


def doomed(world: World, *faults: Fault, **settings: object) -> Service:
    """Start a process that meets a fault after some work, and then stays down."""
    (service,) = world.start_services(1, faults=faults, **settings)
    return service


def dies(world: World, service: Service) -> None:
    """Wait until the process has killed itself."""
    world.until(lambda: service.exit_code == KILLED, 30, f"{service.name} dies")
    world.retire(service)


def killed_at(world: World, place: str) -> None:
    dies(world, doomed(world, Fault(place, "kill", first=20)))


@row("killed before it produces", services=1)
def killed_before_produce(world: World) -> None:
    killed_at(world, "write")


@row("killed between produce and EndTxn", services=1)
def killed_before_end_txn(world: World) -> None:
    killed_at(world, "commit")


@row("killed after EndTxn was sent, its reply held", services=1, proxied=True)
def killed_after_end_txn_was_sent(world: World) -> None:
    service = doomed(world)
    proxy = world.cluster.proxy
    held = proxy.plan("EndTxn", "hold-reply", nth=10, client=service.name)
    held.wait()
    service.kill()
    proxy.let_go(held)
    world.retire(service)


@row("killed after the commit, before the mark", services=1, audit=True, in_run=True)
def killed_before_mark(world: World) -> None:
    killed_at(world, "mark")


@row("killed inside a slot recovery, after its fence", services=1)
def killed_in_slot_recovery(world: World) -> None:
    """The process that recovers the dead slots is killed too; a third process recovers the slots of both."""
    first = world.services[0]
    heir = doomed(world, Fault("slot.replay", "kill", first=3))  # two are its own at its start
    first.kill()
    world.retire(first)
    dies(world, heir)
    world.start_services(1)


@row("killed inside a store recovery, after its fences", services=1)
def killed_in_store_recovery(world: World) -> None:
    """Each process that recovers the flushed store is killed; a new process recovers it."""
    first = world.services[0]
    two = [doomed(world, Fault("store.replay", "kill")) for _ in range(2)]
    world.retire(first)
    first.stop()
    world.redis.flush()
    for service in two:
        dies(world, service)
    world.start_services(1)


@row("a process killed with -9 under load")
def service_killed(world: World) -> None:
    world.services[0].kill()


@row("every process killed with -9, and started again")
def all_services_killed(world: World) -> None:
    for service in world.services:
        service.kill()
    for service in world.services:
        service.start()


@row("stands still between produce and EndTxn for three lease times, and wakes up", services=1)
def paused_past_the_lease(world: World) -> None:
    zombie = doomed(world, Fault("commit", "stop", first=20))
    world.until(lambda: plan_of(zombie).happened("commit") and stopped(zombie.pid), 30, "it stands still")
    time.sleep(3.0)
    zombie.resume()


@row("50 posts of one key at two processes at once")
def many_posts_of_one_key(world: World) -> None:
    assert world.load is not None
    for number in range(3):
        answers = world.load.send([world.ask(f"many-{number}")] * 50).result(60)
        assert len({result.metadata for results in answers for result in results}) == 1


@row("SIGTERM under load", expect="each event once; no doubtful answer")
def terminated(world: World) -> None:
    """No client of the leaving process gets 504, or loses a response that has begun."""
    assert world.load is not None
    leaving = world.services[0]
    leaving.stop()
    world.retire(leaving)
    assert leaving.exit_code == 0, leaving.tail()
    no_doubt(world)


@row("every process replaced, one after the other, under load", expect="each event once; no doubtful answer")
def rolling_replacement(world: World) -> None:
    for old in list(world.services):
        world.start_services(1)
        world.retire(old)
        old.stop()
        assert old.exit_code == 0, old.tail()
    no_doubt(world)


def no_doubt(world: World) -> None:
    """Check that there was no 504; a connection that is being closed may lose a request, which is then not written."""
    tries = [each for made in read(world.history).values() for each in made if each.results]
    statuses = [result.status for each in tries for result in each.results if result.type == "info"]
    assert 504 not in statuses
    world.notes.append(f"{len(statuses)} requests on connections that were being closed" if statuses else "")


@row("transactions held open for longer than their timeout", services=1)
def transaction_over_its_timeout(world: World) -> None:
    """Kafka aborts the transaction and raises the epoch; the late commit must fail, and must not count as committed."""
    slow = doomed(world, Fault("commit", "hold", first=20))
    world.until(lambda: plan_of(slow).happened("commit"), 30, "a commit is held")
    time.sleep(9.0)
    plan_of(slow).let_go("commit")


def metric(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (.*)$", text, re.MULTILINE))
