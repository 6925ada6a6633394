"""The plan of a run, against a fake cluster: no Spark, no Kafka."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from service.contract import SharedSettings
from spark.errors import CannotRun, NeedsSpark
from spark.reading import planning, run_plan
from spark.reading.kafka_admin import Ends, TopicPartition
from spark.reading.run_plan import DATA, LEDGER, Log, LogGap, Plan
from spark.settings import HOUR_MS, OFFSETS_MOST, Settings
from spark.steps import maintenance
from spark.tables import hours
from tests.spark.fake_cluster import LEDGER_TOPIC, REQUESTS_TOPIC, FakeAdmin, ends, fake_cluster, freeze, settings
from tests.spark.rows import NOW_MS
from tests.spark.test_classify import log as a_log


@pytest.fixture
def cluster() -> FakeAdmin:
    return fake_cluster()


def one(plan: Plan, topic: str) -> Log:
    return next(log for log in plan.logs if log.topic == topic)


def test_data_is_frozen_first_then_the_ledger_then_the_answers(cluster: FakeAdmin) -> None:
    freeze(cluster, named={"orders"})
    assert cluster.listed_topics == [["orders", "others"], [LEDGER_TOPIC], [REQUESTS_TOPIC], ["orders"]]


def test_a_topic_that_is_recreated_while_the_run_is_planned_proves_nothing(
    cluster: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later list of ends would be that of the new topic, and the claims on the earlier one would lie past it."""
    listed = cluster.ends

    def recreated(partitions: Sequence[TopicPartition], *, strict: bool = True) -> dict[TopicPartition, Ends]:
        if (LEDGER_TOPIC, 0) in partitions:
            cluster.topics["orders"] = ends(0)
            cluster.topic_ids["orders"] = "two"
        return listed(partitions, strict=strict)

    monkeypatch.setattr(cluster, "ends", recreated)
    with pytest.raises(CannotRun, match="topic 'orders' was deleted or recreated while the run was planned"):
        freeze(cluster, named={"orders"})


def test_the_ends_of_the_data_are_listed_again_after_those_of_the_ledger(
    cluster: FakeAdmin,
) -> None:
    """A record that is written while a run is planned may be in the plan with its ledger entry only."""
    listed = cluster.ends

    def ends_of(partitions: Sequence[TopicPartition], *, strict: bool = True) -> dict[TopicPartition, Ends]:
        found = listed(partitions, strict=strict)
        if (REQUESTS_TOPIC, 0) in found:
            cluster.topics |= {"orders": ends(13), LEDGER_TOPIC: ends(9), REQUESTS_TOPIC: ends(9)}
        return found

    cluster.ends = ends_of  # type: ignore[method-assign]
    plan = freeze(cluster, named={"orders"})
    log = one(plan, "orders")
    assert (log.end, log.high_watermark, log.later_end) == (10, 10, 13)
    assert [one(plan, name).later_end for name in (LEDGER_TOPIC, REQUESTS_TOPIC)] == [4, 2]
    assert run_plan.later_ends(plan) == {("orders", 0): 13}


def test_a_ledger_with_an_open_transaction_is_caught_up_to_an_earlier_run(cluster: FakeAdmin) -> None:
    caught_up, plan = [], None
    for last, open in ((4, 0), (6, 2), (7, 3), (9, 1), (12, 0)):
        cluster.topics[LEDGER_TOPIC] = ends(last, open=open)
        plan = freeze(cluster, plan, named={"orders"})
        caught_up.append((plan.run, one(plan, LEDGER_TOPIC).caught_up_run))
    # At run 3 the records of run 2 (up to offset 8) are not all read; at run 4 they are.
    assert caught_up == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 5)]
    cluster.topic_ids[LEDGER_TOPIC], cluster.topics[LEDGER_TOPIC] = "two", ends(1, open=1)
    assert one(freeze(cluster, plan, named={"orders"}), LEDGER_TOPIC).caught_up_run == 0


def test_a_topic_is_audited_when_the_ledger_the_rules_or_an_option_name_it(cluster: FakeAdmin) -> None:
    assert freeze(cluster, named={"orders", "not-there"}).topics == ["orders"]
    assert freeze(cluster, rules='[[topics]]\npattern = "oth*"').topics == ["others"]
    assert freeze(cluster, topics=("*",)).topics == ["orders", "others"]
    assert freeze(cluster, freeze(cluster, named={"orders"}), named=set()).topics == ["orders"]


def test_a_topic_is_not_audited_while_an_option_leaves_it_out(cluster: FakeAdmin) -> None:
    rules, without = '[[topics]]\npattern = "ord*"', ("foreign", "ord*")
    assert freeze(cluster, topics=("*",), without_topics=without).topics == ["others"]
    first = freeze(cluster, named={"orders", "others"}, rules=rules)
    second = freeze(cluster, first, named={"orders"}, rules=rules, without_topics=without, in_lake={"orders", "others"})
    assert (second.topics, second.unwanted) == (["others"], ["orders"])
    assert run_plan.settings_of(second.options, settings()).options.without_topics == without
    third = freeze(cluster, second, rules=rules, in_lake={"orders", "others"})
    assert third.topics == ["orders", "others"]


def test_a_topic_is_not_audited_any_more_when_the_rule_that_named_it_is_gone(cluster: FakeAdmin) -> None:
    first = freeze(cluster, named={"orders"}, rules='[[topics]]\npattern = "oth*"')
    assert first.topics == ["orders", "others"]
    second = freeze(cluster, first, in_lake={"orders"})
    assert second.topics == ["orders"]
    assert freeze(cluster, second).topics == ["orders"]


