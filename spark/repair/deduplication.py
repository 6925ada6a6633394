"""Writes a topic into another one without surplus copies (--clean)."""

from collections.abc import Mapping, Sequence

from spark.errors import CannotRun
from spark.reading.kafka_admin import KafkaAdmin, Topic
from spark.reading.run_plan import DATA, Log
from spark.repair import checks, copier, entries, evidence
from spark.repair.entries import Entry
from spark.repair.invocation import Invocation, Outcome
from spark.repair.layouts import Layout, ReadUntil
from spark.repair.plans import EXECUTING


def deduplicate(invocation: Invocation) -> Outcome:
    """Plan which records of a topic are copied, or (--execute) copy them; a plan that was begun for the same two topics
    goes on."""
    options, plans = invocation.options, invocation.plans
    if not options.execute:
        made, layout, lines = _new_layout(invocation)
        plan = plans.begin(made, layout)
        lines = [f"plan       {plan}: planned, nothing was written", *lines]
        return Outcome(plan, made, lines, is_left=any(entry.is_left for entry in made))
    with invocation.copier() as into:
        stored = _stored(invocation)
        if stored is None:
            made, layout, lines = _new_layout(invocation)
            ends = _empty_ends(invocation, layout)
            plan = plans.begin(made, layout, EXECUTING)
        else:
            plan, layout = stored
            plans.take_number()
            lines = [f"plan       {plan} of an earlier command goes on"]
            ends = checks.decided_ends(invocation, layout)
        invocation.on_progress(f"plan {plan}: copying {options.clean} into {options.into}")
        copied = into.copy(layout.parts, ends)
        checks.check_intact(invocation, layout, plan)
    plans.end(plan, copied.all)
    lines = [
        f"plan       {plan}: done",
        *lines,
        f"records    {copied.all} in {options.into}: {copied.now} written now, {copied.before} before",
    ]
    return Outcome(plan, [], lines, is_left=False)


def _new_layout(invocation: Invocation) -> tuple[list[Entry], Layout, list[str]]:
    """Decide which copies are left out, up to where the last run has read the topic.

    Returns their entries, what is copied, and lines for the terminal.
    """
    source, target = invocation.options.clean, invocation.options.into
    logs = [log for log in invocation.audited.of(DATA) if log.topic == source]
    if not logs:
        raise CannotRun(
            f"--clean {source}: the last run has not audited this topic: run python -m spark first, with --topics "
            "if neither the ledger nor the rules name it"
        )
    read = tuple(ReadUntil(log.topic, log.partition, log.end, log.leader_epoch) for log in logs)
    with invocation.kafka() as admin:
        topics = _check_topics(admin, invocation.shared.namespace, source, target, logs)
        ends = admin.ends([log.topic_partition for log in logs])
        if why := checks.truncated(admin, read, ends):
            raise CannotRun(f"--clean {source}: {why} since the last run: run it again")
    bounds = {log.partition: (min(ends[log.topic_partition].log_start, log.end), log.end) for log in logs}
    copies, kept = evidence.surplus(invocation.lake, source, {source: topics[source].topic_id})
    made = entries.surplus(copies, bounds)
    parts = _parts(source, bounds, made)
    later = sum(max(0, ends[log.topic_partition].last_stable - log.end) for log in logs)
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


def _parts(source: str, bounds: Mapping[int, tuple[int, int]], left_out: Sequence[Entry]) -> dict[int, copier.Part]:
    """Return what is copied to each partition: the records of the source in these bounds that are not left out."""
    dropped: dict[int, list[int]] = {number: [] for number in bounds}
    for entry in left_out:
        dropped[entry.partition or 0].append(entry.offset or 0)
    return {
        number: copier.Part(0, ((source, tuple(entries.spans_without(first, end, dropped[number]))),), exact=False)
        for number, (first, end) in bounds.items()
    }


def _check_topics(admin: KafkaAdmin, namespace: str, source: str, target: str, logs: Sequence[Log]) -> dict[str, Topic]:
    """Check that a topic can be written into another one; CannotRun with the remedy otherwise."""
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
    checks.check_target(admin, namespace, topics, target)
    return topics


def _stored(invocation: Invocation) -> tuple[int, Layout] | None:
    """Return the newest plan that was executed for these two topics, and its layout; None without one, or if the target
    was recreated since. CannotRun if the source no longer has what the plan copies."""
    target = invocation.options.into
    stored = invocation.plans.last_deduplication(invocation.options.clean, target)
    if stored is None:
        return None
    plan, layout = stored
    with invocation.kafka() as admin:
        described = admin.describe([target]).get(target)
    if described is None or described.topic_id != layout.topic_ids[target]:
        return None
    checks.check_unchanged(invocation, layout, plan)
    return plan, layout


def _empty_ends(invocation: Invocation, layout: Layout) -> dict[int, int]:
    """Return the ends of a target that is empty; CannotRun if it is not, since no plan has written there."""
    target = invocation.options.into
    ends = checks.decided_ends(invocation, layout)
    if any(ends.values()):
        raise CannotRun(
            f"--into {target}: the topic is not empty, and no plan of --lake {invocation.lake.root} has written it: "
            "name an empty topic"
        )
    return ends
