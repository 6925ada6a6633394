"""`python -m tests.bench NAME…`: measure, print, and keep the result in tests/bench/results."""

import argparse
import importlib

NAMES = ("visible", "poison", "moving")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=(*NAMES, []), metavar="NAME", help=", ".join(NAMES))
    for name in parser.parse_args().names or NAMES:
        print(f"== {name}", flush=True)
        importlib.import_module(f"tests.bench.{name}").main()


if __name__ == "__main__":
    main()
