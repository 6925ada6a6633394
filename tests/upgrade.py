"""Replaces the previous release by this tree and back, under load: `python -m tests.upgrade [REV]`.

Two processes of release REV (a tag or a commit; by default the previous release) write for clients that repeat their
requests. One after the other is replaced by a process of this tree, and back: no answer may be left in doubt. Then each
of the two releases alone recovers what a killed process of the other has left, and a store that was flushed. In the end
the checker of the fault tests reads everything, posts every key again to both releases, and runs the audit, which must
be clean. Last, this tree's service and job must refuse records of a later version.

Exit status: 0 if all of that holds, else 1.
"""

import argparse
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from confluent_kafka import Producer

from deploy import console
from deploy.places import ROOT
from deploy.stack import Service
from tests import broker_classes
from tests.faults import history
from tests.faults.cluster import Cluster
from tests.faults.world import World
from tests.integration.auditing import Audit
from tests.revisions import Checkout, checkout, previous_release

KEYS_PER_S: Final = 120.0
CLIENTS: Final = 12
# Acknowledged events between two steps: both releases have written by then, at this rate in 4 s.
EACH: Final = 500
ACKED_S: Final = 120.0
# For the survivor of a kill and a flush.
RECOVERY_S: Final = 60.0
CHECK_S: Final = 900.0
REFUSES_S: Final = 60.0  # without output or CPU use
CANNOT_RUN: Final = 2
# How the lines begin with which service and job end.
REFUSALS: Final = ("the ledger of slot ", "cannot run: ")

Say = Callable[[str], None]


def replaced(world: World, leaver: Service, project: Path) -> Service:
    """Start a process of a project, then stop another as Kubernetes does: first it gets no requests any more."""
    (successor,) = world.start_services(1, project=project)
    world.retire(leaver)
    leaver.stop()
    world.wait_acked(EACH, ACKED_S)
    return successor


def in_doubt(folder: Path) -> int:
    """Count the requests so far whose answer left the client in doubt: none, 504, or another that promises nothing."""
    requests = (each for tries in history.read(folder).values() for each in tries)
    return sum(any(result.type == "info" for result in each.results) for each in requests)


def survive_alone(world: World, service: Service, other: Service) -> float:
    """Kill the other process, and flush Redis; returns the seconds until this one has recovered slots and store."""
    other.kill()
    world.redis.flush()
    took_s = world.recovery_s(RECOVERY_S)
    other.start()
    world.wait_acked(EACH, ACKED_S)
    return took_s


def play(world: World, other: Checkout, say: Say) -> Iterator[str]:
    """Replace, kill and flush under load, then check everything; yields what is wrong."""
    names = {ROOT: "this tree", other.root: other.commit}
    world.start_services(2, project=other.root)
    load = world.start_load("upgrade", clients=CLIENTS, keys_per_s=KEYS_PER_S)
    world.wait_acked(EACH, ACKED_S)
    for project in (ROOT, other.root):
        for leaver in list(world.services):
            successor = replaced(world, leaver, project)
            say(f"{leaver.name} ({names[leaver.project]}) is replaced by {successor.name} ({names[project]})")
    doubts = in_doubt(world.history)
    say(f"{load.acked} events acknowledged, {doubts} requests in doubt")
    if doubts:
        yield f"{doubts} requests were left in doubt by the replacements"
    new = replaced(world, world.services[0], ROOT)
    (old,) = (service for service in world.services if service is not new)
    for survivor, killed in ((new, old), (old, new)):
        took_s = survive_alone(world, survivor, killed)
        which = f"{killed.name} ({names[killed.project]}) killed and Redis flushed"
        say(f"{which}: {survivor.name} ({names[survivor.project]}) has recovered all after {took_s:.1f} s")
    load.stop()
    yield from [*load.mistakes, *load.hanging, *world.bugs()]
    verdict = world.check(audit=True, timeout_s=CHECK_S)
    say(
        f"{verdict.keys} keys, {verdict.acknowledged} acknowledged, {verdict.records} records: {verdict.lost} lost, "
        f"{verdict.duplicates} duplicates; every key posted again to both releases"
    )
    yield from (f"{kind}: {text}" for kind, text in verdict.violations)
    found = json.loads((world.folder / "report" / "report.json").read_text())
    say(f"the audit says {found['run']['verdict']}")
    if found["run"]["verdict"] != "clean":
        yield f"the audit found {Counter(each['kind'] for each in found['findings'])}"


def refusals(world: World, say: Say) -> Iterator[str]:
    """Let this tree's service and job meet records of a later version in every partition of the ledger."""
    for service in world.services:
        service.stop()
    newer = Producer({"bootstrap.servers": world.cluster.bootstrap})
    for slot in range(len(world.transactional_ids())):
        newer.produce(world.ledger, json.dumps({"v": 3, "slot": slot}).encode(), partition=slot)
    newer.flush(REFUSES_S)
    older = world.service()
    older.start(wait_ready=False)
    audit = Audit(world.cluster.bootstrap, world.namespace, world.folder / "refuses", world.topics)
    audit.start()
    for name, process in (("service", older), ("job", audit)):
        status = process.wait_while_working(REFUSES_S)
        lines = [line for line in process.log.read_text().splitlines() if line.startswith(REFUSALS)]
        say(f"the {name} ends with {status}: {lines[-1] if lines else process.tail(3)}")
        if status != CANNOT_RUN or not lines:
            yield f"the {name} did not refuse records of a later version: see {process.log}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision", nargs="?", metavar="REV", help="a tag or a commit; default: the previous release")
    revision = parser.parse_args().revision or previous_release()
    broker_classes.use()
    folder = Path(tempfile.mkdtemp(prefix="fencepost-upgrade-"))
    with console.progress(f"installing {revision}"):
        other = checkout(revision, folder / "other")
    with Cluster(folder / "cluster") as cluster, World(folder / "world", cluster) as world:
        wrong = [*play(world, other, console.say), *refusals(world, console.say)]
    for text in wrong:
        console.say(console.red(text))
    if wrong:
        console.say(f"see {folder}")
        return 1
    console.say(f"{other.commit} and this tree: every event is there once, and no replacement left an answer in doubt")
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    console.run(main)
