"""`python -m tests.model [--deep] [NAME…]`: searches the configurations, and prints the result of each."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.faults.results import machine, table
from tests.model.configurations import DEEP, DEFAULT, MUTANTS, REDUNDANT
from tests.model.rules import Rules
from tests.model.search import search

CAUGHT: Final = Path(__file__).with_name("mutants.md")
HEAD: Final = """# The model's mutants

`python -m tests.model --mutants` takes out one rule of the protocol at a time, searches, prints the shortest trace, and
writes this table. `test_rules.py` holds each line; on real parts `tests/integration/test_mutants.py` takes out six.

"""


def main() -> int:
    """Run the command line. Returns 0 if no search found a violation, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="more faults in each run; takes long, and some GB")
    parser.add_argument("--mutants", action="store_true", help=f"each rule taken out: traces, and {CAUGHT.name}")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only configurations with this in their name")
    options = parser.parse_args()

    def wanted(name: str) -> bool:
        return not options.names or any(part in name for part in options.names)

    if options.mutants:
        lines = caught(wanted)
        if not options.names:
            heads = ("what goes wrong", "rule taken out", "what the search finds", "steps", "states")
            CAUGHT.write_text(f"{HEAD}{table(heads, lines)}\nMeasured: {machine()}\n")
        return 0
    violated = False
    for name, configuration in (DEEP if options.deep else DEFAULT).items():
        if wanted(name):
            result = search(configuration)
            violated |= bool(result.violation)
            say(f"{name}: {result}")
    return int(violated)


def caught(wanted: Callable[[str], bool]) -> dict[str, list[str]]:
    """Search with each of these mutants; returns the lines of the table."""
    lines = {}
    cases = {name: (mutant.rule, mutant.configuration) for name, mutant in MUTANTS.items()}
    cases |= {name: (rule, configuration) for rule, (name, configuration) in REDUNDANT.items()}
    for name, (rule, configuration) in cases.items():
        if wanted(name):
            result = search(configuration, Rules()._replace(**{rule: False}))
            say(f"without {rule}, {name}: {result}")
            found = result.violation or "nothing: other rules cover it, see configurations.py"
            lines[name] = [f"`{rule}`", found, str(len(result.trace) or ""), f"{result.states:,}"]
    return lines


def say(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
