"""The demo: `./deploy/local/demo [--events N]`. Exits with 0 only if all its claims hold."""

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from deploy.console import StackError, green, red, run, run_loop, say
from deploy.demo import truth, verdict
from deploy.demo.audit import Job, Report
from deploy.demo.chaos import chaos
from deploy.demo.client import CONCURRENCY, Client, Tally
from deploy.demo.delays import GROUP, Delays, delays_of, totals
from deploy.demo.flights import Flight, flights
from deploy.demo.practice import Practice
from deploy.demo.processor import Processor
from deploy.demo.screen import Screen, table
from deploy.places import local_folder
from deploy.stack import Kafka, Redis, Service

WITH, WITHOUT, TOTALS = "flights", "flights-plain", "delays"
_PARTITIONS = 4
_PROGRESS_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """The results of the demo: what was sent, what is in Kafka, and what the audit found."""

    sent: list[str]
    tally: Tally
    first: truth.Topic
    plain: list[str]
    second: truth.Topic
    expected: dict[str, Delays]
    totals: dict[str, Delays]
    results: int  # records in TOTALS
    report: Report

    def mistakes(self) -> list[str]:
        """List the claims that do not hold, a line each."""
        return [
            *verdict.with_fencepost(self.sent, self.tally, self.first),
            *verdict.without_fencepost(self.plain, self.second),
            *verdict.of_the_totals(self.expected, self.totals),
            *verdict.of_the_job(self.report, self.second.repeated, WITHOUT),
            *verdict.of_the_balance(self.report, len(self.sent) + self.results),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy/local/demo", description="Real records through crashes into Kafka.")
    parser.add_argument("--events", type=int, default=20_000, help="how many records each way (default: 20,000)")
    count: int = parser.parse_args().events
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(local_folder("demo", empty=True))
        outcome = _play(stack, folder, count)
    mistakes = outcome.mistakes()
    _show(outcome, mistakes, time.monotonic() - begun)
    return 1 if mistakes else 0


def _play(stack: contextlib.ExitStack, folder: Path, count: int) -> Outcome:
    """Run the whole demo; `stack` stops all processes that it starts."""
    screen = Screen()
    screen.step("Starting real Kafka, real Redis and two service processes")
    kafka, redis, services = _start(stack, folder, screen)

    screen.step(f"With Fencepost: {count:,} flights over HTTP, {CONCURRENCY} at a time, into topic {WITH}")
    events = flights(0, count)
    tally = run_loop(_load(screen, events, services, redis))
    screen.note(f"all {len(tally.answers):,} acknowledged; the longest wait for an answer was {tally.longest_s:.1f} s")

    screen.step(f"Without: {count:,} other flights by a plain idempotent producer, into topic {WITHOUT}")
    others = flights(count, count)
    _practise(screen, folder, kafka, count)

    screen.step(f"A processor: delays by carrier, from {WITH} (as group {GROUP}) through Fencepost into topic {TOTALS}")
    Processor(folder, kafka.bootstrap, services[0].url, WITH, TOTALS).crash_and_go_on(
        count, screen.blow, lambda counted: screen.update(counted, count, "counted")
    )
    screen.note(f"all {count:,} counted")

    screen.step("Counting what is truly there, with another client (read_committed)")
    with screen.busy("reading"):
        first, second = truth.read(kafka.bootstrap, WITH), truth.read(kafka.bootstrap, WITHOUT)
        results = truth.values(kafka.bootstrap, TOTALS)
    screen.note(f"{WITH}: {first.records:,} records of {len(first.places):,} keys")
    screen.note(f"{WITHOUT}: {second.records:,} records of {len(second.places):,} keys")
    counted = totals(results)
    screen.note(f"{TOTALS}: {len(results):,} records, which count {_flights(counted):,} flights")

    topics = [WITH, WITHOUT, TOTALS]
    screen.step("The audit: the reconciliation job over the three topics (Spark)")
    with screen.busy("Spark reads, compares and writes"), Job(folder, kafka.bootstrap, topics) as job:
        report = job.report(tell=screen.note)
    screen.note(f"{len(report.findings):,} findings")
    expected = delays_of(json.loads(event.value) for event in events)
    keys, plain = [e.key for e in events], [e.key for e in others]
    return Outcome(keys, tally, first, plain, second, expected, counted, len(results), report)


def _start(stack: contextlib.ExitStack, folder: Path, screen: Screen) -> tuple[Kafka, Redis, list[Service]]:
    with screen.busy("Kafka starts"):
        kafka = stack.enter_context(Kafka(folder))
    redis = stack.enter_context(Redis(folder))
    screen.note(f"Kafka {kafka.bootstrap}, Redis {redis.url}")
    for topic in (WITH, WITHOUT, TOTALS):
        kafka.create_topic(topic, partitions=_PARTITIONS)
    services = [Service(folder, kafka=kafka.bootstrap, redis=redis.url, name=f"service-{n}") for n in (1, 2)]
    with screen.busy("the service starts"):
        for service in services:
            stack.callback(service.stop)
            service.start(wait_ready=False)
        for service in services:
            service.wait_ready()
            screen.note(f"{service.name} {service.url}")
    return kafka, redis, services


async def _load(screen: Screen, events: list[Flight], services: list[Service], redis: Redis) -> Tally:
    """Send all events while a process is killed and Redis is flushed."""
    client = Client([service.url for service in services], WITH)
    total = len(events)

    async def reached(share: float) -> None:
        await client.settled(int(total * share))

    async def show() -> None:
        while True:
            screen.update(len(client.tally.answers), total, "acknowledged")
            await asyncio.sleep(_PROGRESS_S)

    shown = asyncio.create_task(show())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(client.send(events))
            group.create_task(chaos(reached, services[0], redis, services, screen.blow))
    except* StackError as errors:
        raise errors.exceptions[0] from None
    finally:
        shown.cancel()
    return client.tally


def _practise(screen: Screen, folder: Path, kafka: Kafka, count: int) -> None:
    practice = Practice(folder, kafka.bootstrap, WITHOUT, count, count)
    practice.crash_and_go_on(screen.blow, lambda answered: screen.update(answered, count, "answered"))
    screen.note("all answered")


def _show(outcome: Outcome, mistakes: list[str], took_s: float) -> None:
    first, second, tally = outcome.first, outcome.second, outcome.tally
    causes = Counter(each.cause for each in outcome.report.findings if each.topic == WITHOUT)
    errors = ", ".join(f"{count:,} x {name}" for name, count in tally.errors.most_common())
    rows = [
        ("topic", WITH, WITHOUT),
        ("events", f"{len(outcome.sent):,}", f"{len(outcome.plain):,}"),
        ("requests", f"{tally.requests:,}", "-"),
        ("answered again (replays)", f"{tally.replays:,}", "-"),
        ("records in the topic", f"{first.records:,}", f"{second.records:,}"),
        ("delivered once", _once(first), _once(second)),
        ("lost", _lost(outcome.sent, first), _lost(outcome.plain, second)),
        ("there more than once", f"{len(first.repeated):,}", f"{len(second.repeated):,}"),
        *((f"  found by the job: {cause}", "0", f"{count:,}") for cause, count in causes.most_common()),
    ]
    say()
    say(table(("", "with Fencepost", "plain producer"), rows))
    say()
    say(f"  {TOTALS}: {_flights(outcome.totals):,} flights counted, in {outcome.results:,} records")
    say(f"  errors the client got over: {errors or 'none'}")
    say(f"  report: {outcome.report.page}")
    say()
    for mistake in mistakes:
        say(f"{red('wrong:')} {mistake}")
    if not mistakes:
        say(f"{green('as promised:')} every event of {WITH} is there exactly once, where its answer said,")
        say(f"and the processor has counted each of its flights once, under its carrier, in {TOTALS};")
        say(f"the job found all {len(second.repeated):,} duplicates of {WITHOUT}, and nothing else ({took_s:.0f} s)")


def _flights(counted: dict[str, Delays]) -> int:
    return sum(each.flights for each in counted.values())


def _once(topic: truth.Topic) -> str:
    return f"{len(topic.places) - len(topic.repeated):,}"


def _lost(sent: list[str], topic: truth.Topic) -> str:
    return f"{sum(key not in topic.places for key in sent):,}"


if __name__ == "__main__":
    run(main)
