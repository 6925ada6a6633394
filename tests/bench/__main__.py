"""`python -m tests.bench [NAME…]`: measures on the real stack, prints, and keeps the results in tests/bench/results.

`python -m tests.bench against REV` compares this tree's service with that of another revision (against.py). Exits with
0, or with 1 if a benchmark's check failed (it then has no number). A missed goal is a result, not an error.
"""

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deploy.console import StackError
from deploy.places import ROOT
from tests.bench import against, report, results
from tests.bench.rows import NotRealWork, Row
from tests.bench.stage import Stage, stack
from tests.revisions import checkout, this_tree

# In the order of the report. Each is a module with a function `measure(stage)` that returns rows.
NAMES = (
    "post",
    "batch",
    "streams",
    "single",
    "transactions",
    "replay",
    "guarantee",
    "sizes",
    "parts",
    "growth",
    "recovery",
    "overload",
    "attacker",
    "slow",
    "idle",
    "compression",
    "visible",
    "poison",
    "moving",
    "audit",
)


def run(
    stage: Stage, name: str, measure: Callable[[Stage], list[Row]], about: str, more: Mapping[str, Any] | None = None
) -> bool:
    """Run one benchmark, print and keep its result with `more` about its conditions; False if its check failed."""
    print(f"\n== {name}", flush=True)
    where = {**results.describe(stage), **(more or {})}
    started = time.monotonic()
    rows: list[Row] = []
    failed = ""
    try:
        rows = measure(stage)
    except (NotRealWork, StackError, AssertionError) as error:
        failed = str(error)
    where |= {"about": about.strip(), "took_s": round(time.monotonic() - started)}
    results.keep(stage.results, name, where, rows, failed)
    print(report.as_text(rows) if not failed else f"NO NUMBER: {failed}", flush=True)
    return not failed


def _run_named(stage: Stage, name: str) -> bool:
    module = importlib.import_module(f"tests.bench.{name}")
    return run(stage, name, module.measure, module.__doc__ or "")


def _compare(arguments: Sequence[str]) -> int:
    """Run `against REV`. Returns the exit status: 0, or 1 without a number."""
    plan = against.Plan.of(arguments)
    with stack(plan.folder, plan.depth) as stage:
        other = checkout(plan.revision, stage.folder / "other")
        this = this_tree(stage.folder / "this")
        about = {"against": other.commit, "ours": " ".join(plan.described)}
        good = run(
            stage, plan.name, partial(against.measure, this=this, other=other, plan=plan), against.__doc__ or "", about
        )
    report.write(plan.folder, NAMES)
    return 0 if good else 1


def main() -> int:
    # On SIGTERM, stop the stack and delete its folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if sys.argv[1:2] == ["against"]:
        return _compare(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of them if none is named: {', '.join(NAMES)}")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_const", dest="depth", const="quick", help="does it work? small sizes")
    depth.add_argument("--full", action="store_const", dest="depth", const="full", help="10^7 keys too, more rounds")
    parser.add_argument("--records", type=int, nargs="+", default=[], help="audit: so many records, of 4000 each")
    parser.add_argument("--results", type=Path, help="folder for what is measured (--quick: build/bench)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no such bench: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    depth_name = arguments.depth or "standard"
    folder = arguments.results or (ROOT / "build" / "bench" if depth_name == "quick" else results.KEPT)
    with stack(folder.absolute(), depth_name, tuple(arguments.records)) as stage:
        good = [_run_named(stage, name) for name in arguments.names or NAMES]
    report.write(folder, NAMES)
    print(f"\n{folder / 'results.html'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
