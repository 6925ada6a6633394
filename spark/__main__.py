"""`python -m spark`: one reconciliation run."""

import sys
import time
import traceback
import warnings
from typing import Final

from pyspark.errors import PySparkException

from service.shared import Rules, SettingsError, SharedSettings
from spark import job
from spark.errors import CannotRun
from spark.jvm import Py4JJavaError
from spark.session import open_session
from spark.settings import Settings, parse

EXIT_CANNOT_RUN: Final = 2


def main() -> int:
    """Carry out one run as the command line and the environment say; exit status 0 clean, 3 findings, 2 not run."""
    options = parse(sys.argv[1:])
    started = time.monotonic()

    def tell(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started:6.1f}s  {line}\n")
        sys.stderr.flush()

    # Where pandas is installed for something else, PySpark remarks on its version; the job does not use it.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    try:
        shared = SharedSettings.from_env()
        settings = Settings(shared=shared, options=options, rules=Rules.read(shared.rules))
        outcome = job.run(open_session(), settings, tell)
    except (SettingsError, CannotRun) as error:
        sys.stderr.write(f"cannot run: {error}\n")
        return EXIT_CANNOT_RUN
    except (PySparkException, Py4JJavaError):
        # Whatever Spark, Delta or a disk refused: status 1 would read like a verdict to nobody, but 3 must never.
        traceback.print_exc()
        sys.stderr.write(
            "cannot run: Spark failed, see above; what was done is kept, the next run goes on from there\n"
        )
        return EXIT_CANNOT_RUN
    sys.stdout.write(job.told(outcome, options.report))
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