def test_a_run_without_a_ledger_needs_named_topics(cluster: FakeAdmin) -> None:
    del cluster.topics[LEDGER_TOPIC]
    with pytest.raises(CannotRun, match=r"fencepost\.ledger.*FENCEPOST_NAMESPACE.*--topics"):
        freeze(cluster)
    assert freeze(cluster, topics=("orders",)).topics == ["orders"]


def test_globs_must_match_a_present_topic_or_one_of_the_last_run(cluster: FakeAdmin) -> None:
    with pytest.raises(
        CannotRun, match=r"--topics 'ordres,no\.\*' matches no topic .*FENCEPOST_KAFKA=.*leave --topics"
    ):
        freeze(cluster, topics=("ordres", "no.*"))
    with pytest.raises(CannotRun, match="--topics"):
        freeze(cluster, freeze(cluster, topics=("others",)), topics=("fence*",))
    first = freeze(cluster, topics=("orders",))
    del cluster.topics["orders"]
    second = freeze(cluster, first, topics=("orders",))
    assert (second.topics, one(second, "orders").audited) == ([], False)
    # Also if a run in between left the topic out.
    assert freeze(cluster, freeze(cluster, second, in_lake=set()), topics=("ord*",)).topics == []


def test_another_window_changes_the_options_of_the_plan() -> None:
    assert run_plan.options_of(settings(window_h=336)) != run_plan.options_of(settings())


def test_the_settings_of_a_run_are_restored_from_its_plan(cluster: FakeAdmin) -> None:
    rules = "\n".join(
        [
            '[[topics]]\npattern = "a*"\nguarantee = "idempotent"\nderived = true\nclient_duplicates = false',
            '[[topics]]\npattern = "kept"\nkey_ttl_s = 259200\nschema = "s"\nquarantine = "letters"',
            f'[[callers]]\nname = "c"\ntoken_sha256 = "{"0" * 64}"',
            '[[sources]]\nname = "s"\ntopic = "t"\nidempotency_key = { pointer = "/id" }\nsignature = "none"'
            '\nkey_ttl_s = 300000\nquarantine = "unusable"',
            '[[sources]]\nname = "r"\ntopic = "t"\nidempotency_key = { pointer = "/id" }\nsignature = "none"',
        ]
    )
    theirs = replace(
        settings(rules, topics=("a*",), grace_s=7, window_h=24, identity={"a": "key"}),
        shared=SharedSettings(key_ttl_s=7200, request_timeout_ms=3000, transaction_timeout_ms=4000),
    )
    ours = settings(skip_ids=True)
    found = run_plan.settings_of(run_plan.options_of(theirs), ours)
    assert run_plan.options_of(found) == run_plan.options_of(theirs) != run_plan.options_of(ours)
    assert (found.max_settle_ms, found.rules.rule("abc").client_duplicates) == (theirs.max_settle_ms, False)
    assert (found.rules.rule("kept").key_ttl_s, found.longest_ttl_ms) == (259_200, 300_000_000)
    assert found.rules.quarantine_topics == {"letters", "unusable"}
    retentions_s = [found.rules.longest_ttl_of(topic, 7200) for topic in ("a", "t", "kept", "letters", "unusable")]
    assert retentions_s == [7200, 300_000, 259_200, 259_200, 300_000]
    assert found.options.skip_ids
    assert found.rules.scopes == theirs.rules.scopes == ("", "c", "source:s", "source:r")
    # Another caller in the rules is another scope of keys.
    assert run_plan.options_of(settings(rules)) != run_plan.options_of(settings(rules.replace('"c"', '"d"')))


def test_kinds_that_do_not_count_by_a_rule_do_not_count_in_a_run_that_is_finished_with_other_options() -> None:
    """No verdict depends on them, so that a plan does not store them; else the run would send them to the webhook."""
    rules = '[[topics]]\npattern = "metrics.*"\nfindings = ["error"]\n\n[[topics]]\npattern = "a*"'
    found = run_plan.settings_of(run_plan.options_of(settings(rules, grace_s=7)), settings(rules))
    assert found.options.grace_s == 7
    assert [found.rules.rule(topic).findings for topic in ("metrics.cpu", "a")] == [("error",), ()]
    # A rule that the command line no longer has is the plan's.
    found = run_plan.settings_of(run_plan.options_of(settings(rules)), settings(grace_s=7))
    assert found.rules.rule("metrics.cpu").findings == ()


def test_what_a_plan_of_an_earlier_version_lacks_is_taken_from_the_command_line() -> None:
    rules = f'[[callers]]\nname = "c"\ntoken_sha256 = "{"0" * 64}"'
    parsed = json.loads(run_plan.options_of(settings(rules, topics=("a*",), grace_s=7, window_h=24)))
    old = json.dumps({name: parsed[name] for name in parsed.keys() - {"window_h", "callers", "identity"}})
    ours = settings(rules.replace('"c"', '"d"'), window_h=336, identity={"a": "key"})
    found = run_plan.settings_of(old, ours)
    assert (found.options.topics, found.options.grace_s, found.options.window_h) == (("a*",), 7, 336)
    assert found.rules.callers[0].name == "d"
    # Such a version read every record without --identity.
    assert found.options.identity == {}


