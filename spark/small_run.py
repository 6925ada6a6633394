"""Whether a run is small, which decides how much its JVM compiles (session.SMALL_RUN_JAVA_OPTIONS).

The options of a JVM are set before Spark can count the records to read, so librdkafka lists the ends of the logs. The
count is an estimate: with either options a run finds the same.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spark.errors import CannotRun, NeedsSpark
from spark.reading import planning
from spark.reading.librdkafka_admin import LibrdkafkaAdmin
from spark.reading.run_plan import Plan
from spark.session import INTERPRETED_RECORDS
from spark.settings import Settings
from spark.tables import files, last_run_file
from spark.tables.lake import SMALL_BYTES

# Delta's checksum file of a version. Those of Hadoop are hidden: `.{name}.crc` for a file.
_CHECKSUM: Final = re.compile(r"\d{20}\.crc")


def is_small(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Check whether the lake has few rows, and Kafka few records that are not in it; false if that is not known.

    Without a file of the last run all records of all topics count that the run may audit. A run with sinks reads
    tables of any size, and one with `--follow` goes on for days.
    """
    lake = files.local_folder(settings.options.lake)
    if lake is None or settings.options.follow or settings.rules.sinks or files.may_be_elsewhere(environ):
        return False
    try:
        if _size_of(lake / "deliveries") > SMALL_BYTES:
            return False
        stored = last_run_file.load_local(lake)
        last_plan = None if stored is None else Plan.from_rows(stored.last_run.plan)
        return planning.count_unread(LibrdkafkaAdmin(settings.shared), settings, last_plan) <= INTERPRETED_RECORDS
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
