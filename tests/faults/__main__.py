"""Injects faults under load.

`python -m tests.faults matrix [ROW…]`, `… stores`, `… soak --seed N --minutes M` and `… hanging --kills N`.
"""

import argparse
import sys
from pathlib import Path

from deploy import console, places
from tests import broker_classes
from tests.faults import clock, hanging, matrix, network, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("matrix", help="play rows of the matrix, all of them if none is named")
    rows.add_argument("rows", nargs="*", metavar="ROW")
    rows.add_argument("--seed", type=int, default=1)
    stores = commands.add_parser("stores", help="play the rows of the matrix with sentinels and clusters")
    stores.add_argument("--seed", type=int, default=1)
    long = commands.add_parser("soak", help="a random mix of faults from a seed; a failure is shrunk")
    long.add_argument("--seed", type=int, required=True)
    long.add_argument("--minutes", type=float, required=True)
    long.add_argument("--leg-minutes", type=float, default=10.0, help="each leg is judged for itself")
    long.add_argument("--shrink-minutes", type=float, default=20.0, help="for finding the fewest faults")
    long.add_argument("--keys-per-s", type=float, default=150.0)
    long.add_argument("--brokers", type=int, choices=(1, 3), default=3)
    long.add_argument("--only", default="", help="injectors, separated by commas")
    long.add_argument("--mutant", default="", help="take a rule out of the service (tests/integration/faulty.py)")
    long.add_argument("--no-audit", action="store_true", help="do without the reconciliation job")
    kills = commands.add_parser("hanging", help="kill every broker amid commits, and count partitions that stay open")
    kills.add_argument("--kills", type=int, default=10)
    kills.add_argument("--brokers", type=int, choices=(1, 3), default=1)
    kills.add_argument("--seed", type=int, default=1)
    kills.add_argument("--until-standing", type=int, help="stop when so many partitions have stood")
    kills.add_argument(
        "--service", type=Path, default=places.ROOT, help="a tree whose service runs, with its own .venv"
    )
    given = parser.parse_args()
    broker_classes.use()
    if given.command == "hanging":
        done = hanging.run(
            given.kills,
            given.brokers,
            given.seed,
            console.say,
            project=given.service.resolve(),
            until_standing=given.until_standing,
        )
        return 1 if any(each.standing or each.wrong for each in done) else 0
    if given.command == "stores":
        given.rows = [name for name, row in matrix.load_rows().items() if row.stores is not None]
    return soaked(given) if given.command == "soak" else played(parser, given)


def soaked(given: argparse.Namespace) -> int:
    lacking = network.lacking() or clock.lacking()
    if lacking:
        console.say(f"without cuts, lost packets and wrong clocks: {lacking}")
    options = soak.Options(
        keys_per_s=given.keys_per_s,
        mutants=tuple(filter(None, [given.mutant])),
        audit=not given.no_audit,
        odd=not lacking,
    )
    legs, _ = soak.run(
        given.seed,
        given.minutes,
        console.say,
        options,
        leg_minutes=given.leg_minutes,
        shrink_minutes=given.shrink_minutes,
        brokers=given.brokers,
        only=[name for name in given.only.split(",") if name],
    )
    return 1 if any(leg.wrong for leg in legs) else 0


def played(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    known = matrix.load_rows()
    if unknown := [name for name in given.rows if name not in known]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}")
    outcomes = matrix.run(given.rows, console.say, given.seed)
    failed = sum(bool(outcome.wrong) for outcome in outcomes)
    console.say(f"{len(outcomes)} rows, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    console.run(main)
    sys.exit()