@pytest.mark.parametrize(("planned", "ours"), [(8, None), (None, 8), (8, 9)])
def test_a_run_is_resumed_with_the_kept_days_of_its_plan(
    cluster: FakeAdmin, planned: int | None, ours: int | None
) -> None:
    plan = Plan.from_rows(freeze(cluster, named={"orders"}, keep_days=planned).rows())
    assert plan is not None
    found = run_plan.resumed_settings(plan, settings(keep_days=ours))
    assert found == settings(keep_days=planned) != settings(keep_days=ours)


@pytest.mark.parametrize(("planned", "ours"), [(True, False), (False, True)])
def test_a_run_is_resumed_with_or_without_the_pass_over_all_ids_as_it_was_planned(
    cluster: FakeAdmin, planned: bool, ours: bool
) -> None:
    plan = Plan.from_rows(freeze(cluster, named={"orders"}, skip_ids=planned).rows())
    assert plan is not None
    found = run_plan.resumed_settings(plan, settings(skip_ids=ours))
    assert found == settings(skip_ids=planned) != settings(skip_ids=ours)
    assert run_plan.resumed_settings(plan, settings(skip_ids=planned)) == settings(skip_ids=planned)
    # The verdicts of an hour do not depend on the pass.
    assert plan.options == run_plan.options_of(settings(skip_ids=ours))
    # Other options of the plan are restored with it.
    other = run_plan.resumed_settings(plan, settings(skip_ids=ours, grace_s=7))
    assert (other.options.skip_ids, other.options.grace_s) == (planned, 60)


def test_a_plan_of_an_earlier_version_takes_the_pass_over_all_ids_from_the_command_line(cluster: FakeAdmin) -> None:
    rows = freeze(cluster, named={"orders"}).rows()
    plan = Plan.from_rows([{name: row[name] for name in row.keys() - {"skip_ids", "keep_days"}} for row in rows])
    assert plan is not None
    ours = settings(skip_ids=True, keep_days=8)
    assert run_plan.resumed_settings(plan, ours) == ours


def test_the_next_run_starts_at_the_end_of_the_last_one(cluster: FakeAdmin) -> None:
    first = freeze(cluster, named={"orders"})
    cluster.topics["orders"] = ends(25)
    second = freeze(cluster, first)
    assert (second.run, one(second, "orders").start, one(second, "orders").end) == (2, 10, 25)
    assert one(second, LEDGER_TOPIC).start == one(second, LEDGER_TOPIC).end


def test_a_plan_is_restored_from_its_rows(cluster: FakeAdmin) -> None:
    cluster.topics["orders"] = ends(25, start=20)
    plan = freeze(cluster, named={"orders"})
    cluster.topics["orders"] = ends(40, start=30)
    plan = freeze(cluster, plan)
    assert one(plan, "orders").gaps
    assert Plan.from_rows(plan.rows()) == plan


def test_capped_runs_share_the_cap_and_read_every_record_in_the_end(cluster: FakeAdmin) -> None:
    cluster.topics["orders"] = ends(1000)
    plan, read = None, 0
    for _ in range(40):
        plan = freeze(cluster, plan, named={"orders"}, max_records=100)
        spans = [log.end - log.start for log in plan.logs if log.audited]
        assert sum(spans) <= 100 + len(spans)
        read += sum(spans)
        if not sum(spans):
            break
    assert read == 1000 + 4 + 2
    assert plan is not None
    assert all(log.end == log.last_stable >= log.high_watermark for log in plan.logs if log.audited)


def test_a_capped_run_looks_for_topics_only_in_what_it_may_merge_of_ledger_and_journal(cluster: FakeAdmin) -> None:
    cluster.topics |= {LEDGER_TOPIC: ends(1000), REQUESTS_TOPIC: ends(400), "orders": ends(600)}
    listed: list[Sequence[Log]] = []

    def discover(logs: Sequence[Log], names: Sequence[str]) -> set[str]:
        listed.append(logs)
        return {"orders"}

    plan = planning.freeze(cluster, settings(max_records=140), None, NOW_MS, planning.NamedTopics(discover, set))
    looked = {log.topic: log.end for log in listed[-1]}
    # No record of a topic that nothing names counts.
    assert looked == {LEDGER_TOPIC: 100, REQUESTS_TOPIC: 40}
    # The topic that was found takes its share: the run merges less than it looked through.
    merged = {log.topic: log.end for log in plan.logs}
    assert merged == {LEDGER_TOPIC: 70, REQUESTS_TOPIC: 28, "orders": 42}


def test_a_capped_log_is_decided_if_only_transaction_markers_follow(cluster: FakeAdmin) -> None:
    cluster.topics[LEDGER_TOPIC] = ends(1000)
    assert one(freeze(cluster, max_records=100), LEDGER_TOPIC).decided_until_ms == NOW_MS
    cluster.first_timestamps[(LEDGER_TOPIC, 0)] = NOW_MS - 1234
    assert one(freeze(cluster, max_records=100), LEDGER_TOPIC).decided_until_ms == NOW_MS - 1234


