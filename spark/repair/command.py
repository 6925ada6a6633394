"""The command `repair`: plans what to do about lost and missing events, and about surplus copies, and does it.

A plan is stored in the lake before anything is sent. A process that is killed leaves a plan without its outcome; the
same command afterwards sends and copies what is missing, and nothing twice.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings, wire
from spark import export, frames
from spark.errors import CannotRun
from spark.reading.kafka_admin import Ends, KafkaAdmin, Topic, TopicPartition
from spark.reading.run_plan import DATA, Log, Plan
from spark.repair import bodies, copier, entries, evidence, layouts, send
from spark.repair.entries import Entry
from spark.repair.layouts import Layout, ReadUntil
from spark.rules import kinds
from spark.settings import FindingsOptions, RepairOptions
from spark.step_timer import OnProgress
from spark.tables import lake, lake_version, lock
from spark.tables.lake import Lake

PLANNED: Final = "planned"
EXECUTING: Final = "executing"
DONE: Final = "done"
"""States of a plan."""

TABLES: Final = ("repairs", "repair_entries")
STORE_EVERY_S: Final = 30.0
"""How often outcomes are stored while events are sent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a repair has planned and done: the plan's number, its entries, and lines for the terminal.

    `is_left`: something is left to do for an operator.
    """

    plan: int
    entries: Sequence[Entry]
    lines: Sequence[str]
    is_left: bool


def carry_out(
    spark: SparkSession,
    shared: SharedSettings,
    options: RepairOptions,
    on_progress: OnProgress,
    now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    transport: httpx.BaseTransport | None = None,
) -> Outcome:
    """Make a plan, store it, and execute it if the options say so; CannotRun if that is not possible.

    The lake is locked meanwhile, so that no run of the audit is at work. `transport` replaces the network for HTTP.
    """
    with lock.held(spark, options.lake) as check_held:
        tables = Lake(spark, options.lake, check_held)
        lake_version.check(tables)
        repair = _Repair(tables, shared, options, on_progress, now_ms, transport)
        return repair.clean() if options.clean else repair.resend()


class _Repair:
    """One invocation of the command."""

    def __init__(
        self,
        tables: Lake,
        shared: SharedSettings,
        options: RepairOptions,
        on_progress: OnProgress,
        now_ms: Callable[[], int],
        transport: httpx.BaseTransport | None,
    ) -> None:
        self.lake = tables
        self.spark = tables.spark
        self.shared = shared
        self.options = options
        self.on_progress = on_progress
        self.now_ms = now_ms
        self.transport = transport
        self.began_ms = now_ms()
        self.number = 0  # of the commits to the tables (_take_number)
        self.audited = self._last_plan()

    def _last_plan(self) -> Plan:
        """Return the plan of the last finished run; CannotRun without one, or for another namespace."""
        run = self.lake.read("runs").agg(F.max("run")).collect()[0][0]
        rows = [] if run is None else self.lake.read("progress").where(F.col("run") == run).collect()
        plan = Plan.from_rows(row.asDict(recursive=True) for row in rows)
        if plan is None:
            raise CannotRun(f"--lake {self.lake.root} has no finished run: give the --lake of a run")
        namespace = json.loads(plan.options)["namespace"]
        if namespace != self.shared.namespace:
            raise CannotRun(
                f"--lake {self.lake.root} is of namespace {namespace!r}, not {self.shared.namespace!r}: set "
                "FENCEPOST_NAMESPACE to the namespace of the lake"
            )
        return plan

    # ------------------------------------------------------------------------------------ lost and missing events

    def resend(self) -> Outcome:
        """Repair lost events, and events that sinks lack."""
        options = self.options
        if options.execute and options.into:
            self._finish_interrupted(options.into)
        found = evidence.collected(
            export.selected(
                self.lake,
                FindingsOptions(
                    lake=options.lake, kinds=options.kinds, topics=options.topics, since_ms=options.since_ms
                ),
            )
        )
        made = self._lost(found) + self._missing(found)
        layout = Layout()
        plan = self._begin(made, layout)
        self.on_progress(f"plan {plan}: {len(made)} findings")
        if options.bodies_out:
            self._write_bodies(made)
        if options.execute:
            made = self._execute(plan, made)
        unsent = [entry for entry in made if options.execute and _acts(entry) and entry.outcome is None]
        left = [*unsent, *(entry for entry in made if entry.is_left)]
        return Outcome(plan, made, _summary(plan, made, options.execute), bool(left))

    def _lost(self, found: Sequence[Mapping[str, Any]]) -> list[Entry]:
        """Decide about the lost events among findings."""
        lost = [finding for finding in found if finding["kind"] == kinds.LOST.name]
        if not lost:
            return []
        ids = [finding["id"] for finding in lost]
        scopes = ("", *self.options.scopes)
        renewed = {id: [wire.event_id(entries.new_key(id), scope).hex() for scope in scopes] for id in ids}
        rows = evidence.rows_of_ids(self.lake, [*ids, *(one for ones in renewed.values() for one in ones)])
        # Of an unknown age, for which the service refuses each key that it does not remember.
        accepted = {id: min((row["accepted_ms"] for row in rows.get(id, ())), default=0) for id in ids}
        lost_at = {finding["id"]: entries.coordinates_of(finding) for finding in lost}
        claims = evidence.claims(self.spark, self.shared, accepted, lost_at)
        known: dict[str, list[bodies.Body]] = {}
        for name in self.options.bodies:
            try:
                with Path(name).open("rb") as lines:
                    for id, some in bodies.read(lines, name, scopes, set(ids)).items():
                        known.setdefault(id, []).extend(some)
            except OSError as error:
                raise CannotRun(f"--bodies {name!r} cannot be read: {error}") from None
        done, now_ms = evidence.history(self.lake), self.now_ms()
        return [
            entries.lost(
                finding,
                accepted[finding["id"]],
                evidence.record_of(row for id in (finding["id"], *renewed[finding["id"]]) for row in rows.get(id, ())),
                claims.get(finding["id"], entries.Claimed()),
                known,
                done,
                self.audited.run,
                now_ms,
            )
            for finding in lost
        ]

    def _missing(self, found: Sequence[Mapping[str, Any]]) -> list[Entry]:
        """Decide about the events that sinks lack among findings."""
        missing = [finding for finding in found if finding["kind"] == kinds.MISSING_IN_SINK.name]
        if not missing:
            return []
        rows = evidence.rows_of_ids(self.lake, [finding["id"] for finding in missing])
        of_copy = {
            (id, (row["topic"], row["partition"], row["offset"])): row for id, some in rows.items() for row in some
        }
        known = {
            id: {(row["topic"], row["partition"], row["offset"]) for row in some if row["count"]}
            for id, some in rows.items()
        }
        places = [entries.records_of(finding, known.get(finding["id"], ())) for finding in missing]
        # Several ids, if a topic was recreated: the record is that of one of them.
        wanted: dict[entries.Coordinates, set[str]] = {}
        for finding, records in zip(missing, places, strict=True):
            for at in records:
                wanted.setdefault(at, set()).add(finding["id"])
        proven: dict[tuple[str, entries.Coordinates], bool] = {}
        for record in copier.records_at(self.spark, self.shared, list(wanted)):
            for id in wanted[record.coordinates]:
                row = of_copy[id, record.coordinates]
                fingerprint = None if row["fingerprint"] is None else bytes(row["fingerprint"]).hex()
                proven[id, record.coordinates] = copier.is_record_of(
                    record, id, fingerprint, has_header=bool(row["has_fencepost_header"])
                )
        done = evidence.history(self.lake)
        into = self.options.into
        with closing(KafkaAdmin(self.spark, self.shared)) as admin:
            topics = admin.describe(sorted({into, *(topic for topic, _, _ in wanted)} - {""}))
        topic_ids = {name: topic.topic_id for name, topic in topics.items()}
        return [
            entries.missing(
                finding,
                min((row["accepted_ms"] for row in rows.get(finding["id"], ())), default=0),
                {at: proven.get((finding["id"], at)) for at in records},
                done,
                topic_ids,
                into,
            )
            for finding, records in zip(missing, places, strict=True)
        ]

    def _execute(self, plan: int, made: Sequence[Entry]) -> list[Entry]:
        """Send and copy the entries of a stored plan, and store their outcomes."""
        options = self.options
        made = list(made)
        copies = [entry for entry in made if entry.action == entries.COPY]
        if options.into and copies:
            parts = layouts.parts_of(copies)
            with copier.opened(self.spark, self.shared, options.into) as into:
                ends, layout = self._prepare(into, parts, Layout())
                self._store(plan, EXECUTING, layout, len(made))
                into.copy(layout.parts, ends)
                self._check_intact(layout, plan)
            made = [
                replace(entry, outcome=entries.COPIED, written_topic=options.into, ended_ms=self.now_ms())
                if entry.action == entries.COPY
                else entry
                for entry in made
            ]
            self._store_entries(plan, made)
        else:
            layout = Layout()
        if options.url and any(entry.action == entries.SEND for entry in made):
            self._store(plan, EXECUTING, layout, len(made))
            made = self._send(plan, made)
        self._end(plan, sum(entry.outcome in (entries.WRITTEN, entries.COPIED) for entry in made))
        return made

    def _send(self, plan: int, made: list[Entry]) -> list[Entry]:
        """Send the lost events one by one; outcomes are stored from time to time, and at the end."""
        target = send.Target(self.options.url, self.options.token_file, self.options.cafile)
        stored_s = time.monotonic()
        try:
            with send.opened(target, self.transport) as client:
                for nth, entry in enumerate(made):
                    if entry.action != entries.SEND:
                        continue
                    self.lake.check_held()
                    made[nth] = send.send(client, entry, new_keys=self.options.new_keys, now_ms=self.now_ms)
                    if made[nth].outcome == entries.OTHER_CALLER:
                        raise CannotRun(f"{made[nth].finding_id}: {made[nth].detail}; correct --token-file or --scope")
                    if time.monotonic() - stored_s > STORE_EVERY_S:
                        self._store_entries(plan, made)
                        stored_s = time.monotonic()
        finally:
            self._store_entries(plan, made)
        return made

    def _write_bodies(self, made: Sequence[Entry]) -> None:
        """Write the records that sinks lack into a file, a JSON object a line; the file is replaced at once."""
        wanted = {(entry.topic, entry.partition, entry.offset): entry for entry in made if entry.action == entries.COPY}
        path = Path(self.options.bodies_out)
        fresh = path.with_name(f".{path.name}.new")
        try:
            with fresh.open("wb") as out:
                for record in copier.records_at(self.spark, self.shared, list(wanted)):  # type: ignore[arg-type]
                    out.write(_line(wanted[record.coordinates], record))
                out.flush()
                os.fsync(out.fileno())
            fresh.replace(path)
        except OSError as error:
            raise CannotRun(f"--bodies-out {path}: {error}") from None

    # ------------------------------------------------------------------------------------------------- clean topics

    def clean(self) -> Outcome:
        """Write a topic without the copies too many into another one."""
        options = self.options
        if not options.execute:
            made, layout, lines = self._plan_clean()
            plan = self._begin(made, layout)
            return Outcome(plan, made, [f"plan       {plan}: planned, nothing was written", *lines], is_left=False)
        with copier.opened(self.spark, self.shared, options.into) as into:
            into.init()
            stored = self._stored_clean()
            if stored is None:
                made, layout, lines = self._plan_clean()
                ends = self._empty_ends(layout)
                plan = self._begin(made, layout, EXECUTING)
            else:
                plan, layout = stored
                self._take_number()
                lines = [f"plan       {plan} of an earlier command goes on"]
                ends = self._ends(layout)
            self.on_progress(f"plan {plan}: copying {options.clean} into {options.into}")
            copied = into.copy(layout.parts, ends)
            self._check_intact(layout, plan)
        self._end(plan, copied.all)
        lines = [
            f"plan       {plan}: done",
            *lines,
            f"records    {copied.all} in {options.into}: {copied.now} written now, {copied.before} before",
        ]
        return Outcome(plan, [], lines, is_left=False)

    def _plan_clean(self) -> tuple[list[Entry], Layout, list[str]]:
        """Decide which copies the cleaned topic leaves out, up to where the last run has read the topic."""
        source, target = self.options.clean, self.options.into
        logs = [log for log in self.audited.of(DATA) if log.topic == source]
        if not logs:
            raise CannotRun(
                f"--clean {source}: the last run has not audited this topic: run python -m spark first, with --topics "
                "if neither the ledger nor the rules name it"
            )
        with closing(KafkaAdmin(self.spark, self.shared)) as admin:
            topics = self._check_topics(admin, source, target, logs)
            ends = admin.ends([log.topic_partition for log in logs])
            bounds = {
                log.partition: (min(ends[log.topic_partition].log_start, log.end), log.end, ends[log.topic_partition])
                for log in logs
            }
            read = tuple(ReadUntil(log.topic, log.partition, log.end, log.leader_epoch) for log in logs)
            if why := layouts.truncated(read, ends, admin.diverged(layouts.suspects(read, ends))):
                raise CannotRun(f"--clean {source}: {why} since the last run: run it again")
        copies, kept = evidence.surplus(self.lake, source, {source: topics[source].topic_id})
        made = entries.surplus(copies, {number: (first, end) for number, (first, end, _) in bounds.items()})
        dropped: dict[int, list[int]] = {number: [] for number in bounds}
        for entry in made:
            dropped[entry.partition or 0].append(entry.offset or 0)
        parts = {
            number: copier.Part(0, ((source, tuple(entries.spans_without(first, end, dropped[number]))),), exact=False)
            for number, (first, end, _) in bounds.items()
        }
        later = sum(max(0, at.last_stable - end) for _, end, at in bounds.values())
        layout = Layout({name: topic.topic_id for name, topic in topics.items()}, parts, read)
        lines = [f"left out   {len(made)} copies of {len({entry.id for entry in made})} ids"]
        if kept["conflicts"] or kept["unlisted"]:
            lines.append(
                f"kept       all records of {kept['conflicts']} ids with different contents, and {kept['unlisted']} "
                "copies whose coordinates the findings do not list"
            )
        if later:
            lines.append(f"later      {later} offsets behind what the last run has read are not copied")
        return made, layout, lines

    def _check_topics(self, admin: KafkaAdmin, source: str, target: str, logs: Sequence[Log]) -> dict[str, Topic]:
        """Check that a topic can be cleaned into another one; CannotRun with the remedy otherwise."""
        topics = admin.describe([source, target])
        if source not in topics or any(log.topic_id != topics[source].topic_id for log in logs):
            raise CannotRun(f"--clean {source}: the topic was deleted or recreated since the last run: run it again")
        if topics[source].partitions != len(logs):
            raise CannotRun(f"--clean {source}: the topic has more partitions than the last run has read: run it again")
        if target in topics and topics[target].partitions != len(logs):
            raise CannotRun(
                f"--into {target} has {topics[target].partitions} partitions, {source} {len(logs)}: give it as many"
            )
        if source in admin.compacted([source]):
            raise CannotRun(f"--clean {source}: the topic is compacted: which records are left is not known")
        self._check_target(admin, topics, target)
        return topics

    def _check_target(self, admin: KafkaAdmin, topics: Mapping[str, Topic], target: str) -> None:
        """Check that a topic takes records as they are; CannotRun with the remedy otherwise."""
        if target in wire.internal_topics(self.shared.namespace):
            raise CannotRun(f"--into {target}: this topic is Fencepost's own: name another one")
        if target not in topics:
            raise CannotRun(f"--into {target}: the topic does not exist: create it, with the partitions of its source")
        if target in admin.compacted([target]):
            raise CannotRun(
                f"--into {target}: the topic is compacted, and would lose records: set cleanup.policy=delete"
            )
        if admin.setting_of([target], "message.timestamp.type")[target] != "CreateTime":
            raise CannotRun(f"--into {target}: set its message.timestamp.type to CreateTime: records keep their times")

    def _empty_ends(self, layout: Layout) -> dict[int, int]:
        """Return the ends of a target that is empty; CannotRun if it is not, since no plan has written there."""
        ends = self._ends(layout)
        if any(ends.values()):
            raise CannotRun(
                f"--into {self.options.into}: the topic is not empty, and no plan of --lake {self.lake.root} has "
                "written it: name an empty topic"
            )
        return ends

    def _ends(self, layout: Layout) -> dict[int, int]:
        """Return the ends of the target's partitions once nothing is open there, after `init` has fenced others."""
        target = self.options.into
        with closing(KafkaAdmin(self.spark, self.shared)) as admin:
            found = copier.await_decided(admin, [(target, number) for number in layout.parts])
        return {number: end for (_, number), end in found.items()}

    def _stored_clean(self) -> tuple[int, Layout] | None:
        """Return the newest plan that was executed for this source and target, and its layout; None without one, or if
        the target was recreated since. CannotRun if the source was."""
        source, target = self.options.clean, self.options.into
        wanted = (F.col("source") == source) & (F.col("target") == target) & (F.col("state") != PLANNED)
        row = self.lake.read("repairs").where(wanted).orderBy(F.desc("plan")).first()
        if row is None:
            return None
        layout = layouts.decoded(row["layout"])
        with closing(KafkaAdmin(self.spark, self.shared)) as admin:
            described = admin.describe([target]).get(target)
        if described is None or described.topic_id != layout.topic_ids[target]:
            return None
        self._check_same(layout, row["plan"])
        return row["plan"], layout

    def _check_same(self, layout: Layout, plan: int) -> None:
        """Check that the sources of a stored plan have the records that it copies; CannotRun otherwise."""
        ends = self._check_intact(layout, plan)
        if why := layouts.deleted(layout.parts, ends):
            raise CannotRun(f"{why} since plan {plan}: name another --into")

    def _check_intact(self, layout: Layout, plan: int) -> Mapping[TopicPartition, Ends]:
        """Check that no topic of a plan was deleted or recreated, and no source truncated, since it was made; CannotRun
        otherwise. Returns the ends of the sources."""
        with closing(KafkaAdmin(self.spark, self.shared)) as admin:
            topics = admin.describe(sorted(layout.topic_ids))
            for name, topic_id in layout.topic_ids.items():
                if name not in topics or topics[name].topic_id != topic_id:
                    raise CannotRun(f"topic {name} was deleted or recreated since plan {plan}: name another --into")
            if not layout.read:
                return {}
            ends = admin.ends([one.topic_partition for one in layout.read])
            if why := layouts.truncated(layout.read, ends, admin.diverged(layouts.suspects(layout.read, ends))):
                raise CannotRun(f"{why} since plan {plan}: run the audit again, and name another --into")
        return ends

    # ------------------------------------------------------------------------------------------------------- stored

    def _prepare(
        self, into: copier.Copier, parts: Mapping[int, copier.Part], layout: Layout
    ) -> tuple[dict[int, int], Layout]:
        """Fence earlier copies into the target, and let the parts begin at its present ends."""
        target = self.options.into
        into.init()
        sources = sorted({topic for part in parts.values() for topic, _ in part.spans})
        with closing(KafkaAdmin(self.spark, self.shared)) as admin:
            topics = admin.describe([*sources, target])
            self._check_target(admin, topics, target)
            if target in sources:
                raise CannotRun(f"--into {target}: the records are in this topic: name another one")
            if max(parts) >= topics[target].partitions:
                raise CannotRun(f"--into {target}: records keep their partitions: give it {max(parts) + 1} or more")
            found = copier.await_decided(admin, [(target, number) for number in parts])
            until = {(topic, number): spans[-1][1] for number, part in parts.items() for topic, spans in part.spans}
            epochs = admin.ends(list(until))
            read = tuple(ReadUntil(*at, end, epochs[at].leader_epoch) for at, end in sorted(until.items()))
        ends = {number: end for (_, number), end in found.items()}
        based = {number: replace(part, base=ends[number]) for number, part in parts.items()}
        topic_ids = {name: topic.topic_id for name, topic in topics.items()}
        return ends, replace(layout, topic_ids=topic_ids, parts=based, read=read)

    def _finish_interrupted(self, target: str) -> None:
        """Finish the copies into a target that a killed process has begun."""
        wanted = (F.col("target") == target) & (F.col("state") == EXECUTING) & F.col("source").isNull()
        rows = self.lake.read("repairs").where(wanted & F.col("layout").isNotNull()).orderBy("plan").collect()
        for row in rows:
            layout = layouts.decoded(row["layout"])
            stored = self.lake.read("repair_entries").where(F.col("plan") == row["plan"]).collect()
            made = [_entry_of(one.asDict()) for one in stored]
            if layout.parts and any(entry.action == entries.COPY and entry.outcome is None for entry in made):
                self.on_progress(f"plan {row['plan']} was interrupted: finishing its copies into {target}")
                self._check_same(layout, row["plan"])
                with copier.opened(self.spark, self.shared, target) as into:
                    into.init()
                    into.copy(layout.parts, self._ends(layout))
                    self._check_intact(layout, row["plan"])
                made = [
                    replace(entry, outcome=entries.COPIED, written_topic=target, ended_ms=self.now_ms())
                    if entry.action == entries.COPY
                    else entry
                    for entry in made
                ]
                self._take_number()
                self._store_entries(row["plan"], made)
                self._end(row["plan"], sum(entry.outcome == entries.COPIED for entry in made))

    def _take_number(self) -> int:
        """Number the commits that follow, and a new plan among them, after those of all plans and runs.

        The outcomes of an interrupted plan get a number of their own too: Delta skips a commit with the number of that
        plan if a later plan is in the table (lake.commit_number).
        """
        newest = [self.lake.read(name).agg(F.max(by)).collect()[0][0] or 0 for name, by in _NUMBERED]
        self.number = 1 + int(max(newest))
        self.lake.take_over(self.number, TABLES)
        return self.number

    def _begin(self, made: Sequence[Entry], layout: Layout, state: str = PLANNED) -> int:
        """Store a new plan and its entries, and return its number."""
        plan = self._take_number()
        self._store_entries(plan, made)
        self._store(plan, state, layout, len(made))
        return plan

    def _store(self, plan: int, state: str, layout: Layout, count: int) -> None:
        """Store the row of a plan of this command, in place of the one that is stored."""
        row = {
            "plan": plan,
            "made_ms": self.began_ms,
            "run": self.audited.run,
            "options": json.dumps(self.options.shown()),
            "state": state,
            "source": self.options.clean or None,
            "target": self.options.into or None,
            "layout": layouts.encoded(layout) if layout.parts else None,
            "entries": count,
        }
        self._put_rows("repairs", plan, [row])

    def _end(self, plan: int, written: int) -> None:
        """Store that a plan is done, with the number of records that it has written."""
        ended: dict[str, str | Column] = {
            "state": F.lit(DONE),
            "written": F.lit(written),
            "ended_ms": F.lit(self.now_ms()),
        }
        with self.lake.begin_commit("repairs", self.number) as table:
            table.update(F.col("plan") == plan, ended)
        self.lake.check_committed("repairs", self.number)

    def _store_entries(self, plan: int, made: Iterable[Entry]) -> None:
        """Store the entries of a plan, in place of those that are stored."""
        rows = [entry.row(plan) for entry in made]
        if rows:
            self._put_rows("repair_entries", plan, rows)

    def _put_rows(self, name: str, plan: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the rows of a plan in a table."""
        frame = frames.rows_of(self.spark, lake.schema(name), rows)
        self.lake.replace(name, frame, f"plan = {plan}", self.number)
        self.lake.check_committed(name, self.number)


_NUMBERED: Final = (("repairs", "plan"), ("progress", "run"))


def _acts(entry: Entry) -> bool:
    return entry.action in (entries.SEND, entries.COPY)


def _entry_of(row: Mapping[str, Any]) -> Entry:
    return Entry(**{name: value for name, value in row.items() if name != "plan"})


def _line(entry: Entry, record: copier.Record) -> bytes:
    """Encode a record as a line of JSON: bytes are in base64, since any key, value or header may be no UTF-8."""
    line = {
        "sink": entry.sink,
        "id": entry.id,
        "idempotency_key": entry.key,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "accepted_ms": entry.accepted_ms,
        "key_base64": record.key,
        "value_base64": record.value,
        "headers": [{"name": name, "value_base64": value} for name, value in record.headers],
    }
    return msgspec.json.encode(line) + b"\n"


def _summary(plan: int, made: Sequence[Entry], executed: bool) -> list[str]:
    """Count the entries of a plan by what was decided, and what became of it, for the terminal."""
    counts: dict[tuple[str, str], int] = {}
    for entry in made:
        what = entry.outcome or entry.reason or ("left" if executed else "planned")
        counts[entry.kind, f"{entry.action} {what}"] = counts.get((entry.kind, f"{entry.action} {what}"), 0) + 1
    lines = [f"plan       {plan}: {'done' if executed else 'planned, nothing was sent'}"]
    return lines + [f"{kind:15} {what}: {count}" for (kind, what), count in sorted(counts.items())]


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield the entries of an outcome as JSON, a line each."""
    for entry in outcome.entries:
        yield json.dumps(entry.row(outcome.plan)) + "\n"
