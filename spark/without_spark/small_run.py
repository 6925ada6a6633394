"""Whether a run is small, which decides how much its JVM compiles (session.SMALL_RUN_JAVA_OPTIONS).

The options of a JVM are set before Spark can count the records to read, so they are counted by the ends of the logs
that librdkafka lists. The count is an estimate: with either options a run finds the same.
"""

import json
import re
from pathlib import Path
from typing import Final

from spark.engine.session import INTERPRETED_RECORDS
from spark.errors import CannotRun, NeedsSpark
from spark.reading import planning
from spark.reading.run_plan import Plan
from spark.tables import last_run_file
from spark.tables.lake import SMALL_BYTES
from spark.without_spark.before_spark import BeforeSpark

# Delta's checksum file of a version. Those of Hadoop are hidden: `.{name}.crc` for a file.
_CHECKSUM: Final = re.compile(r"\d{20}\.crc")


def is_small(known: BeforeSpark) -> bool:
    """Check whether the lake has few rows, and Kafka few records that are not in it; false if that is not known.

    Without a file of the last run all records of all topics count that the run may audit. Kafka is not asked if
    without_spark.idle has listed the ends, or got no answer.
    """
    settings = known.settings
    try:
        if _size_of(known.lake / "deliveries") > SMALL_BYTES or known.admin.has_failed:
            return False
        stored = last_run_file.load_local(known.lake)
        last_plan = None if stored is None else Plan.from_rows(stored.last_run.plan)
        ends = known.admin.listed or planning.list_ends(known.admin, settings, last_plan)
        return planning.count_unread(ends, settings, last_plan) <= INTERPRETED_RECORDS
    except (CannotRun, NeedsSpark, OSError, ValueError, KeyError):
        # The run with Spark asks again, and reports the error.
        return False


def _size_of(table: Path) -> int:
    """Return the bytes of the newest version of a Delta table by its checksum file; 0 if there is no table."""
    log = table / "_delta_log"
    newest = max((path for path in log.glob("*.crc") if _CHECKSUM.fullmatch(path.name)), default=None)
    if newest is None:
        if log.exists():
            raise NeedsSpark("the size of the table is not known")
        return 0
    size: int = json.loads(newest.read_text(encoding="utf-8"))["tableSizeBytes"]
    return size
