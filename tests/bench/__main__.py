"""`python -m tests.bench [NAME…]`: measure on the real stack, print, and keep the results in tests/bench/results.

Exit 0, or 1 where a bench's check failed (it has no number then). A goal that is not met is a result, not an error.
"""

import argparse
import importlib
import signal
import sys
import time
from pathlib import Path

from deploy.console import StackError
from deploy.places import ROOT
from tests.bench import report, results
from tests.bench.rows import NotRealWork, Row
from tests.bench.stage import Stage, stack

# In the order of the report; each is a module with one function, measure(stage), that answers rows.
NAMES = (
    "post",
    "batch",
    "single",
    "replay",
    "guarantee",
    "sizes",
    "parts",
    "growth",
    "recovery",
    "overload",
    "attacker",
    "idle",
    "compression",
    "visible",
    "poison",
    "moving",
    "audit",
)


def run(stage: Stage, name: str) -> bool:
    """Measure one, print it and keep it; False where its check failed."""
    print(f"\n== {name}", flush=True)
    module = importlib.import_module(f"tests.bench.{name}")
    where = results.describe(stage)
    started = time.monotonic()
    rows: list[Row] = []
    failed = ""
    try:
        rows = module.measure(stage)
    except (NotRealWork, StackError, AssertionError) as error:
        failed = str(error)
    where |= {"about": (module.__doc__ or "").strip(), "took_s": round(time.monotonic() - started)}
    results.keep(stage.results, name, where, rows, failed)
    print(report.as_text(rows) if not failed else f"NO NUMBER: {failed}", flush=True)
    return not failed


def main() -> int:
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
    # Ended from outside, it takes its stack and its folder with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with stack(folder.absolute(), depth_name, tuple(arguments.records)) as stage:
        good = [run(stage, name) for name in arguments.names or NAMES]
    report.write(folder, NAMES)
    print(f"\n{folder / 'results.html'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
