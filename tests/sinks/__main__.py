"""`python -m tests.sinks --seeds 20`: sinks in a real PostgreSQL, as Delta and Iceberg tables.

Prints recall and precision of the audit by kind and cause; exit 0: both are 1.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from deploy import console
from deploy.stack import Kafka
from tests.sinks.planted import Trial, summary
from tests.sinks.postgres import Postgres
from tests.spark.runs import interpreted, session_for_tests


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sinks")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="the histories of the seeds 0 to N-1")
    seeds = parser.parse_args(arguments).seeds
    with tempfile.TemporaryDirectory(prefix="sinks") as folder, ExitStack() as stack:
        root = Path(folder)
        postgres = stack.enter_context(Postgres(root / "postgres"))
        kafka = stack.enter_context(Kafka(root / "kafka"))
        spark = session_for_tests()
        stack.callback(spark.stop)
        stack.enter_context(interpreted(spark))
        trial = Trial(spark, kafka.bootstrap, postgres, root, range(seeds))
        score = trial.carry_out()
    # Behind the lines of clients whose broker has ended.
    print("\n".join([*score.faults, score.table()]))
    print(", ".join(f"{name} {value}" for name, value in summary(trial, seeds).items()))
    return 0 if not score.faults else 1


if __name__ == "__main__":
    console.run(lambda: main(sys.argv[1:]))
