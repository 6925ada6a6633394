"""`python -m spark`: one reconciliation run."""

import sys
import time

from service.shared import Rules, SettingsError, SharedSettings
from spark import job
from spark.errors import CannotRun
from spark.session import open_session
from spark.settings import Settings, parse

EXIT_CANNOT_RUN = 2


def main() -> int:
    """Carry out one run as the command line and the environment say; exit status 0 clean, 3 findings, 2 not run."""
    options = parse(sys.argv[1:])
    started = time.monotonic()

    def tell(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started:6.1f}s  {line}\n")
        sys.stderr.flush()

    try:
        shared = SharedSettings.from_env()
        settings = Settings(shared=shared, options=options, rules=Rules.read(shared.rules))
        outcome = job.run(open_session(), settings, tell)
    except (SettingsError, CannotRun) as error:
        sys.stderr.write(f"cannot run: {error}\n")
        return EXIT_CANNOT_RUN
    sys.stdout.write(job.told(outcome, options.report))
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
