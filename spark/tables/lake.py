"""The Delta tables of a lake, and the commits of a run, which no process can make that has lost the lake
(spark.tables.commits)."""

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from delta.tables import DeltaMergeBuilder, DeltaTable
from pyspark.sql import Column, DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.engine import frames, session
from spark.engine.jvm import Snapshot, snapshot_of, table_property, transaction_number, version_of
from spark.errors import CannotRun
from spark.reading.decode import EVENT
from spark.reading.kafka_admin import TopicPartition
from spark.tables import commits, deliveries, files, hours, lock, schemas

# Some ten thousand rows, which fit into memory many times over.
SMALL_BYTES: Final = 4 << 20
SMALL_FILES: Final = 32
"""Up to this size, in this many files, `Lake.read_cached` keeps a table in memory."""

LOG_RETENTION: Final = "interval 1 day"
"""How long Delta keeps the log entries of a lake on which runs follow each other within a minute; a checkpoint of each
table is kept besides."""
# Delta refuses log entries that are kept for a shorter time than it remembers replaced files.
_RETENTIONS: Final = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")

# The condition of a MERGE into `deliveries` by which a row about an event matches.
_SAME_EVENT_ROW: Final = (
    f"old.kind = '{EVENT}'",
    *(f"old.{name} = new.{name}" for name in deliveries.ROW_KEY if name != "kind"),
)


