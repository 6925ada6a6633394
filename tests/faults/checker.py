"""`python -m tests.faults.checker`: the checker, a process of its own with another client library than the service's.

It reads the clients' logs and the topics (read_committed) after all faults have ended, and checks: each event that was
answered 201 is there exactly once, at its offset and with its bytes; an event in doubt is there at most once, a refused
event nowhere, and no event that nobody sent; an atomic batch is complete or absent; the order of each client for each
record key; no transaction is open; every key that is posted again gets the same answer and writes nothing; the producer
in each header is that of the record batch; ledger and topics agree; with --audit, the reconciliation job agrees too.

It prints a verdict as JSON and exits with 3 if anything is wrong.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from deploy.demo.http import Connection, NoAnswer
from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.names import ledger_topic
from service.contract.wire.versions import WireError
from tests.faults.batches import Batch, batches, producer_of
from tests.faults.history import Request, Result, Try, read, results_of
from tests.integration.auditing import Audit
from tests.integration.client import Attempt
from tests.integration.judge import Delivered, faults_of_key, ledger_faults, read_committed, wait_until_stable

WRONG: Final = 3
# The names of the assertions in a verdict.
ASSERTIONS: Final = ("stable", "once", "stranger", "torn", "order", "producer", "ledger", "again", "audit")

POSTS_AT_ONCE: Final = 16
ANSWER_S: Final = 8.0
SETTLED_S: Final = 60.0
# With fewer records, the job ends before the JVM has compiled it.
SMALL: Final = 20_000
READ_S: Final = 120.0

Violations = list[tuple[str, str]]


@dataclass
class Verdict:
    """The result. `violations` are (assertion, text); the other fields are figures."""

    violations: Violations = field(default_factory=list)
    keys: int = 0
    acknowledged: int = 0
    doubtful: int = 0  # never acknowledged, and perhaps written
    refused: int = 0  # not written
    records: int = 0
    lost: int = 0
    duplicates: int = 0
    attempts: int = 0
    replays: int = 0
    named: int = 0  # duplicates in idempotent topics that the audit reported


@dataclass(frozen=True)
class Evidence:
    """The input of the pure checks."""

    tries: Mapping[str, Sequence[Try]]  # by client
    records: Sequence[Delivered]
    batches: Mapping[tuple[str, int], Sequence[Batch]] = field(default_factory=dict)
    repeatable: frozenset[str] = frozenset()  # topics with the guarantee `idempotent`

    def attempts(self) -> dict[bytes, list[Attempt]]:
        """Every attempt of each event id."""
        found: dict[bytes, list[Attempt]] = defaultdict(list)
        for each in (each for tries in self.tries.values() for each in tries):
            for id, attempt in each.attempts():
                found[id].append(attempt)
        return found

    def by_id(self) -> dict[bytes | None, list[Delivered]]:
        """The records of each event id; under None those without Fencepost's header."""
        found: dict[bytes | None, list[Delivered]] = defaultdict(list)
        for record in self.records:
            stamp = stamp_of(record)
            found[None if stamp is None else stamp.id].append(record)
        return found


def stamp_of(record: Delivered) -> Stamp | None:
    stamps = [content for name, content in record.headers if name == STAMP_HEADER]
    try:
        return Stamp.decode(stamps[0]) if len(stamps) == 1 else None
    except WireError:
        return None


# ------------------------------------------------------------------------------------------------- pure checks


def judge(evidence: Evidence) -> Verdict:
    """Check all that histories and topics show, without sending requests."""
    attempts, records = evidence.attempts(), evidence.by_id()
    verdict = figures(attempts, records)
    verdict.violations += [("once", text) for text in once(evidence, attempts, records)]
    verdict.violations += [("stranger", text) for text in strangers(attempts, records)]
    verdict.violations += [("torn", text) for text in torn(evidence, records)]
    verdict.violations += [("order", text) for text in order(evidence, records)]
    verdict.violations += [("producer", text) for text in producers(evidence)]
    return verdict


