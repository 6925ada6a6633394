"""Tests the senders of deploy/examples and the client for applications, through connections that are cut.

Each example is started as its README says: its first request gets 503, its second one no answer, though it is carried
out. It must write its event once. A second start names a topic that does not exist: that request must not be repeated.
"""

import asyncio
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.examples import sink_postgres
from deploy.install import java
from deploy.places import ROOT
from deploy.stack import Kafka, Service
from service.fencepost.client import Client, Event, KeyExpired, Spool, Written
from service.fencepost.client.events import Pending
from tests import go_tools
from tests.integration.judge import Delivered, read_committed
from tests.integration.proxy import RETRY_AFTER_S, Fault, Proxy
from tests.sinks.killed import BATCH
from tests.sinks.orders import SAID, Orders
from tests.sinks.postgres import Postgres
from tests.spark.history import History

ORDERS = [{"order": n} for n in range(3)]
# The commands of the README.
COMMANDS = {
    "curl": "deploy/examples/send.sh order-1",
    "httpx": "python deploy/examples/send_httpx.py order-1",
    "requests": "python deploy/examples/send_requests.py order-1",
    "go": "go run deploy/examples/send.go order-1",
    "node": "node deploy/examples/send.mjs order-1",
    "java": "java deploy/examples/Send.java order-1",
    "produce-v3": "python deploy/examples/produce_v3.py import-1 orders.ndjson",
}
TIMEOUT_S = 120.0
HELD_S = 30.0


def program(name: str) -> Path | None:
    """Find the program of a command; None if this machine has none."""
    if name == "python":
        return Path(sys.executable)
    if name == "java":
        home = java.find()
        return home and home / "bin" / "java"
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/local/go/bin")
    return Path(found) if found else None


@dataclass
class Outcome:
    """How an example ended, and its proxies: of the start whose connections failed, and of the one that is refused."""

    code: int
    output: str
    errors: str
    pause_s: float
    posts: int
    refused_code: int
    refused_output: str
    refused_posts: int


async def run(argv: Sequence[str | Path], url: str) -> tuple[int, str, str]:
    """Run a program in the project's folder; returns its exit code, output and errors. Go compiles it quickly."""
    environment = {**os.environ, **go_tools.QUICK, "FENCEPOST_URL": url}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe)
    try:
        output, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def outcome(name: str, first: Path, service: Service, topic: str, orders: Path) -> Outcome:
    """Run an example twice, with the name of the example in place of the order's."""
    words = {"order-1": name, "import-1": name, "orders.ndjson": f"{orders}"}
    argv = [words.get(word, word) for word in COMMANDS[name].split()]
    command = argv if name == "curl" else [first, *argv[1:]]
    async with Proxy(service.port, {0: Fault.BUSY, 1: Fault.CUT}) as proxy, Proxy(service.port, {}) as plain:
        code, output, errors = await run([*command, topic], proxy.url)
        refused_code, *refused_output = await run([*command, "no-such-topic"], plain.url)
        first_s, second_s = (*proxy.arrivals, 0.0, 0.0)[:2]
        pause_s = second_s - first_s
        return Outcome(code, output, errors, pause_s, proxy.posts, refused_code, "".join(refused_output), plain.posts)


@dataclass
class Runs:
    """The outcomes of all examples whose programs are there, and the topic that they have written to."""

    outcomes: dict[str, Outcome]
    records: list[Delivered]


