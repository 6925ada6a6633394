"""Fetches supported versions of Kafka into the cache, and runs the tests of the service's Kafka client on each.

    python -m tests.kafka_versions            every version
    python -m tests.kafka_versions 3.9 4.4

Exit status: 0 when the tests passed on every version, 1 when they failed on one.
"""

import os
import subprocess
import sys

from deploy import places
from deploy.console import StackError, run, say
from deploy.install import jars
from tests.kafka_versions import LOCKS, TESTS, VARIABLE, broker_of


def main() -> int:
    wanted = sys.argv[1:] or [*LOCKS]
    if unknown := [name for name in wanted if name not in LOCKS]:
        raise StackError(f"no lock for Kafka {', '.join(unknown)}: there are {', '.join(LOCKS)}")
    failed = []
    for name in wanted:
        jars.ensure(jars.read_lock("kafka", LOCKS[name]))
        say(f"Kafka {broker_of(LOCKS[name])} ...")
        command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(command, cwd=places.ROOT, env={**os.environ, VARIABLE: name}, check=False)
        if done.returncode:
            failed.append(name)
    versions = ", ".join(broker_of(LOCKS[name]) for name in failed or wanted)
    say(f"failed on Kafka {versions}" if failed else f"passed on Kafka {versions}")
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