def test_an_open_transaction_bounds_what_is_read_and_what_is_decided(cluster: FakeAdmin) -> None:
    cluster.topics["orders"] = ends(10, open=3)
    cluster.topics[LEDGER_TOPIC] = ends(4, open=1)
    cluster.first_timestamps[(LEDGER_TOPIC, 0)] = NOW_MS - 1234
    plan = freeze(cluster, named={"orders"})
    assert (one(plan, "orders").end, one(plan, "orders").later_end) == (10, OFFSETS_MOST)
    assert (one(plan, LEDGER_TOPIC).caught_up_run, one(plan, REQUESTS_TOPIC).caught_up_run) == (0, 1)
    assert one(plan, "orders").decided_until_ms == 0
    assert one(plan, LEDGER_TOPIC).decided_until_ms == NOW_MS - 1234
    assert one(plan, REQUESTS_TOPIC).decided_until_ms == NOW_MS


def test_an_end_is_newly_known_after_a_run_that_was_blocked_or_did_not_audit_the_topic(cluster: FakeAdmin) -> None:
    cluster.topics |= {"blocked": ends(10, open=3), "again": ends(10), "free": ends(10), "left-out": ends(10)}
    first = freeze(cluster, topics=("blocked", "again", "free"))
    assert run_plan.newly_known_ends(first, None) == {}
    cluster.topics |= {"blocked": ends(17), "again": ends(17, open=1), "new": ends(5)}
    second = freeze(cluster, first, topics=("blocked", "again", "free", "left-out", "new"))
    expected = {("blocked", 0): 17, ("left-out", 0): 10, ("new", 0): 5}
    assert run_plan.newly_known_ends(second, first) == expected
    assert run_plan.newly_known_ends(freeze(cluster, second, topics=("free",)), second) == {}
    assert run_plan.newly_known_ends(freeze(cluster, second, topics=("blocked", "free")), second) == {}


def test_records_above_the_last_end_arrived_after_the_last_freeze(cluster: FakeAdmin) -> None:
    cluster.topics |= {"capped": ends(10), "truncated": ends(10), "recreated": ends(10), "same": ends(10)}
    first = freeze(cluster, topics=("*",))
    assert run_plan.arrived(first, None) == {}
    logs = [replace(log, end=9) if log.topic == "capped" else log for log in first.logs]
    first = replace(first, logs=tuple(logs))
    cluster.topics |= {
        "orders": ends(25),
        "capped": ends(12),
        "truncated": ends(6),
        "recreated": ends(3),
        "new": ends(3),
    }
    cluster.topics["others"] = ends(20, start=15)
    cluster.topic_ids["recreated"] = "two"
    second = freeze(cluster, first, topics=("*",), now_ms=NOW_MS + 5)
    assert run_plan.arrived(second, first) == {(name, 0): NOW_MS for name in ("recreated", "orders", "others")}


def test_records_that_retention_deleted_unread_are_a_gap(cluster: FakeAdmin) -> None:
    first = freeze(cluster, named={"orders"})
    cluster.topics["orders"] = ends(50, start=30)
    log = one(freeze(cluster, first), "orders")
    assert (log.start, log.first) == (30, 0)
    assert [(gap.first, gap.last, gap.cause) for gap in log.gaps] == [(10, 30, "retention")]
    cluster.topics["orders"] = ends(60, start=40)
    again = one(freeze(cluster, freeze(cluster, first)), "orders")
    assert len(again.gaps) == 1


