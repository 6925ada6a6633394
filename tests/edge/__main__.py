"""`python -m tests.edge`: sends requests of all kinds that the OpenAPI document allows or forbids to a real service.

Schemathesis makes them from the document that the service serves, and checks that each answer is one that the document
promises: status, headers, media type and body; no 5xx; within five seconds. Exits with 0 if all checks passed.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from deploy import console
from deploy.stack import Kafka, Redis
from tests import broker_classes
from tests.edge.fuzz import Plan, run, table
from tests.edge.stack import edge


def main() -> int:
    # On SIGTERM, stop the stack and delete its folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(prog="python -m tests.edge", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=200, help="random requests of each operation (200)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    broker_classes.use()
    with tempfile.TemporaryDirectory(prefix="fencepost-edge-") as name:
        folder = Path(name)
        with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis, edge(folder, kafka, redis) as target:
            found = run(target.service.url, target.world, folder, Plan(given.examples, given.seed))
            faults = target.faults()
    console.say("\n".join([found.output, table(found.statuses), *faults]))
    return 0 if found.passed and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
