"""The errors of a run. Each message is one line that names the problem and the remedy."""


class CannotRun(Exception):
    """The run was not possible, or its result is not valid; exit status 2. The next run can continue on the lake."""


class AnotherRun(CannotRun):
    """Another run holds the lock of the lake."""


class Unreadable(Exception):
    """A sink cannot be read, or not as its rule says. The run goes on. The message is one line without secrets."""


class NeedsSpark(Exception):
    """A run needs Spark: it has more to do than to repeat the last report (without_spark.idle), or may have more."""


class Stopped(Exception):
    """The process was asked to end, and does so between two steps of a run. The next run can continue on the lake."""
