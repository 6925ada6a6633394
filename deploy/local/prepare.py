"""Sees to Java and the jars: `python -m deploy.local.prepare`."""

from deploy.local import jars, java
from deploy.local.console import run


def main() -> int:
    java.home()
    jars.ensure()
    return 0


if __name__ == "__main__":
    run(main)
