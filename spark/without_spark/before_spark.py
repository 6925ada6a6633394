"""What a process can know before it starts Spark: a lake in a local folder, and the logs by requests of librdkafka.

A run that repeats the last one is made from these (without_spark.idle). Of any other run they tell whether it is small
(without_spark.small_run).
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from spark.reading.librdkafka_admin import LibrdkafkaAdmin
from spark.settings import Settings
from spark.tables import files


class BeforeSpark:
    """The settings of a run, the local folder of its lake, and the connection by which Kafka is asked without a JVM."""

    def __init__(self, settings: Settings, lake: Path) -> None:
        self.settings = settings
        self.lake = lake

    @cached_property
    def admin(self) -> LibrdkafkaAdmin:
        """The process's requests to Kafka, by one connection. NeedsSpark if librdkafka cannot log in."""
        return LibrdkafkaAdmin(self.settings.shared)


def known(settings: Settings, environ: Mapping[str, str]) -> BeforeSpark | None:
    """Return what is known before Spark; None for a run that may be of any size, or whose lake only Spark can open.

    A run with sinks reads tables of any size, and one with `--follow` goes on for days. A lake on another file system,
    or in an environment whose default file system may be another one, is opened by Spark.
    """
    lake = files.local_folder(settings.options.lake)
    if lake is None or settings.options.follow or settings.rules.sinks or files.may_be_elsewhere(environ):
        return None
    return BeforeSpark(settings, lake)
