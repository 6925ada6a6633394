"""`python -m tests.faults matrix [ROW…]` and `python -m tests.faults soak --seed N --minutes M`."""

import argparse
import sys

from deploy.local import console
from tests.faults import matrix


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("matrix", help="play rows of the matrix, all of them if none is named")
    rows.add_argument("rows", nargs="*", metavar="ROW")
    rows.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    known = matrix.load_rows()
    if unknown := [name for name in given.rows if name not in known]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
    outcomes = matrix.run(given.rows, console.say, given.seed)
    matrix.write(outcomes)
    failed = sum(bool(outcome.wrong) for outcome in outcomes)
    console.say(f"{len(outcomes)} rows, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    console.run(main)
    sys.exit()