@pytest.fixture(scope="module")
def runs(served: Service, kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All examples, at the same time: most of their time is pauses."""
    if go := program("go"):
        go_tools.compile_library(go)
    orders = tmp_path_factory.mktemp("orders") / "orders.ndjson"
    orders.write_text("".join(f"{json.dumps(order)}\n" for order in ORDERS))
    topic = f"examples-{time.time_ns()}"
    kafka.create_topic(topic, partitions=3)

    async def run_all() -> dict[str, Outcome]:
        programs = {name: program(command.split()[0]) for name, command in COMMANDS.items()}
        programs["curl"] = program("curl")
        there = {name: found for name, found in programs.items() if found is not None}
        ran = await asyncio.gather(*[outcome(name, there[name], served, topic, orders) for name in there])
        return dict(zip(there, ran, strict=True))

    return Runs(asyncio.run(run_all()), read_committed(kafka.bootstrap, [topic]))


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_writes_its_event_once_though_its_request_was_refused_and_cut(runs: Runs, name: str) -> None:
    if name not in runs.outcomes:
        pytest.skip(f"{COMMANDS[name].split()[0]} is not on this machine")
    ran = runs.outcomes[name]
    assert ran.code == 0, ran
    assert ran.posts >= 3
    assert ran.pause_s >= RETRY_AFTER_S
    if name == "produce-v3":
        records = [record for record in runs.records if record.idempotency_key == "produce-v3/0"]
        assert [
            json.loads(record.value or b"") for record in sorted(records, key=lambda each: each.value or b"")
        ] == ORDERS
    else:
        (record,) = [record for record in runs.records if record.idempotency_key == name]
        assert (record.key, json.loads(record.value or b"")) == (name.encode(), {"order": name, "total": 12.5})
        status, _, answer = ran.output.partition(" ")
        metadata = json.loads(answer)
        assert (status, (metadata["topic"], metadata["partition"], metadata["offset"])) == ("201", record.place)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_does_not_repeat_a_request_that_is_refused(runs: Runs, name: str) -> None:
    if name not in runs.outcomes:
        pytest.skip(f"{COMMANDS[name].split()[0]} is not on this machine")
    ran = runs.outcomes[name]
    assert (ran.refused_code, ran.refused_posts) == (1, 1), ran
    assert "404" in ran.refused_output


def test_the_readme_has_the_commands_that_were_run() -> None:
    text = (ROOT / "deploy" / "examples" / "README.md").read_text()
    assert [command for command in COMMANDS.values() if f"`{command}`" not in text] == []


async def created_at_once(table: sink_postgres.Table, programs: int) -> None:
    """Have several programs, which start at the same time, create their tables."""
    await asyncio.gather(*(table.create() for _ in range(programs)))


def test_a_sink_is_filled_once_by_one_transaction_and_torn_by_two_commits(
    kafka: Kafka, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples are killed with -9 between their two commits; test_planted_sinks.py audits their tables."""
    history = History(kafka.bootstrap, namespace, slots=1)
    with Postgres(tmp_path / "postgres") as postgres:
        for name, value in postgres.variables.items():
            monkeypatch.setenv(name, value)
        asyncio.run(created_at_once(sink_postgres.Table("orders"), 20))
        orders = Orders(history, postgres, 0, history.now_ms)
        orders.fill()
        torn = Counter((program, kind, cause) for program, kind, cause, _ in orders.faults())
    assert torn == {(program, *fault): BATCH for program, fault in SAID.items() if fault is not None}


# ------------------------------------------------------------------------------------------------------- the client


async def test_a_program_that_is_killed_amid_its_calls_has_each_event_written_once(
    served: Service, kafka: Kafka, topic: str, tmp_path: Path
) -> None:
    """Killed while a request waits that has not been carried out, and while answers wait: of one event, of several."""
    count = 25
    # The requests in their order, over all runs: each kill is followed by the request of what was open.
    kills = {1: Fault.HELD_BEFORE, 4: Fault.HELD_AFTER, 10: Fault.HELD_AFTER}
    faults = {**kills, 6: Fault.BUSY, 8: Fault.CUT}
    output = ""
    async with Proxy(served.port, faults) as proxy:
        argv = [sys.executable, "-m", "tests.integration.sender", proxy.url, topic, str(tmp_path), str(count)]
        for _ in kills:
            pipe = asyncio.subprocess.PIPE
            program = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=pipe)
            try:
                await asyncio.wait_for(proxy.held.wait(), HELD_S)
            finally:
                program.kill()
            output += (await program.communicate())[0].decode()
            proxy.held.clear()
        code, last, errors = await run(argv, "")
    assert code == 0, errors
    output += last
    records = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    assert Counter(int(record.value or b"") for record in records) == Counter(range(count))
    assert len({record.idempotency_key for record in records}) == count
    assert output.count("resumed Written") >= len(kills)
    assert "replayed=True" in output


async def test_a_spool_that_is_older_than_its_keys_is_told_and_not_written(
    served: Service, kafka: Kafka, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of version 7 tells its age, any other one that of its event in the spool."""
    two_days_ago_ms = time.time_ns() // 1_000_000 - 2 * 86_400_000
    digits = f"{two_days_ago_ms:012x}"
    old = Event(topic, "old", idempotency_key=f"{digits[:8]}-{digits[8:]}-7000-8000-000000000000")
    new, order = Event(topic, "new"), Event(topic, "order", idempotency_key=f"order-{topic}")

    def store(spool: Spool, *events: Event) -> None:
        spool.add([Pending(event.idempotency_key, event.encode()) for event in events])

    def resume() -> list[object]:
        with Spool(tmp_path / "s") as spool:
            store(spool, old, new)
            with monkeypatch.context() as earlier:
                earlier.setattr(time, "time_ns", lambda: two_days_ago_ms * 1_000_000)
                store(spool, order)
        with Client(served.url, spool=tmp_path / "s") as client:
            return list(client.resume())

    first, second, third = await asyncio.to_thread(resume)
    assert isinstance(second, Written)
    for each in (first, third):
        assert isinstance(each, KeyExpired)
        assert each.may_be_written
    records = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    assert [record.value for record in records] == [b'"new"']
