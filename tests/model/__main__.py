"""`python -m tests.model [--deep] [NAME…]`: search the configurations, and print what was found in each."""

import argparse
import sys

from tests.model.configurations import DEEP, DEFAULT, MUTANTS
from tests.model.rules import Rules
from tests.model.search import search


def main() -> int:
    """0 where no search found a violation, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="more faults in each run; takes long, and some GB")
    parser.add_argument("--mutants", action="store_true", help="print the shortest trace of each rule taken out")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only configurations with this in their name")
    options = parser.parse_args()

    def wanted(name: str) -> bool:
        return not options.names or any(part in name for part in options.names)

    if options.mutants:
        for name, mutant in MUTANTS.items():
            if wanted(name):
                rules = Rules()._replace(**{mutant.rule: False})
                say(f"without {mutant.rule}, {name}: {search(mutant.configuration, rules)}")
        return 0
    violated = False
    for name, configuration in (DEEP if options.deep else DEFAULT).items():
        if wanted(name):
            result = search(configuration)
            violated |= bool(result.violation)
            say(f"{name}: {result}")
    return int(violated)


def say(line: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