def figures(
    attempts: Mapping[bytes, Sequence[Attempt]], records: Mapping[bytes | None, Sequence[Delivered]]
) -> Verdict:
    verdict = Verdict(keys=len(attempts), records=sum(map(len, records.values())))
    for id, made in attempts.items():
        kinds = {attempt.kind for attempt in made}
        there = len(records.get(id, ()))
        verdict.attempts += len(made)
        verdict.replays += sum(attempt.replayed for attempt in made)
        verdict.acknowledged += "ok" in kinds
        verdict.doubtful += "ok" not in kinds and "info" in kinds
        verdict.refused += kinds <= {"fail", "busy"}
        verdict.lost += "ok" in kinds and there == 0
        verdict.duplicates += max(0, there - 1)
    return verdict


def once(
    evidence: Evidence,
    attempts: Mapping[bytes, Sequence[Attempt]],
    records: Mapping[bytes | None, Sequence[Delivered]],
) -> Iterator[str]:
    """Check that ok events are there once, at their offsets with their bytes, info events at most once, fail not."""
    for id, made in attempts.items():
        there = records.get(id, ())
        if made[0].asked.topic in evidence.repeatable:
            there = there[:1] if not any(a.kind == "ok" for a in made) else _acknowledged_of(there, made)
        yield from faults_of_key(made[0].asked.key, made, there)


def _acknowledged_of(there: Sequence[Delivered], made: Sequence[Attempt]) -> Sequence[Delivered]:
    """Choose, of several copies, the one that a client got as its answer."""
    places = {attempt.place for attempt in made if attempt.kind == "ok"}
    return [record for record in there if record.place in places] or there[:1]


def strangers(attempts: Mapping[bytes, object], records: Mapping[bytes | None, Sequence[Delivered]]) -> Iterator[str]:
    """Check that there is no event that nobody sent."""
    for id, there in records.items():
        if id is None or id not in attempts:
            yield from (f"nobody sent what is at {record.place}: {record.idempotency_key}" for record in there)


def torn(evidence: Evidence, records: Mapping[bytes | None, Sequence[Delivered]]) -> Iterator[str]:
    """Check that all members of an atomic batch are there, or none."""
    for request in unique(evidence, "atomic"):
        there = sum(bool(records.get(id)) for id in request.ids)
        if there not in (0, len(request.events)):
            yield f"{request.key} has {there} of its {len(request.events)} members"


def order(evidence: Evidence, records: Mapping[bytes | None, Sequence[Delivered]]) -> Iterator[str]:
    """Check the order of a client: an event sent after the answer to another with its record key has the higher offset.

    Within one batch that succeeded at its first attempt, too.
    """
    for tries in evidence.tries.values():
        asked: dict[bytes, float] = {}
        acknowledged_at: dict[bytes, float] = {}
        chains: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        together: dict[bytes, int] = {}  # by event: the request that wrote it
        for number, each in enumerate(tries):
            fresh = all(result.type == "ok" and not result.replayed for result in each.results)
            for (id, attempt), result in zip(each.attempts(), each.results, strict=False):
                if id not in asked and attempt.asked.record_key is not None:
                    chains[attempt.asked.topic, attempt.asked.record_key].append(id)
                    if fresh:
                        together[id] = number
                asked.setdefault(id, each.at)
                if result.type == "ok":
                    acknowledged_at.setdefault(id, each.answered_at)
        for (topic, record_key), chain in chains.items():
            known = [id for id in chain if id in acknowledged_at and records.get(id)]
            for one, other in pairwise(known):
                first, second = records[one][0].place, records[other][0].place
                same_request = one in together and together.get(other) == together[one]
                after = same_request or acknowledged_at[one] <= asked[other]
                if after and first[:2] == second[:2] and first[2] >= second[2]:
                    yield f"{topic}, record key {record_key}: {second} was sent after {first}"


def producers(evidence: Evidence) -> Iterator[str]:
    """Check that producer id and epoch in the header are those of the record batch."""
    for record in evidence.records:
        topic, partition, offset = record.place
        if (topic, partition) not in evidence.batches:
            continue
        stamp = stamp_of(record)
        wrote = producer_of(evidence.batches[topic, partition], offset)
        if stamp is None or wrote != (stamp.producer_id, stamp.epoch):
            yield f"{record.place} is stamped {stamp}, and was produced by {wrote}"


