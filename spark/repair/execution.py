"""Executes plans about lost and missing events: copies and sends their entries, and stores the outcomes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import httpx

from spark.errors import CannotRun
from spark.repair import checks, copier, entries, layouts, send
from spark.repair.entries import Entry
from spark.repair.invocation import Invocation
from spark.repair.layouts import Layout, ReadUntil
from spark.repair.plans import EXECUTING

STORE_EVERY_S: Final = 30.0
"""How often outcomes are stored while events are sent."""


def execute(
    invocation: Invocation, plan: int, made: Sequence[Entry], transport: httpx.BaseTransport | None
) -> list[Entry]:
    """Copy and send the entries of a stored plan, and store their outcomes. Returns the entries with these."""
    options, plans = invocation.options, invocation.plans
    done, layout = list(made), Layout()
    copies = [entry for entry in made if entry.action == entries.COPY]
    if options.into and copies:
        with invocation.copier() as into:
            ends, layout = _layout_at_ends(invocation, layouts.parts_of(copies))
            plans.store(plan, EXECUTING, layout, len(made))
            into.copy(layout.parts, ends)
            checks.check_intact(invocation, layout, plan)
        done = _copied(invocation, done)
        plans.store_entries(plan, done)
    if options.url and any(entry.action == entries.SEND for entry in made):
        plans.store(plan, EXECUTING, layout, len(made))
        done = _send(invocation, plan, done, transport)
    plans.end(plan, sum(entry.outcome in (entries.WRITTEN, entries.COPIED) for entry in done))
    return done


def _layout_at_ends(invocation: Invocation, parts: Mapping[int, copier.Part]) -> tuple[dict[int, int], Layout]:
    """Let the parts begin at the present ends of the target, after `init` has fenced others; return ends and layout."""
    target = invocation.options.into
    sources = sorted({topic for part in parts.values() for topic, _ in part.spans})
    with invocation.kafka() as admin:
        topics = admin.describe([*sources, target])
        checks.check_target(admin, invocation.shared.namespace, topics, target)
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
    return ends, Layout({name: topic.topic_id for name, topic in topics.items()}, based, read)


def _copied(invocation: Invocation, made: Sequence[Entry]) -> list[Entry]:
    """Give the entries that were to be copied their outcome."""
    into, now_ms = invocation.options.into, invocation.now_ms()
    return [
        replace(entry, outcome=entries.COPIED, written_topic=into, ended_ms=now_ms)
        if entry.action == entries.COPY
        else entry
        for entry in made
    ]


def _send(invocation: Invocation, plan: int, made: list[Entry], transport: httpx.BaseTransport | None) -> list[Entry]:
    """Send the lost events one by one; outcomes are stored from time to time, and at the end."""
    options = invocation.options
    target = send.Target(options.url, options.token_file, options.cafile)
    stored_s = time.monotonic()
    try:
        with send.opened(target, transport) as client:
            for nth, entry in enumerate(made):
                if entry.action != entries.SEND:
                    continue
                invocation.lake.check_held()
                made[nth] = send.send(client, entry, new_keys=options.new_keys, now_ms=invocation.now_ms)
                if made[nth].outcome == entries.OTHER_CALLER:
                    raise CannotRun(f"{made[nth].finding_id}: {made[nth].detail}; correct --token-file or --scope")
                if time.monotonic() - stored_s > STORE_EVERY_S:
                    invocation.plans.store_entries(plan, made)
                    stored_s = time.monotonic()
    finally:
        invocation.plans.store_entries(plan, made)
    return made


def finish_interrupted(invocation: Invocation) -> None:
    """Finish the copies into the topic of --into that a killed process has begun."""
    target, plans = invocation.options.into, invocation.plans
    for plan, layout, made in plans.interrupted(target):
        if not layout.parts or not any(entry.action == entries.COPY and entry.outcome is None for entry in made):
            continue
        invocation.on_progress(f"plan {plan} was interrupted: finishing its copies into {target}")
        checks.check_unchanged(invocation, layout, plan)
        with invocation.copier() as into:
            into.copy(layout.parts, checks.decided_ends(invocation, layout))
            checks.check_intact(invocation, layout, plan)
        done = _copied(invocation, made)
        plans.take_number()
        plans.store_entries(plan, done)
        plans.end(plan, sum(entry.outcome == entries.COPIED for entry in done))
