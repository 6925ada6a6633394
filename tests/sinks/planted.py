"""Histories with sinks whose faults are planted from a seed, and the audit's findings compared with them."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from deploy.places import ROOT
from service.contract.wire.ids import event_id
from tests.sinks.consumer import COMMITTED, STORED, Faults, Feed, Row, Store, feed_here, into_postgres
from tests.sinks.iceberg import TABLE, Iceberg
from tests.sinks.orders import SAID, Fault, Orders
from tests.sinks.postgres import USER, Postgres
from tests.spark.history import History, Writer
from tests.spark.runs import Ran, run

HOUR_MS: Final = 3_600_000
EVENTS: Final = 160
LATE_S: Final = 60
# Everything that is written before the runs is settled (80 s) and late (60 s) by then.
LATER_MS: Final = 300_000
MADE_UP: Final = 3
CHILD_S: Final = 120.0


@dataclass(frozen=True)
class Form:
    """How a sink stores events: the types of its columns, and what its rule says of them.

    `columns` are those of PostgreSQL, `insert` the values of a row by the fields of Row.
    """

    columns: str
    insert: str
    rule: str

    @property
    def has_coordinates(self) -> bool:
        return "coordinates" in self.rule


# The ids as a UUID, as bytes and as text, and coordinates; the times with a zone, without one, and as a number.
FORMS: Final = (
    Form(
        "event uuid, at timestamptz",
        "%(id)s::uuid, to_timestamp(%(accepted_ms)s / 1000.0)",
        'id = "event"\nevent_time = "at"',
    ),
    Form(
        "event bytea, at timestamp",
        "decode(%(id)s, 'hex'), to_timestamp(%(accepted_ms)s / 1000.0) AT TIME ZONE 'UTC'",
        'id = "event"\nevent_time = "at"',
    ),
    Form("event text, at bigint", "%(id)s, %(accepted_ms)s", 'id = "lower(event)"\nevent_time = "at"'),
    Form(
        'topic text, part int, "Off" bigint, "At" timestamptz',
        "%(topic)s, %(partition)s, %(offset)s, to_timestamp(%(accepted_ms)s / 1000.0)",
        'coordinates = ["topic", "part", "Off"]\nevent_time = "At"',
    ),
)

# The same for a Delta table: the columns of a row, as expressions of Spark SQL over the fields of Row.
DELTA_COLUMNS: Final = (
    ("id AS event", "timestamp_millis(accepted_ms) AS at"),
    ("unhex(id) AS event", "CAST(timestamp_millis(accepted_ms) AS TIMESTAMP_NTZ) AS at"),
    ("upper(id) AS event", "accepted_ms AS at"),
    ("topic", "partition AS part", "offset AS Off", "timestamp_millis(accepted_ms) AS At"),
)


# The same for an Iceberg table: the types of its columns.
ICEBERG_TYPES: Final = (
    {"event": pa.uuid(), "at": pa.timestamp("us", "UTC")},
    {"event": pa.binary(), "at": pa.timestamp("us")},
    {"event": pa.string(), "at": pa.int64()},
    {"topic": pa.string(), "part": pa.int32(), "Off": pa.int64(), "At": pa.timestamp("us", "UTC")},
)


@dataclass
class Sink:
    """A sink of a seed, with what its consumer has done: the number of rows of each id, and the rows held back.

    `place` are the lines of its rule that say where the table is.
    """

    name: str
    topic: str
    form: Form
    place: str
    feed: Feed
    store: Store
    made_up: list[Row]
    held: list[Row] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    deaths: int = 0

    def read_journal(self) -> None:
        # A consumer that died has noted the rows of its last batch twice.
        held: dict[str, Row] = {}
        for line in Path(self.feed.journal).read_text().splitlines():
            if line.startswith("{"):
                row = Row(**json.loads(line))
                held[row.id] = row
            else:
                self.rows[line] += 1
        self.held = list(held.values())


@dataclass
class Score:
    """The findings that are right, planted but not found, and found but not planted."""

    right: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    missed: int = 0
    wrong: int = 0

    def compare(self, title: str, planted: set[Fault], found: set[Fault]) -> None:
        self.right.update((kind, cause) for _, kind, cause, _ in planted & found)
        self.missed += len(planted - found)
        self.wrong += len(found - planted)
        self.faults += [f"{title}: not found: {one}" for one in sorted(planted - found, key=str)]
        self.faults += [f"{title}: not planted: {one}" for one in sorted(found - planted, key=str)]

    @property
    def recall(self) -> float:
        return self.right.total() / (self.right.total() + self.missed)

    @property
    def precision(self) -> float:
        return self.right.total() / (self.right.total() + self.wrong)

    def table(self) -> str:
        lines = [
            f"{kind:16} {cause or '':12} {number:6}" for (kind, cause), number in sorted(self.right.items(), key=str)
        ]
        return "\n".join(["kind             cause         found", *lines])


class Trial:
    """The runs of the job on the sinks of some seeds: two of each, in PostgreSQL and as a Delta or an Iceberg table.

    Besides these, the tables of the examples, which are killed.
    """

    def __init__(
        self, spark: SparkSession, bootstrap: str, postgres: Postgres, root: Path, seeds: Sequence[int]
    ) -> None:
        self.spark = spark
        self.postgres = postgres
        self.root = root
        self.now_ms = int(time.time() * 1000)
        self.namespace = f"sinks-{root.name}-{self.now_ms}"
        slots = 2 * len(seeds)
        self.history = History(bootstrap, self.namespace, slots=slots + 1, begun_ms=self.now_ms - 12 * HOUR_MS)
        self.score = Score()
        self.copies: dict[str, Counter[str]] = {}
        self.sinks: list[Sink] = []
        for nth, seed in enumerate(seeds):
            self._plant(seed, nth)
        self.orders = Orders(self.history, postgres, slots, self.now_ms)

    def carry_out(self) -> Score:
        """Compare two runs with what was planted; between them the sinks get what was held back."""
        self.orders.fill()
        for sink in self.sinks:
            self._feed(sink)
        first = self._run(self.now_ms + LATER_MS)
        self.score.compare("first run", self._expected(after_held=False), self._found(first))
        for sink in self.sinks:
            if sink.held:
                sink.store(sink.held)
        second = self._run(self.now_ms + 2 * LATER_MS)
        self.score.compare("second run", self._expected(after_held=True), self._found(second))
        return self.score

    # --------------------------------------------------------------------------------------------------- histories

    def _plant(self, seed: int, nth: int) -> None:
        """Write the history of a seed, and plan the faults of its sinks."""
        chance = random.Random(seed)
        topic = self.history.topic(f"{self.namespace}-{seed}")
        writers = [Writer(slot, 100 + slot, 0, f"host-{slot}:1") for slot in (2 * nth, 2 * nth + 1)]
        keys = [f"{seed}-{n}" for n in range(EVENTS)]
        times = sorted(self.now_ms - chance.randrange(HOUR_MS, 4 * HOUR_MS) for _ in range(4))
        producers = [self.history.transactional(writer) for writer in writers]
        for share, at in enumerate(times):
            self.history.deliver(producers[0], writers[0], topic, keys[share::4], at=at, ts=at)
        # Copies in Kafka, which a sink has too.
        copied = chance.sample(keys[0::4], 2)
        self.history.deliver(producers[1], writers[1], topic, copied, at=times[0], ts=times[0])
        self.copies[topic] = Counter(event_id(key).hex() for key in (*keys, *copied))
        last = self.history.deliver(producers[0], writers[0], topic, [f"{seed}-last"], at=times[0], ts=times[0])[-1]
        self.copies[topic][last.id.hex()] += 1
        form = FORMS[seed % len(FORMS)]
        for kind in ("warehouse", "lakehouse"):
            name = f"{kind}-{seed}"
            feed = Feed(
                self.history.bootstrap,
                topic,
                f"{self.namespace}-{name}",
                last.offset,
                str(self.root / f"{name}.journal"),
                batch=chance.choice((17, 40)),
                commits_first=chance.random() < 0.3,
                faults=self._faults(chance, keys, set(copied)),
            )
            Path(feed.journal).touch()
            made_up = [Row(f"{chance.getrandbits(128):032x}", topic, 0, 10**6 + n, times[n]) for n in range(MADE_UP)]
            if kind == "warehouse":
                store, place = self._warehouse(name, form)
            elif (seed + seed // len(FORMS)) % 2:
                store, place = self._iceberg(name, seed)
            else:
                store, place = self._delta(name, seed)
            self.sinks.append(Sink(name, topic, form, place, feed, store, made_up))

    def _faults(self, chance: random.Random, keys: Sequence[str], copied: set[str]) -> Faults:
        ids = [event_id(key).hex() for key in keys if key not in copied]
        chance.shuffle(ids)
        cut = [0, *(chance.randrange(1, 6) for _ in range(3)), 0]
        ends = [sum(cut[: n + 1]) for n in range(len(cut))]
        dropped, repeated, held = (ids[ends[n] : ends[n + 1]] for n in range(3))
        dies = [(ids[-n - 1], step) for n, step in enumerate((STORED, COMMITTED))]
        return Faults(dropped, repeated, held, dies)

    # ------------------------------------------------------------------------------------------------------ sinks

    def _table(self, name: str) -> str:
        return f"{name.replace('-', '_')}_{self.now_ms}"

    def _warehouse(self, name: str, form: Form) -> tuple[Store, str]:
        with self.postgres.connect() as connection:
            connection.execute(f"CREATE TABLE {self._table(name)} ({form.columns})".encode())
        place = (
            f'format = "jdbc"\nurl = "{self.postgres.jdbc_url}"\ntable = "{self._table(name)}"\n'
            f'user = "{USER}"\npassword_file = "password"'
        )
        return into_postgres(self.postgres.dsn, self._insert(name, form)), place

    def _insert(self, name: str, form: Form) -> str:
        return f"INSERT INTO {self._table(name)} VALUES ({form.insert})"

    def _delta(self, name: str, seed: int) -> tuple[Store, str]:
        columns = DELTA_COLUMNS[seed % len(DELTA_COLUMNS)]

        def store(rows: Sequence[Row]) -> None:
            listed = [tuple(vars(row).values()) for row in rows]
            schema = "id string, topic string, partition int, offset bigint, accepted_ms bigint"
            frame = self.spark.createDataFrame(listed, schema).select(*map(F.expr, columns))
            frame.coalesce(1).write.format("delta").mode("append").save(str(self.root / name))

        return store, f'format = "delta"\npath = "{self.root / name}"'

    def _iceberg(self, name: str, seed: int) -> tuple[Store, str]:
        (folder := self.root / name).mkdir()
        types = ICEBERG_TYPES[seed % len(ICEBERG_TYPES)]
        table = Iceberg(folder, types)

        def store(rows: Sequence[Row]) -> None:
            times = [row.accepted_ms for row in rows]
            at = times if pa.types.is_int64(table.schema.types[-1]) else [_utc(ms) for ms in times]
            if "Off" in types:
                places: dict[str, list[Any]] = {
                    "topic": [row.topic for row in rows],
                    "part": [row.partition for row in rows],
                }
                table.append(**places, Off=[row.offset for row in rows], At=at)
            else:
                is_text = pa.types.is_string(table.schema.types[0])
                table.append(event=[row.id if is_text else bytes.fromhex(row.id) for row in rows], at=at)

        return store, f'format = "iceberg"\ntable = "{TABLE}"\ncatalog_file = "{table.catalog_file}"'

    def _feed(self, sink: Sink) -> None:
        """Let the consumer of a sink read its topic, start it again after each death, and add rows that nobody sent."""
        if sink.name.startswith("warehouse"):
            sink.deaths = self._feed_by_program(sink)
        else:
            sink.deaths = feed_here(sink.feed, sink.store)
        sink.store(sink.made_up)
        sink.read_journal()

    def _feed_by_program(self, sink: Sink) -> int:
        insert = self._insert(sink.name, sink.form)
        deaths = 0
        while True:
            done = subprocess.run(
                [sys.executable, "-m", "tests.sinks.consumer"],
                cwd=ROOT,
                input=json.dumps([self.postgres.dsn, insert, sink.feed.text()]),
                capture_output=True,
                text=True,
                timeout=CHILD_S,
                check=False,
            )
            if done.returncode == 0:
                return deaths
            assert done.returncode == 9, done.stderr
            deaths += 1
            sink.feed.faults.dies = [planned for planned in sink.feed.faults.dies if planned[0] != done.stdout]

    # ------------------------------------------------------------------------------------------------------- runs

    def _rules(self) -> Path:
        (self.root / "password").write_text(f"{self.postgres.password}\n")
        tables = [
            f'[[sinks]]\nname = "{sink.name}"\ntopics = ["{sink.topic}"]\n{sink.place}\n{sink.form.rule}\n'
            f"late_s = {LATE_S}\nexclusive = true\n"
            for sink in self.sinks
        ]
        tables += [self.orders.rule(program, LATE_S) for program in SAID]
        path = self.root / "sinks.toml"
        path.write_text("".join(tables))
        return path

    def _run(self, now_ms: int) -> Ran:
        return run(self.spark, self.history, self.root, now_ms, rules=str(self._rules()))

    def _expected(self, *, after_held: bool) -> set[Fault]:
        """Return the faults by what the consumers have stored, and by the copies in Kafka."""
        planted: set[Fault] = self.orders.faults()
        for sink in self.sinks:
            held = {row.id for row in sink.held}
            for id, copies in self.copies[sink.topic].items():
                rows = sink.rows[id]
                if id in held and after_held and rows == 0:
                    planted.add((sink.name, "late_in_sink", "was_missing", id))
                elif rows == 0:
                    planted.add((sink.name, "missing_in_sink", None, id))
                elif rows > 1:
                    planted.add((sink.name, "twice_in_sink", "repeated" if rows > copies else "copied", id))
            if sink.form.has_coordinates:
                planted.add((sink.name, "extra_in_sink", None, f"{sink.topic}[0]"))
            else:
                planted |= {(sink.name, "extra_in_sink", None, row.id) for row in sink.made_up}
        return planted

    def _found(self, ran: Ran) -> set[Fault]:
        unreadable = [sink["unreadable"] for sink in ran.document["sinks"] if sink["unreadable"] is not None]
        assert not unreadable, unreadable
        return {
            (row["sink"], row["kind"], row["cause"], row["id"] or f"{row['topic']}[{row['partition']}]")
            for row in ran.document["findings"]
            if row["sink"] is not None
        }


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def summary(trial: Trial, seeds: int) -> dict[str, Any]:
    """Return what a command prints last."""
    score = trial.score
    return {
        "seeds": seeds,
        "sinks": len(trial.sinks),
        "deaths": sum(sink.deaths for sink in trial.sinks),
        "recall": score.recall,
        "precision": score.precision,
        "faults": len(score.faults),
    }
