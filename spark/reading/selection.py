"""Which data topics a run audits, by its options, the rules, the ledger and the journal."""

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NoReturn

from service.contract.wire.names import control_topic, findings_topic, ledger_topic, requests_topic
from spark.errors import CannotRun, NeedsSpark
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, UNWANTED, Plan, options_of
from spark.settings import Settings, matches

TopicsInLake = Callable[[], set[str]]
"""Returns the topics that ledger and journal name, by what earlier runs have merged into the lake."""


def known_to_the_lake_only() -> NoReturn:
    """Raise NeedsSpark in place of the topics that earlier runs have merged: those are in the lake's tables."""
    raise NeedsSpark("other topics are selected")


class Selection:
    """The data topics that a run audits: those of --topics; without --topics those that the rules, the ledger or the
    journal name. None of --without-topics is audited."""

    def __init__(self, settings: Settings, last_plan: Plan | None, topics_in_lake: TopicsInLake) -> None:
        namespace = settings.shared.namespace
        self.globs = settings.options.topics
        self._without = settings.options.without_topics
        self._settings = settings
        self._ledger, self._requests = ledger_topic(namespace), requests_topic(namespace)
        self._own = {self._ledger, self._requests, control_topic(namespace), findings_topic(namespace)}
        # Topics that the ledger or the journal names.
        self._claimed_topics = set() if self.globs else _audited_before(settings, last_plan, topics_in_lake)
        self._last_data = [log for log in last_plan.logs if log.role in (DATA, UNWANTED)] if last_plan else []

    def has(self, name: str) -> bool:
        """Check whether a data topic is selected."""
        if matches(self._without, name):
            return False
        return (
            matches(self.globs, name) if self.globs else name in self._claimed_topics or _has_rule(self._settings, name)
        )

    def required(self, existing: set[str]) -> dict[str, set[str]]:
        """Return the topics whose ends must be listed, by role; CannotRun if there is nothing to audit."""
        if self._ledger not in existing and not self.globs:
            raise CannotRun(
                f"topic {self._ledger!r} does not exist; "
                "set FENCEPOST_NAMESPACE to the service's, or name topics with --topics"
            )
        data = {name for name in existing - self._own if self.has(name)}
        if self.globs and not data and not any(self.has(log.topic) for log in self._last_data):
            kafka = self._settings.shared.kafka
            raise CannotRun(
                f"--topics {','.join(self.globs)!r} matches no topic of Kafka at FENCEPOST_KAFKA={kafka!r}, and none "
                "of the last run on this --lake; name topics that exist, or leave --topics out"
            )
        return {DATA: data, LEDGER: {self._ledger}, REQUESTS: {self._requests}}

    def candidates(self, existing: set[str]) -> set[str]:
        """Return existing topics that are not selected, but may be named by the unread part of ledger and journal."""
        if self.globs:
            return set()
        return {name for name in existing - self._own if not self.has(name) and not matches(self._without, name)}

    def all_candidates(self, existing: set[str]) -> set[str]:
        """Return the candidates, and topics that an earlier run audited and the last run did not.

        Such a topic may no longer exist. If ledger or journal name it again, its claims are audited.
        """
        return self.candidates(existing | {log.topic for log in self._last_data if log.role == UNWANTED})

    def add(self, names: set[str]) -> None:
        """Select topics that the ledger or the journal names."""
        self._claimed_topics |= names


def _audited_before(settings: Settings, last_plan: Plan | None, topics_in_lake: TopicsInLake) -> set[str]:
    """Return the topics that a run without --topics audits because of what earlier runs have read.

    If the last run had other --topics or --without-topics, its plan does not list all of these: it merged the whole
    ledger, but audited fewer topics. If it had other rules, its plan may list a topic that only a removed rule named.
    """
    if last_plan is None:
        return set()
    last_options, options = json.loads(last_plan.options), json.loads(options_of(settings))
    if any(last_options.get(name) != options.get(name) for name in ("topics", "without_topics", "rules")):
        return topics_in_lake()
    return {log.topic for log in last_plan.logs if log.role == DATA}


def _has_rule(settings: Settings, name: str) -> bool:
    """Check whether a rule's pattern matches the topic."""
    return any(fnmatchcase(name, rule.pattern) for rule in settings.rules.topics)