def again(
    request: Request, before: Sequence[Result], after: Sequence[Result], body: str, repeated: str
) -> Iterator[str]:
    """Check that an acknowledged request gets the same answer again; in a batch each event by itself."""
    if request.kind != "batch" and body and repeated != body:
        yield f"{request.key} was answered {body}, and then {repeated}"
    for asked, was, now in zip(request.events, before, after, strict=True):
        if now.type != "ok" or not now.replayed or json.loads(now.metadata) != json.loads(was.metadata):
            yield f"{asked.key} was answered {was.metadata}, and then {now}"


def disagreements(report: Mapping[str, Any], evidence: Evidence, verdict: Verdict) -> list[str]:
    """List where the job's report disagrees with the checker."""
    attempts, records = evidence.attempts(), evidence.by_id()
    twice = {id.hex() for id, there in records.items() if id is not None and len(there) > 1}
    once = {id.hex() for id, there in records.items() if id is not None and len(there) == 1}
    unacknowledged = {id.hex() for id in _unacknowledged(evidence, attempts)}
    wrong: list[str] = []
    named: set[str] = set()
    for finding in report["findings"]:
        id = finding["id"] or ""
        if finding["kind"] == "duplicate" and id in twice:
            named.add(id)
        elif finding["kind"] == "phantom" and id in unacknowledged & once:
            continue
        elif finding["kind"] != "stuck" or not _may_be_stuck(bytes.fromhex(id), attempts, records):
            wrong.append(
                f"the job found a {finding['kind']} {finding['cause']} of {finding['key']}, and nothing is wrong"
            )
    wrong += [f"the job did not find that {id} is there more than once" for id in twice - named]
    verdict.named = len(named)
    if not len(once - unacknowledged) <= report["balance"]["delivered_once"] <= len(once):
        counted = f"{len(once)}, {len(unacknowledged & once)} of them without an acknowledgement"
        wrong.append(f"the job counts {report['balance']['delivered_once']} delivered once, the checker {counted}")
    return wrong


def _unacknowledged(evidence: Evidence, attempts: Mapping[bytes, Sequence[Attempt]]) -> set[bytes]:
    """Find events of `idempotent` topics in no client's answer: without a ledger they do not count as accepted."""
    return {
        id
        for id, made in attempts.items()
        if made[0].asked.topic in evidence.repeatable and all(attempt.kind != "ok" for attempt in made)
    }


def _may_be_stuck(
    id: bytes, attempts: Mapping[bytes, Sequence[Attempt]], records: Mapping[bytes | None, Sequence[Delivered]]
) -> bool:
    """Check whether an event was left in doubt, given up by its client, and never written."""
    return id in attempts and not records.get(id) and all(attempt.kind != "ok" for attempt in attempts[id])


def unique(evidence: Evidence, kind: str = "") -> Iterator[Request]:
    """List each request (of a kind) once, however often it was sent."""
    seen: set[tuple[str, bytes]] = set()
    for each in (each for tries in evidence.tries.values() for each in tries):
        if (not kind or each.request.kind == kind) and (mark := (each.request.kind, each.request.body)) not in seen:
            seen.add(mark)
            yield each.request


# ------------------------------------------------------------------------------------- checks that send requests


def acknowledged(tries: Iterable[Try]) -> list[Try]:
    """Choose, of each request, the first try with the most answers, and of its events those that are in Kafka.

    Only these can be posted again without a new record.
    """
    best: dict[tuple[str, bytes], Try] = {}
    for each in tries:
        mark = (each.request.kind, each.request.body)
        if _oks(each) > (_oks(best[mark]) if mark in best else 0):
            best[mark] = each
    return [_only_oks(each) for each in best.values()]


def _oks(each: Try) -> int:
    return sum(result.type == "ok" for result in each.results)


def _only_oks(each: Try) -> Try:
    if _oks(each) == len(each.results):
        return each
    kept = [
        (asked, result) for asked, result in zip(each.request.events, each.results, strict=True) if result.type == "ok"
    ]
    request = Request(each.request.kind, tuple(asked for asked, _ in kept), each.request.key)
    return Try(request, each.at, each.answered_at, each.body, [result for _, result in kept])