def test_many_gaps_older_than_the_window_are_joined(cluster: FakeAdmin) -> None:
    """A run every hour reads half of what is written. No finding about such a gap is reported any more."""
    plan, most = None, 0
    for nth in range(2 * planning.GAPS_MAX):
        cluster.topics["orders"] = ends(20 * nth + 10, start=20 * nth)
        plan = freeze(cluster, plan, named={"orders"}, now_ms=NOW_MS + nth * HOUR_MS, window_h=24)
        most = max(most, len(one(plan, "orders").gaps))
    assert plan is not None
    assert planning.GAPS_MAX < most <= planning.GAPS_MAX + 26
    gaps = one(plan, "orders").gaps
    assert (gaps[0].first, gaps[0].cause) == (10, "retention")
    assert gaps[0].seen_ms < run_plan.window_from(plan, settings(window_h=24))
    # In the window, and for as long as there are few, each gap stays as it was found.
    apart = [(gap.first, gap.last) for gap in gaps[1:]]
    assert apart == [(20 * nth - 10, 20 * nth) for nth in range(gaps[0].last // 20 + 1, 2 * planning.GAPS_MAX)]
    assert len(apart) >= 24


def with_gaps(plan: Plan, *gaps: LogGap) -> Plan:
    """Return the plan with these gaps in the log of `orders`."""
    logs = [replace(log, gaps=gaps) if log.topic == "orders" else log for log in plan.logs]
    return replace(plan, logs=tuple(logs))


def test_joined_gaps_of_truncated_records_are_no_new_truncation(cluster: FakeAdmin) -> None:
    old = [LogGap(nth, nth + 2, "truncated", nth) for nth in range(planning.GAPS_MAX)]
    first = with_gaps(freeze(cluster, named={"orders"}), *old, LogGap(40, 50, "retention", 7))
    second = freeze(cluster, first, now_ms=NOW_MS + 1)
    gaps = {(gap.first, gap.last, gap.cause) for gap in one(second, "orders").gaps}
    assert gaps == {(0, planning.GAPS_MAX + 1, "truncated"), (40, 50, "retention")}
    assert run_plan.vanished(second, first) == {}


def test_old_gaps_of_a_topic_that_was_recreated_are_dropped_when_they_are_many(cluster: FakeAdmin) -> None:
    old = [LogGap(nth, nth + 2, "retention", nth) for nth in range(planning.GAPS_MAX)]
    # The clock of a run may be behind that of the run before.
    recent, recreated, truncated = (
        LogGap(7, 9, "retention", NOW_MS),
        LogGap(9, 9, "recreated", 8),
        LogGap(1, 3, "truncated", 7),
    )
    first = with_gaps(freeze(cluster, named={"orders"}), *old, recent, recreated, truncated)
    log = one(freeze(cluster, first, now_ms=NOW_MS + 1), "orders")
    assert log.gaps == (recent, recreated, truncated)
    assert log.gaps_of_topic == (truncated,)


def test_retention_of_records_that_were_read_is_no_gap(cluster: FakeAdmin) -> None:
    first = freeze(cluster, named={"orders"})
    cluster.topics["orders"] = ends(12, start=10)
    assert one(freeze(cluster, first), "orders").gaps == ()


def test_a_recreated_topic_is_read_from_its_beginning(cluster: FakeAdmin) -> None:
    first = freeze(cluster, named={"orders"})
    cluster.topics["orders"], cluster.topic_ids["orders"] = ends(3), "two"
    log = one(freeze(cluster, first, now_ms=NOW_MS + 5), "orders")
    assert (log.start, log.end, log.recreated_at_ms) == (0, 3, NOW_MS + 5)
    assert [gap.cause for gap in log.gaps] == ["recreated"]


def test_the_time_of_a_log_s_first_record_is_kept_over_runs(cluster: FakeAdmin) -> None:
    cluster.topics |= {"begun": ends(10, start=3), "empty": ends(0), "future": ends(5)}
    cluster.first_timestamps |= {("orders", 0): NOW_MS - 9, ("begun", 0): NOW_MS - 5, ("future", 0): NOW_MS + 1}

    def first_timestamps(plan: Plan) -> dict[str, int]:
        return {name: one(plan, name).first_record_ms for name in ("orders", "begun", "empty", "future", LEDGER_TOPIC)}

    first = freeze(cluster, topics=("*",))
    # Unknown for a log that begins later, and for a timestamp in the future.
    expected = {"orders": NOW_MS - 9, "begun": 0, "empty": NOW_MS, "future": 0, LEDGER_TOPIC: 0}
    assert first_timestamps(first) == expected
    cluster.topics |= {"orders": ends(12, start=10), "empty": ends(2)}
    cluster.first_timestamps |= {("orders", 0): NOW_MS - 3, ("empty", 0): NOW_MS + 7}
    second = freeze(cluster, first, now_ms=NOW_MS + 8, topics=("*",))
    assert first_timestamps(second) == expected | {"empty": NOW_MS + 7, "future": NOW_MS + 1}
    cluster.topics["orders"], cluster.topic_ids["orders"] = ends(3), "two"
    assert first_timestamps(freeze(cluster, second, now_ms=NOW_MS + 9, topics=("*",)))["orders"] == NOW_MS - 3


def test_a_first_record_whose_time_becomes_known_is_other_evidence(cluster: FakeAdmin) -> None:
    cluster.topics |= {"future": ends(5), "empty": ends(0)}
    cluster.first_timestamps |= {("orders", 0): NOW_MS, ("others", 0): NOW_MS, ("future", 0): NOW_MS + 7}
    first = freeze(cluster, topics=("*",))
    second = freeze(cluster, first, now_ms=NOW_MS + 6, topics=("*",))
    assert not run_plan.evidence_changed(second, first)
    third = freeze(cluster, second, now_ms=NOW_MS + 8, topics=("*",))
    assert (one(second, "future").first_record_ms, one(third, "future").first_record_ms) == (0, NOW_MS + 7)
    assert run_plan.evidence_changed(third, second)


@pytest.mark.parametrize(
    ("found", "topic_id", "error"),
    [
        (ends(25), "one", None),
        (ends(25, start=25), "one", None),
        (ends(19), "one", "partition 0 of topic 'orders' was truncated while the run read it"),
        (ends(25), "two", "topic 'orders' was deleted or recreated while the run read it"),
        (None, "one", "topic 'orders' was deleted or recreated while the run read it"),
    ],
    ids=["more", "deleted after the read", "truncated", "recreated", "gone"],
)
def test_records_count_only_if_their_logs_are_those_of_the_plan_after_the_read(
    cluster: FakeAdmin, found: Ends | None, topic_id: str, error: str | None
) -> None:
    first = freeze(cluster, named={"orders", "others"})
    cluster.topics["orders"] = ends(20)
    plan = freeze(cluster, first)
    # A log that the plan does not read does not matter.
    cluster.topics["others"] = ends(3)
    del cluster.topics["orders"]
    if found is not None:
        cluster.topics["orders"], cluster.topic_ids["orders"] = found, topic_id
    with nullcontext() if error is None else pytest.raises(CannotRun, match=error):
        planning.check_read(cluster, plan)
    # A run that reads nothing lists nothing.
    idle = replace(plan, logs=tuple(replace(log, start=log.end) for log in plan.logs))
    planning.check_read(cluster, idle)


def test_a_truncated_log_has_a_truncation_gap(cluster: FakeAdmin) -> None:
    first = freeze(cluster, named={"orders"})
    cluster.topics["orders"] = ends(6)
    log = one(freeze(cluster, first), "orders")
    assert (log.start, log.end) == (6, 6)
    assert [(gap.first, gap.last, gap.cause) for gap in log.gaps] == [(6, 10, "truncated")]


def test_a_truncated_log_that_grew_again_is_read_from_where_it_diverged(cluster: FakeAdmin) -> None:
    """The leader of a later epoch answers where the records of the earlier epoch end."""
    first = freeze(cluster, named={"orders"})
    # A leader with all records; and a leader without the last four, which has written more than four.
    cluster.topics["orders"], cluster.epochs["orders"] = ends(12, epoch=1), [10]
    clean = freeze(cluster, first, now_ms=NOW_MS + 1)
    assert (one(clean, "orders").start, one(clean, "orders").gaps, run_plan.vanished(clean, first)) == (10, (), {})
    cluster.topics["orders"], cluster.epochs["orders"] = ends(15, epoch=2), [6, 6]
    plan = freeze(cluster, first, now_ms=NOW_MS + 2)
    log = one(plan, "orders")
    assert (log.start, log.end, log.leader_epoch) == (6, 15, 2)
    assert [(gap.first, gap.last, gap.cause) for gap in log.gaps] == [(6, 10, "truncated")]
    assert run_plan.vanished(plan, first) == {("orders", 0): (6, 10)}
    assert run_plan.arrived(plan, first) == {}
    # The same leader epoch is not requested again.
    del cluster.epochs["orders"]
    last = freeze(cluster, plan, now_ms=NOW_MS + 3)
    assert (one(last, "orders").start, one(last, "orders").gaps) == (15, log.gaps)
    assert run_plan.vanished(last, plan) == {}
    # A run that reads while a further leader is elected may have read other records.
    cluster.topics["orders"], cluster.epochs["orders"] = ends(16, epoch=3), [6, 6, 9]
    with pytest.raises(CannotRun, match="truncated while the run read it"):
        planning.check_read(cluster, plan)
    # Retention may delete the new records unread too; a plan of an earlier version has no leader epoch.
    cluster.topics["orders"], cluster.epochs["orders"] = ends(25, start=20, epoch=3), [6, 6, 12]
    log = one(freeze(cluster, plan), "orders")
    assert (log.start, [(gap.first, gap.last, gap.cause) for gap in log.gaps[1:]]) == (
        20,
        [(12, 15, "truncated"), (15, 20, "retention")],
    )
    old = replace(plan, logs=tuple(replace(log, leader_epoch=-1) for log in plan.logs))
    cluster.topics["orders"] = ends(25, epoch=3)
    assert one(freeze(cluster, old), "orders").start == 15


def test_the_offsets_of_a_topic_are_kept_while_it_is_not_audited(cluster: FakeAdmin) -> None:
    first = freeze(cluster, topics=("*",))
    cluster.topics["orders"] = ends(25)
    second = freeze(cluster, first, topics=("others",))
    assert second.topics == ["others"]
    third = freeze(cluster, second, topics=("orders",))
    assert (one(third, "orders").start, one(third, "orders").end) == (10, 25)


def test_a_topic_that_other_options_left_out_is_audited_if_the_lake_names_it(cluster: FakeAdmin) -> None:
    cluster.topics["payments"] = ends(5)
    first = freeze(cluster, topics=("orders",))
    second = freeze(cluster, first, in_lake={"orders", "payments", "not-there"})
    assert second.topics == ["orders", "payments"]
    # From now on the last plan lists the topic.
    assert freeze(cluster, second).topics == ["orders", "payments"]


def test_a_topic_that_only_other_options_named_is_not_audited(cluster: FakeAdmin) -> None:
    first = freeze(cluster, topics=("*",))
    second = freeze(cluster, first, in_lake={"orders"})
    assert (second.topics, second.unwanted) == (["orders"], ["others"])
    third = freeze(cluster, second)
    assert (third.topics, third.unwanted) == (["orders"], ["others"])
    assert one(third, "others").end == 7
    assert freeze(cluster, third, named={"others"}).topics == ["orders", "others"]


def test_a_deleted_topic_stays_selected_and_a_left_out_topic_is_selected_once_it_is_named(
    cluster: FakeAdmin,
) -> None:
    first = freeze(cluster, topics=("*",))
    del cluster.topics["orders"], cluster.topics["others"]
    second = freeze(cluster, first, in_lake={"orders"})
    assert (one(second, "orders").role, one(second, "orders").audited) == (DATA, False)
    assert (second.topics, second.unwanted) == ([], ["others"])
    third = freeze(cluster, second, named={"others"})
    assert (third.topics, third.unwanted) == ([], [])
    cluster.topics["orders"] = ends(12)
    assert freeze(cluster, third).topics == ["orders"]


def test_a_topic_that_is_created_during_the_freeze_is_in_the_same_run(cluster: FakeAdmin) -> None:
    cluster.created_meanwhile["late"] = ends(2)
    plan = freeze(cluster, named={"orders", "late"})
    assert plan.topics == ["late", "orders"]
    # All ends are listed again, those of the data before the ledger's.
    assert cluster.listed_topics[3:] == [
        ["others"],
        ["late", "orders"],
        [LEDGER_TOPIC],
        [REQUESTS_TOPIC],
        ["late", "orders"],
    ]


def test_an_unreachable_topic_fails_a_run_only_if_it_is_named(cluster: FakeAdmin) -> None:
    cluster.unreachable = {"others"}
    first = freeze(cluster, named={"orders"})
    assert [log.topic for log in first.logs] == ["orders", LEDGER_TOPIC, REQUESTS_TOPIC]
    for options in ({"named": {"others"}}, {"rules": '[[topics]]\npattern = "oth*"'}, {"topics": ("others",)}):
        with pytest.raises(CannotRun, match="no leader"):
            freeze(cluster, first, in_lake=set(), **options)


def test_only_audited_topics_are_checked_for_compaction(cluster: FakeAdmin) -> None:
    cluster.topics["compacted"] = ends(5)
    cluster.forbidden = {"others"}
    plan = freeze(cluster, named={"orders", "compacted"})
    assert {log.topic for log in plan.logs if log.compacted} == {"compacted"}
    with pytest.raises(CannotRun, match="not allowed"):
        freeze(cluster, named={"others"})


def test_a_compacted_topic_counts_as_compacted_until_it_is_recreated(
    cluster: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.topics["compacted"] = ends(5)
    first = freeze(cluster, named={"orders", "compacted"})
    monkeypatch.setattr(cluster, "compacted", lambda names: set())
    second = freeze(cluster, first, named={"orders", "compacted"})
    assert {log.topic for log in second.logs if log.compacted} == {"compacted"}
    cluster.topic_ids["compacted"] = "another"
    assert not one(freeze(cluster, second, named={"orders", "compacted"}), "compacted").compacted


def test_the_time_of_an_empty_log_is_dropped_when_its_first_record_was_deleted_unread(cluster: FakeAdmin) -> None:
    cluster.topics["orders"] = ends(0)
    first = freeze(cluster, named={"orders"})
    assert one(first, "orders").first_record_ms == NOW_MS
    cluster.topics["orders"] = ends(9, start=5)
    assert one(freeze(cluster, first), "orders").first_record_ms == 0


def complete_since(plan: Plan, topic: str = LEDGER_TOPIC) -> list[int]:
    return [log.complete_since_ms for log in plan.logs if log.topic == topic]


def test_a_log_is_complete_from_its_oldest_record_on(cluster: FakeAdmin) -> None:
    cluster.topics[LEDGER_TOPIC] = ends(4, start=2)
    cluster.first_timestamps[(LEDGER_TOPIC, 0)] = NOW_MS - 9
    cluster.topics[REQUESTS_TOPIC] = ends(2, start=2)
    plan = freeze(cluster, named={"orders"})
    assert complete_since(plan, "orders") == [0]
    assert complete_since(plan) == [NOW_MS - 9]
    assert complete_since(plan, REQUESTS_TOPIC) == [NOW_MS]
    assert [log.topic for log in plan.of(LEDGER)] == [LEDGER_TOPIC]


def test_a_log_with_its_first_record_is_complete_from_the_oldest_record_of_its_topic_on(cluster: FakeAdmin) -> None:
    """A ledger may be younger than the data; an empty log, or one with deleted records, does not show its beginning."""
    cluster.partitions[LEDGER_TOPIC] = 4
    cluster.other_ends |= {(LEDGER_TOPIC, 2): ends(0), (LEDGER_TOPIC, 3): ends(4, start=2)}
    cluster.first_timestamps |= {(LEDGER_TOPIC, nth): NOW_MS - ms for nth, ms in ((0, 9), (1, 20), (3, 30))}
    first = freeze(cluster, named={"orders"}, now_ms=NOW_MS + 1)
    assert complete_since(first) == [NOW_MS - 20, NOW_MS - 20, NOW_MS - 20, NOW_MS - 30]
    # The time is kept, also for a new partition, until records are deleted unread.
    cluster.partitions[LEDGER_TOPIC] = 5
    cluster.other_ends |= {(LEDGER_TOPIC, 1): ends(9, start=7), (LEDGER_TOPIC, 4): ends(1)}
    cluster.first_timestamps |= {(LEDGER_TOPIC, nth): NOW_MS - 3 for nth in range(5)}
    second = freeze(cluster, first, now_ms=NOW_MS + 2)
    assert complete_since(second) == [NOW_MS - 20, NOW_MS - 3, NOW_MS - 20, NOW_MS - 30, NOW_MS - 20]
    # An earlier version stored 0 for such a log.
    logs = [replace(log, complete_since_ms=0) if log.role == LEDGER else log for log in first.logs]
    old = replace(first, logs=tuple(logs))
    assert complete_since(freeze(cluster, old, now_ms=NOW_MS + 2)) == [
        NOW_MS - 3,
        NOW_MS - 3,
        NOW_MS - 3,
        0,
        NOW_MS - 3,
    ]


def guarantees(plan: Plan) -> list[tuple[int, str]]:
    return [(promise.first, promise.guarantee) for promise in one(plan, "orders").guarantees]


def test_a_topic_keeps_its_guarantee_for_the_records_that_were_written_under_it(cluster: FakeAdmin) -> None:
    rule = '[[topics]]\npattern = "orders"\nguarantee = "{}"'
    idempotent, once = rule.format("idempotent"), rule.format("exactly_once")
    first = freeze(cluster, rules=idempotent)
    assert guarantees(first) == [(0, "idempotent")]
    # The time at which the service began to follow the new rule is unknown: the weaker guarantee applies.
    cluster.topics["orders"] = ends(25, open=3)
    second = freeze(cluster, first, rules=once, in_lake=set())
    assert guarantees(second) == [(0, "idempotent"), (28, "exactly_once")]
    cluster.topics["orders"] = ends(40)
    assert guarantees(freeze(cluster, second, rules=once)) == guarantees(second)
    third = freeze(cluster, second, rules=idempotent, in_lake=set())
    assert guarantees(third) == [*guarantees(second), (25, "idempotent")]
    cluster.topic_ids["orders"] = "two"
    assert guarantees(freeze(cluster, third, rules=once, in_lake=set())) == [(0, "exactly_once")]


class _Read(dict[TopicPartition, Ends]):
    """Ends that record which of them were looked up."""

    def __init__(self, found: Mapping[TopicPartition, Ends], looked_up: set[str]) -> None:
        super().__init__(found)
        self._looked_up = looked_up

    def __getitem__(self, partition: TopicPartition) -> Ends:
        self._looked_up.add(partition[0])
        return super().__getitem__(partition)


def test_the_ends_of_topics_that_nothing_names_are_listed_and_not_read(
    cluster: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end is a request of py4j, and a cluster may have many such topics."""
    whole, looked_up = cluster.ends, set[str]()
    monkeypatch.setattr(cluster, "ends", lambda *given, **more: _Read(whole(*given, **more), looked_up))
    assert freeze(cluster, named={"orders"}).topics == ["orders"]
    assert "others" in cluster.listed_topics[0]
    assert "orders" in looked_up
    assert "others" not in looked_up


def test_events_may_have_been_unread_since_the_last_run_below_whose_ends_all_is_read() -> None:
    """A log with steady traffic is read to the end of an earlier run."""
    logs = (a_log(DATA, "t", 0, caught_up_run=5), a_log(DATA, "t", 1, caught_up_run=3))
    plan = Plan(5, NOW_MS, "", logs)
    reports = [{"run": {"number": number, "frozen_at": f"2026-01-01T0{number}:00:00.001Z"}} for number in (4, 3, 2)]
    third_ms = 1_767_236_400_001
    assert run_plan.caught_up_ms(plan, {"reports": reports, "caught_up_ms": 7}) == third_ms
    assert run_plan.caught_up_ms(plan, {"reports": reports[:1], "caught_up_ms": 7}) == 7
    assert run_plan.caught_up_ms(plan, {"reports": reports[:1], "frozen_ms": 8}) == 8
    assert run_plan.caught_up_ms(plan, None) is None
    assert run_plan.caught_up_ms(replace(plan, logs=logs[:1]), None) == NOW_MS
    given = settings(window_h=2)
    begins_ms = run_plan.window_from(plan, given)
    for last_run, since_ms in (
        (None, begins_ms),
        ({"caught_up_ms": None, "frozen_ms": 1}, begins_ms),
        ({"caught_up_ms": NOW_MS}, begins_ms),
        ({"caught_up_ms": NOW_MS - 9 * HOUR_MS}, NOW_MS - 9 * HOUR_MS - given.max_settle_ms),
        ({"frozen_ms": NOW_MS - 9 * HOUR_MS}, NOW_MS - 9 * HOUR_MS - given.max_settle_ms),
    ):
        assert run_plan.unread_since(plan, given, last_run) == since_ms
        kept_from = maintenance.kept_from(plan, None, settings(window_h=2, keep_days=1), last_run)
        assert kept_from == hours.text_of(min(NOW_MS - 24 * HOUR_MS, since_ms))
        assert maintenance.kept_from(plan, None, given, last_run) == ""
    longer = settings(window_h=72, keep_days=1)
    assert maintenance.kept_from(plan, None, longer, {"caught_up_ms": NOW_MS}) == hours.text_of(NOW_MS - 24 * HOUR_MS)
    late = {"2023-11-01 00:00:00": NOW_MS - HOUR_MS, "2023-10-01 00:00:00": NOW_MS - 5 * HOUR_MS}
    assert (
        maintenance.kept_from(plan, None, settings(window_h=2, keep_days=1), {"late_hours": late, "frozen_ms": NOW_MS})
        == "2023-11-01 00:00:00"
    )


def _unread(cluster: FakeAdmin, given: Settings, last_plan: Plan | None) -> int:
    return planning.count_unread(planning.list_ends(cluster, given, last_plan), given, last_plan)


def test_a_first_run_may_have_to_read_every_topic_that_the_ledger_can_name() -> None:
    cluster = fake_cluster()
    cluster.topics["orders"] = ends(10, start=4, open=9)
    # 6 and 7 of the data, 4 and 2 of ledger and journal; none of the control topic.
    assert _unread(cluster, settings(), None) == 19
    assert _unread(cluster, settings(max_records=5), None) == 5
    assert _unread(cluster, settings(topics=("ord*",)), None) == 12
    assert _unread(cluster, settings(without_topics=("others",)), None) == 12


def test_a_later_run_has_to_read_what_was_appended_to_the_topics_of_the_last_plan() -> None:
    cluster = fake_cluster()
    last_plan = freeze(cluster, named={"orders"})
    assert _unread(cluster, settings(), last_plan) == 0
    cluster.topics |= {"orders": ends(13), "others": ends(90), LEDGER_TOPIC: ends(5)}
    assert _unread(cluster, settings(), last_plan) == 4
    # Retention has deleted records that were not read; a recreated topic may end before the last plan.
    cluster.topics |= {"orders": ends(20, start=18), LEDGER_TOPIC: ends(1)}
    assert _unread(cluster, settings(), last_plan) == 2
    with pytest.raises(NeedsSpark):
        _unread(cluster, settings(without_topics=("others",)), last_plan)
