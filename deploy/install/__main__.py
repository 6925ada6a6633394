"""`python -m deploy.install`: installs Java and the jars, if they are missing."""

from deploy.console import run
from deploy.install import jars, java


def main() -> int:
    java.home()
    jars.ensure()
    return 0


if __name__ == "__main__":
    run(main)