async def post_again(urls: Sequence[str], tries: Sequence[Try]) -> list[str]:
    """Post every acknowledged request again, to any process, and compare the answers."""
    waiting = list(tries)
    wrong: list[str] = []

    async def work() -> None:
        connections = [Connection(url, ANSWER_S) for url in urls]
        while waiting:
            each = waiting.pop()
            wrong.extend(await _once_more(connections, each))
        for connection in connections:
            await connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(POSTS_AT_ONCE):
            group.create_task(work())
    return wrong


async def _once_more(connections: Sequence[Connection], each: Try) -> list[str]:
    request = each.request
    results: list[Result] = []
    body = ""
    deadline = asyncio.get_running_loop().time() + SETTLED_S
    while asyncio.get_running_loop().time() < deadline:
        try:
            answer = await random.choice(connections).post(request.path, request.headers, request.body)
        except NoAnswer as error:
            results = [Result("info", 0, str(error))] * len(request.events)
        else:
            results, body = results_of(request, answer), answer.body.decode()
            if all(result.final for result in results):
                break
        await asyncio.sleep(0.1)
    return list(again(request, each.results, results, each.body, body))


def check(
    history: Path,
    bootstrap: str,
    namespace: str,
    topics: Sequence[str],
    urls: Sequence[str],
    stable_s: float,
    *,
    repeatable: Sequence[str] = (),
    lake: Path | None = None,
    rules: Path | None = None,
) -> Verdict:
    """Run all checks.

    `urls`: the processes to which keys are posted again; `stable_s`: how long a transaction may stay open from now on.
    """
    try:
        ends = wait_until_stable(bootstrap, [*topics, ledger_topic(namespace)], stable_s)
    except AssertionError as error:
        return Verdict([("stable", str(error))])
    evidence = Evidence(
        read(history),
        read_committed(bootstrap, topics, READ_S),
        {place: batches(bootstrap, *place, end) for place, end in ends.items() if place[0] in topics},
        frozenset(repeatable),
    )
    verdict = judge(evidence)
    exact = [topic for topic in topics if topic not in repeatable]
    verdict.violations += [("ledger", text) for text in ledger_faults(bootstrap, namespace, exact, READ_S)]
    tries = acknowledged(each for made in evidence.tries.values() for each in made)
    if urls:
        wrong = asyncio.run(post_again(urls, tries))
        there = {record.place for record in evidence.records}
        wrong += [
            f"{record.idempotency_key} was written once more, at {record.place}"
            for record in read_committed(bootstrap, topics, READ_S)
            if record.place not in there
        ]
        verdict.violations += [("again", text) for text in wrong]
    if lake is not None:
        small = len(evidence.records) < SMALL
        _, report = Audit(bootstrap, namespace, lake, topics, "--grace-s", "1", rules=rules, small=small).carry_out()
        verdict.violations += [("audit", text) for text in disagreements(report, evidence, verdict)]
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.checker", description=__doc__)
    parser.add_argument("--history", type=Path, required=True, help="folder of the clients' logs (*.jsonl)")
    parser.add_argument("--kafka", required=True, help="bootstrap servers")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--topics", required=True, help="separated by commas")
    parser.add_argument("--url", action="append", default=[], help="a service process; may be given several times")
    parser.add_argument("--stable-s", type=float, default=25.0, help="how long a transaction may stay open")
    parser.add_argument("--idempotent", default="", help="topics that may hold a record twice, separated by commas")
    parser.add_argument("--audit", type=Path, help="run the reconciliation job too, with its lake in this folder")
    parser.add_argument("--rules", type=Path, help="the rules file of the service, for the reconciliation job")
    given = parser.parse_args()
    verdict = check(
        given.history,
        given.kafka,
        given.namespace,
        given.topics.split(","),
        given.url,
        given.stable_s,
        repeatable=[topic for topic in given.idempotent.split(",") if topic],
        lake=given.audit,
        rules=given.rules,
    )
    shown = Counter(kind for kind, _ in verdict.violations)
    sys.stdout.write(json.dumps({**asdict(verdict), "violations": verdict.violations[:200], "found": shown}, indent=1))
    return WRONG if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())