class Lake:
    """Delta tables below one root. The first write to a table creates the table.

    `check_held` is called before each commit: CannotRun if this process does not hold the lake any more. The process
    may lose the lake between this check and the commit: then Delta refuses the commit by its number.
    """

    def __init__(self, spark: SparkSession, root: str, check_held: lock.CheckHeld = lock.unchecked) -> None:
        self.spark = spark
        self.root = root
        self.check_held = check_held
        # Delta stores the token with each commit of a run, so that a skipped commit is known.
        self._token = uuid.uuid4().hex
        # By table: the rows of its current version, which are kept in memory. Each commit drops those of its table.
        self._kept: dict[str, DataFrame] = {}
        # By table: the rows in memory that the last commit of this object has appended. Those of the only commit to a
        # table are all its rows.
        self._appended: dict[str, DataFrame] = {}
        # By run: how many times the run was taken over, the last time by this process; 0 for a run that it began.
        self._takeovers: Counter[int] = Counter()
        # By table and run: the commits of this process.
        self._commits: Counter[tuple[str, int]] = Counter()

    def path(self, name: str) -> str:
        """Return the path of a table."""
        return f"{self.root}/{name}"

    def exists(self, name: str) -> bool:
        """Check whether a table exists."""
        return DeltaTable.isDeltaTable(self.spark, self.path(name))

    @contextmanager
    def begin_commit(self, name: str, run: int) -> Iterator[DeltaTable]:
        """Open a table for the one commit of a run that is made in the context; CannotRun if this process does not hold
        the lake any more."""
        with self._numbered(name, run):
            yield self._open(name)

    def read(self, name: str) -> DataFrame:
        """Read the current rows of a table; no rows if the table does not exist."""
        if name in schemas.TABLES and not self.exists(name):
            return frames.rows_of(self.spark, schemas.of(name), [])
        return self.spark.read.format("delta").load(self.path(name))

    def read_cached(self, name: str) -> DataFrame:
        """Read the current rows of a table, those of a small table of few files once after each commit of this object.

        For each query on a table Delta first runs a query on its log, for the files to read. Of a small table both are
        done once, and the rows are kept in memory. A large table is read for each query, without the files that the
        query's conditions prune. No other process commits to the lake that this process holds. A table whose only
        commit is an `append` of this object, of rows in memory, is not read.
        """
        if name in self._kept:
            return self._kept[name]
        rows = self.read(name)
        if not self.exists(name):
            return rows
        snapshot = snapshot_of(rows)
        if not snapshot.files and name in schemas.TABLES:
            return frames.rows_of(self.spark, schemas.of(name), [])
        appended = self._appended.pop(name, None)
        if not _is_small(snapshot) or _is_scattered(snapshot):
            return rows
        if appended is not None and version_of(rows) == 0 and self.own_commit(name) is not None:
            self._kept[name] = appended
        else:
            self._kept[name] = rows.localCheckpoint(eager=False)
        return self._kept[name]

    def _open(self, name: str) -> DeltaTable:
        return DeltaTable.forPath(self.spark, self.path(name))

    def _begin_unnumbered(self, name: str) -> None:
        """Drop the rows of a table that are kept; CannotRun if this process does not hold the lake any more."""
        self.check_held()
        self._kept.pop(name, None)
        self._appended.pop(name, None)

    @contextmanager
    def _numbered(self, name: str, run: int) -> Iterator[None]:
        """Give the next number of a run to the one commit to a table in the context; Delta reads the number from the
        session's settings. CannotRun if this process does not hold the lake any more."""
        self._begin_unnumbered(name)
        number = commits.number(run, self._takeovers[run], self._commits[name, run])
        self._commits[name, run] += 1
        prefix = "spark.databricks.delta.write"
        settings = {
            f"{prefix}.txnAppId": commits.WRITER,
            f"{prefix}.txnVersion": str(number),
            "spark.databricks.delta.commitInfo.enabled": "true",
            "spark.databricks.delta.commitInfo.userMetadata": self._token,
        }
        with session.settings(self.spark, settings):
            yield

    def take_over(self, run: int, names: Iterable[str]) -> None:
        """Number this process's commits of an interrupted run after those of the processes that were at work on it.

        `names` are all tables to which these processes may have committed.
        """
        numbers = [transaction_number(self.read(name), commits.WRITER) for name in names if self.exists(name)]
        self._takeovers[run] = 1 + max(
            self._takeovers[run], *(commits.takeovers_in(number, run) for number in (None, *numbers))
        )

    def check_committed(self, name: str, run: int) -> None:
        """Check that the last commit of this process to a table, of a run, is in the table; CannotRun if Delta has
        skipped the commit."""
        number = commits.number(run, self._takeovers[run], self._commits[name, run] - 1)
        if transaction_number(self.read(name), commits.WRITER) != number:
            raise CannotRun(f"{self.path(name)}: another process has written this table since: repeat the command")

    def newest_commit(self, name: str) -> commits.Commit | None:
        """Read the newest commit to a table from its log; None if the table, or that file of its log, does not exist.

        Delta deletes neither the newest commits nor those of the last days.
        """
        if not self.exists(name):
            return None
        version = version_of(self.read(name))
        return commits.of(files.read(self.spark, f"{self.path(name)}/_delta_log", f"{version:020}.json") or "")

    def own_commit(self, name: str) -> str | None:
        """Return the id of the newest commit to a table if this object has made it; else None."""
        commit = self.newest_commit(name)
        return commit.id if commit is not None and commit.token == self._token else None

    def fence(self, names: Iterable[str], run: int) -> None:
        """Refuse further commits to these tables by the process from which a run was taken over (`take_over`): an empty
        commit to each.

        Tables that each run writes are created. The others are left out as long as they do not exist (a view has no
        table before its topic has an event).
        """
        for name in names:
            if name in ("deliveries", *schemas.WRITTEN_AFTER_MERGE) or self.exists(name):
                self.append(name, self.read(name).limit(0), run)

    def last_committed_run(self, name: str) -> int | None:
        """Return the last run that has committed to a table, by Delta's log; None if there is none."""
        number = transaction_number(self.read(name), commits.WRITER) if self.exists(name) else None
        return None if number is None else commits.run_in(number)

    def is_small(self, name: str) -> bool:
        """Check whether a table has at most some ten thousand rows; true if the table does not exist."""
        return not self.exists(name) or _is_small(snapshot_of(self.read(name)))

    def add_columns(self, name: str, run: int) -> None:
        """Add the columns that a table of an earlier version lacks, in a commit of the run; they are null there."""
        if self.exists(name) and not set(schemas.TABLES[name]) <= set(self.read(name).columns):
            none = frames.rows_of(self.spark, schemas.of(name), [])
            self._write(name, none.write.option("mergeSchema", True), "append", run)

    def rename_columns(self, name: str, renamed: Mapping[str, str], run: int) -> None:
        """Rewrite a table with renamed columns (old and new names), in a commit of the run; nothing if no column has an
        old name.

        Delta cannot rename a partition column.
        """
        rows = self.read(name)
        if not renamed.keys() & set(rows.columns):
            return
        renamed_rows = rows.select(*(F.col(old).alias(renamed.get(old, old)) for old in rows.columns))
        if name in schemas.PARTITIONS:
            renamed_rows = renamed_rows.hint("rebalance", *schemas.PARTITIONS[name])
        self._write(name, renamed_rows.write.option("overwriteSchema", True), "overwrite", run)

    def append(self, name: str, rows: DataFrame, run: int, *, in_memory: DataFrame | None = None) -> None:
        """Append rows in a commit of a run, at every call. `in_memory` are the same rows if they are checkpointed, with
        the columns of the table."""
        self._write(name, rows.write, "append", run)
        if in_memory is not None:
            self._appended[name] = in_memory

    def append_once(self, name: str, rows: DataFrame, run: int, *, in_memory: DataFrame | None = None) -> None:
        """Append rows with the column `run`, as `append` does. If the run was taken over, rows that it has appended
        before are replaced."""
        if self._takeovers[run] and self.exists(name):
            self.replace(name, rows, f"run = {run}", run)
        else:
            self.append(name, rows, run, in_memory=in_memory)

    def append_unnumbered(self, name: str, rows: DataFrame) -> None:
        """Append rows in a commit that belongs to no run, at every call."""
        self._begin_unnumbered(name)
        rows.write.format("delta").mode("append").save(self.path(name))

    def overwrite(self, name: str, rows: DataFrame, run: int) -> None:
        """Replace all rows of a table."""
        self._write(name, rows.write, "overwrite", run)

    def replace(self, name: str, rows: DataFrame, where: str, run: int) -> None:
        """Replace the rows that meet the condition `where` by `rows`, which must meet it too."""
        if self.exists(name):
            self._write(name, rows.write.option("replaceWhere", where), "overwrite", run)
        else:
            self.append(name, rows, run)

    def merge(self, rows: DataFrame, touched: list[str], run: int) -> None:
        """Merge ROWs, one for each deliveries.ROW_KEY, into `deliveries`; CannotRun if this run was taken over.

        `touched` are all hours of the rows. Rows may have the column `vanished` (deliveries.with_vanished).
        """
        same = (f"old.{name} <=> new.{name}" for name in deliveries.ROW_KEY)
        with self._into_deliveries(rows, touched, run, *same) as merge:
            if "vanished" in rows.columns:
                merge = merge.whenMatchedUpdate("new.vanished", set=dict(deliveries.merged(vanished=True)))
            merge = merge.whenMatchedUpdate(set=dict(deliveries.merged())).whenNotMatchedInsertAll()
            # A skipped MERGE returns no row.
            if not merge.execute().collect():
                raise self.fenced(run)

    def fenced(self, run: int) -> CannotRun:
        """Return the error of a run whose records were not written, since Delta skipped its commit."""
        return CannotRun(f"run {run} was taken over by another run on --lake {self.root}; start the run again")

    def change_ids(self, rows: DataFrame, touched: list[str], run: int) -> None:
        """Change the ids of rows of `deliveries` to `event_id`, and their `run` to this run; idempotent.

        `rows` are `accepted_hour, id, topic, partition, offset, event_id`, `touched` all hours of these rows.
        """
        changed: dict[str, str | Column] = {"id": F.col("new.event_id"), "run": F.lit(run)}
        with self._into_deliveries(rows, touched, run, *_SAME_EVENT_ROW) as merge:
            merge.whenMatchedUpdate(set=changed).execute()

    def settle_elsewhere(self, rows: DataFrame, touched: list[str], run: int) -> None:
        """Set `elsewhere` and `freed_ms` of rows that were answered 202 or 504, by other rows of their ids; idempotent.

        `rows` are `accepted_hour, id, elsewhere, freed_ms` (cross_hour.settled_elsewhere), `touched` all hours of them.
        """
        same_id = ("old.accepted_hour = new.accepted_hour", "old.id = new.id", deliveries.in_doubt("old."))
        settled: dict[str, str | Column] = {
            "elsewhere": F.col("new.elsewhere"),
            "freed_ms": F.col("new.freed_ms"),
            "run": F.lit(run),
        }
        with self._into_deliveries(rows, touched, run, *same_id) as merge:
            merge.whenMatchedUpdate(set=settled).execute()

    @contextmanager
    def _into_deliveries(
        self, rows: DataFrame, touched: list[str], run: int, *same: str
    ) -> Iterator[DeltaMergeBuilder]:
        """Begin a MERGE of `new` rows into the `old` ones of `deliveries`; `same` are conditions of a match.

        `touched` (`yyyy-MM-dd HH:mm:ss`, UTC) are all hours of the rows: literals in the condition let Delta prune all
        other hours.
        """
        with self.begin_commit("deliveries", run) as table:
            yield table.alias("old").merge(rows.alias("new"), " AND ".join([hours.sql(touched, "old."), *same]))

    def mark_past_end(self, ends: Mapping[TopicPartition, int], since: str, run: int) -> None:
        """Set `was_past_end` of claims on offsets at or past these ends of their logs; idempotent.

        `since` is the first hour (`yyyy-MM-dd HH:mm:ss`, UTC) of the rows that are read.
        """
        unmarked = F.expr(hours.since(since)) & ~F.coalesce("was_past_end", F.lit(False))
        marked: dict[str, str | Column] = {"was_past_end": F.lit(True), "run": F.lit(run)}
        with self.begin_commit("deliveries", run) as table:
            table.update(unmarked & deliveries.is_unwritten(ends), marked)

    def mark_proven_lost(self, rows: DataFrame, touched: list[str], run: int) -> None:
        """Set `proven_lost` of rows of `deliveries`; idempotent. Their `run` stays, since no verdict changes by it.

        `rows` are `accepted_hour, id, topic, partition, offset` (findings.newly_lost), `touched` all hours of them.
        """
        with self._into_deliveries(rows, touched, run, *_SAME_EVENT_ROW) as merge:
            merge.whenMatchedUpdate(set={"proven_lost": F.lit(True)}).execute()

    def delete_before(self, first_hour: str, run: int) -> None:
        """Delete rows accepted before `first_hour` (`yyyy-MM-dd HH:mm:ss`, UTC), and the plans of runs before that."""
        before_ms = f"unix_millis(TIMESTAMP '{first_hour}')"
        conditions = {
            **dict.fromkeys(
                ("deliveries", "findings", "mirrored", "sinks", "verdicts"), f"accepted_hour < TIMESTAMP '{first_hour}'"
            ),
            "rejects": f"seen_ms < {before_ms}",
            **dict.fromkeys(("progress", "runs"), f"frozen_ms < {before_ms} AND run < {run}"),
        }
        for name, condition in conditions.items():
            if self.exists(name):
                with self.begin_commit(name, run) as table:
                    table.delete(condition)

    def optimize(self, some_hours: list[str], names: Iterable[str]) -> None:
        """Compact the small files of `deliveries` in these hours, and those of the tables `names` with many files."""
        if some_hours and self.exists("deliveries"):
            self._begin_unnumbered("deliveries")
            self._open("deliveries").optimize().where(hours.sql(some_hours)).executeCompaction()
        for name in names:
            if self.exists(name) and _is_scattered(snapshot_of(self.read(name))):
                self._begin_unnumbered(name)
                self._open(name).optimize().executeCompaction()

    def keep_short_logs(self, names: Iterable[str]) -> None:
        """Let Delta delete the log entries of these tables after LOG_RETENTION, where a table has no such property.

        By default Delta keeps them for 30 days, and lists them all for each read of a folder.
        """
        for name in names:
            if self.exists(name) and table_property(self.read(name), _RETENTIONS[0]) is None:
                self._begin_unnumbered(name)
                # Delta's SQL takes a relative path for the name of a table.
                path = files.qualified(self.spark, self.path(name)).replace("`", "``")
                properties = ", ".join(f"'{name}' = '{LOG_RETENTION}'" for name in _RETENTIONS)
                self.spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({properties})")

    def vacuum(self, last_h: int, names: Iterable[str] = schemas.TABLES) -> None:
        """Delete the files of these tables that no version of the last `last_h` hours needs."""
        settings = {
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
            # Else Delta commits twice to each table, which VACUUM does not change, on most file systems.
            "spark.databricks.delta.vacuum.logging.enabled": "false",
            # Delta lists a table's files in this many tasks, however few the files are; Spark's default is 10,000.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(
                2 * self.spark.sparkContext.defaultParallelism
            ),
        }
        with session.settings(self.spark, settings):
            for name in names:
                if self.exists(name):
                    self._begin_unnumbered(name)
                    self._open(name).vacuum(last_h)

    def _write(self, name: str, writer: DataFrameWriter, mode: str, run: int) -> None:
        """Write rows in a commit of a run; `writer` has their options."""
        with self._numbered(name, run):
            if name in schemas.STATISTICS_OF and not self.exists(name):
                writer = writer.option("delta.dataSkippingStatsColumns", schemas.STATISTICS_OF[name])
            writer.format("delta").mode(mode).partitionBy(*schemas.PARTITIONS.get(name, ())).save(self.path(name))


def _is_scattered(snapshot: Snapshot) -> bool:
    """Check whether a table has many files."""
    return snapshot.files > SMALL_FILES


def _is_small(snapshot: Snapshot) -> bool:
    """Check the size in bytes of a table."""
    return snapshot.size <= SMALL_BYTES
