"""The command line: `fencepost`, or `python -m service.cli` if the package is not installed."""

import importlib.util
import sys


def main() -> int:
    """Run the command line; exit code 2 if a needed package is not installed."""
    missing = [name for name in ("typer", "rich", "aiokafka", "redis") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"{', '.join(missing)} not installed: pip install 'fencepost[service]'\n")
        return 2
    from service.cli.commands import app

    app(prog_name="fencepost")
    return 0
