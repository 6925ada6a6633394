"""The report of a run: the findings are published, the report is written, and new findings go to the webhook."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from pyspark.sql import DataFrame

from spark.engine import frames
from spark.reading.run_plan import RunContext
from spark.report import document, publish, webhook
from spark.rules import current_findings, sink_audit
from spark.rules.balance import Balance
from spark.step_timer import StepTimer
from spark.steps import finished_runs
from spark.steps.run_start import Begun
from spark.tables import hours, schemas, verdict_history
from spark.tables.lake import Lake


class Reported(NamedTuple):
    """The report of a run, and what later runs need to know of it.

    `findings_topic` is the topic of findings after this run, None if the run does not publish; `webhook_state` the
    state of each finding (webhook.Decision). `shown` is what a run without Spark needs to repeat the report, None if it
    could not.
    """

    report: document.Report
    findings_topic: publish.PublishedTopic | None
    webhook_state: Mapping[str, int]
    shown: finished_runs.Shown | None


def write(
    lake: Lake,
    begun: Begun,
    balance: Balance,
    compared: Sequence[sink_audit.SinkReport],
    kind: document.RunKind,
    timer: StepTimer,
) -> Reported:
    """Close the balance, publish the current findings, and write the report; CannotRun before that if the balance does
    not close."""
    context, findings_topic = begun.context, begun.findings_topic
    window_from = context.window_from
    closed = balance.close(hours.text_of(window_from))
    with ExitStack() as cache:
        by_hour = frames.cached(current_findings.by_hour(_findings(lake, window_from), window_from), cache)
        found = frames.cached(current_findings.by_finding(by_hour), cache)
        if findings_topic is not None:
            with timer.step("publish findings"):
                findings_topic = publish.publish(
                    lake, context.settings.shared, found, findings_topic, begun.published, context.plan.run
                )
        with timer.step("write the report"):
            collected = document.collect(by_hour, found, context)
            revised = verdict_history.counted(lake.read_cached("verdicts"), window_from)
            results = document.Results(collected, closed, revised.counts, compared)
            report = document.build(results, context, kind, timer)
            shown = None
            if collected.number <= finished_runs.SHOWN_MAX and not context.settings.rules.sinks:
                oldest_ms = current_findings.oldest_ms(by_hour) if collected.number else None
                shown = finished_runs.Shown.of(context, collected, revised, oldest_ms)
            lake.check_held()
            report, webhook_state = _notify(report, context, timer)
            document.write(lake.spark, context.settings.options.report, report)
    return Reported(report, findings_topic, webhook_state, shown)


def _findings(lake: Lake, window_from: int) -> DataFrame:
    """Read the findings of the lake, those about sinks included."""
    findings = lake.read_cached("findings")
    if findings.isEmpty():
        # Without rows Spark plans next to nothing of what follows.
        findings = frames.rows_of(lake.spark, schemas.of("findings"), [])
    return sink_audit.with_findings(lake, findings, window_from)


def _notify(
    report: document.Report, context: RunContext, timer: StepTimer
) -> tuple[document.Report, Mapping[str, int]]:
    """Send the new findings of a report to the webhook, if there is one; returns the report with the outcome, and the
    webhook's state.

    A delivery that fails does not fail the run.
    """
    hook, state = context.settings.webhook, context.of_last_run("webhook", {})
    if hook is None:
        return report, state
    made, run = report.document, report.document["run"]
    decision = webhook.decide(made["findings"], run["fail_on"], state, hook.after)
    if not decision.due:
        return report, decision.sent
    body = webhook.body_of(made, decision.due, context.settings.options.report, hook.format)
    error = webhook.send(hook, body, webhook.key_of(made, decision.due))
    if error is not None:
        timer.on_progress(f"--webhook: not delivered, and sent again by the next run: {error}")
    delivered = document.Report({**made, "webhook": {"findings": len(decision.due), "error": error}})
    return delivered, decision.sent if error is None else decision.failed
