"""The command line: each mistake is one line that names the argument."""

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

import spark.__main__
from service.contract import SettingsError, SharedSettings
from spark.cli.command_line import REPAIRED_KINDS, parse, parse_findings, parse_rates, parse_repair
from spark.engine import jars
from spark.errors import CannotRun
from spark.queries import rates, show
from spark.repair import command as repair
from spark.repair.entries import Entry
from spark.repair.invocation import Outcome
from spark.report import model
from spark.settings import FindingsOptions, Options, RatesOptions, RepairOptions, rules_of

GIVEN = ["--lake", "l", "--report", "r"]


def test_an_argument_that_is_left_out_has_the_default_of_its_option() -> None:
    assert parse(GIVEN) == Options(lake="l", report="r")
    lake = ["--lake", "l"]
    assert parse_findings(lake, 0) == FindingsOptions(lake="l")
    assert parse_rates(lake, 0) == RatesOptions(lake="l")
    assert parse_repair(lake, 0) == RepairOptions(lake="l", kinds=REPAIRED_KINDS)


def test_an_identity_is_a_topic_and_an_expression() -> None:
    options = parse([*GIVEN, "--identity", "a=key", "--identity", "b.c=get_json_object(value, '$.id') = 'x=y'"])
    assert options.identity == {"a": "key", "b.c": "get_json_object(value, '$.id') = 'x=y'"}


def test_topics_are_globs_separated_by_commas() -> None:
    options = parse([*GIVEN, "--topics", "a*, b", "--without-topics", "ab,,c.*"])
    assert (options.topics, options.without_topics) == (("a*", "b"), ("ab", "c.*"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--identity", "orders"], "'orders' is not TOPIC=EXPRESSION"),
        (["--identity", "or ders=key"], "is not TOPIC=EXPRESSION"),
        (["--identity", "a=key", "--identity", "a=value"], "a topic is named twice"),
        (["--max-records", "0"], "argument --max-records: '0' is not an integer from 1 to 9223372036854775807"),
        (["--keep-days", "0"], "argument --keep-days: '0' is not an integer from 1 to 36500"),
        (["--keep-days", "6"], "a report of 168 hours needs 7 days"),
        (["--vacuum-h", "x"], "argument --vacuum-h: 'x' is not an integer from 1 to 876000"),
        # A time before the year 1 cannot be formatted.
        (["--window-h", "100000000"], "argument --window-h: '100000000' is not an integer from 1 to 876000"),
        (["--window-h", "1" * 5000], "1' is not an integer from 1 to 876000"),
        (["--keep-days", "36501"], "argument --keep-days: '36501' is not an integer from 1 to 36500"),
        (["--grace-s", "9" * 19], "argument --grace-s: '9999999999999999999' is not an integer from 0 to 3153600000"),
        (["--follow", "--pause-s", "61"], "argument --pause-s: '61' is not an integer from 5 to 60"),
        (["--follow", "--dry-run"], "argument --follow: leave out --dry-run and --recheck-sinks"),
        (["--alive-file", "f"], "argument --alive-file: give it with --follow"),
        (["--webhook-secret", "f"], "argument --webhook-secret: give it with --webhook"),
        (["--vacuum-h", "876001"], "argument --vacuum-h: '876001' is not an integer from 1 to 876000"),
    ],
)
def test_a_wrong_argument_exits_with_2_and_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as left:
        parse([*GIVEN, *arguments])
    assert left.value.code == 2
    assert why in capsys.readouterr().err


VIEW = ["view", "orders", "--lake", "l"]
SHOW = ["show", "a-key", "--lake", "l"]
LEFT = Outcome(1, [Entry(finding_id="lost:i", kind="lost", id="i")], [], is_left=True)
NAMESPACE = ("NAMESPACE", "x" * 249, "set 1 to 240 of letters, digits, '.', '_' and '-'")


@pytest.mark.parametrize(
    ("command", "name", "text", "why"),
    [
        (GIVEN, *NAMESPACE),
        (VIEW, *NAMESPACE),
        (SHOW, *NAMESPACE),
        (GIVEN, "KAFKA", "nowhere", "FENCEPOST_KAFKA='nowhere' is wrong: set host:port, several separated by commas"),
        (GIVEN, "RULES", "rules.toml", "rules.toml:1: topics: write [[topics]], once for each"),
        (GIVEN, "RULES", "no.toml", "'no.toml'; set the path of a TOML file, or leave it empty"),
    ],
)
def test_a_wrong_setting_is_reported_in_a_line_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: list[str],
    name: str,
    text: str,
    why: str,
) -> None:
    """The environment is that of the service. Only a run reads the rules."""
    (tmp_path / "rules.toml").write_text("topics = [1]\n")
    monkeypatch.setattr(spark.__main__, "open_session", Mock(side_effect=AssertionError("Spark was started")))
    monkeypatch.setattr("sys.argv", ["spark", *command])
    monkeypatch.setenv(f"FENCEPOST_{name}", text)
    monkeypatch.chdir(tmp_path)
    assert spark.__main__.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cannot run: ")
    assert line.endswith(why)


@pytest.mark.parametrize(
    "gone", [Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError(), FileNotFoundError("/tls/ca")]
)
def test_a_jvm_that_died_or_a_file_that_is_gone_exits_with_2_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gone: Exception
) -> None:
    monkeypatch.setattr(spark.__main__, "open_session", Mock(side_effect=gone))
    monkeypatch.setattr("sys.argv", ["spark", *GIVEN])
    assert spark.__main__.main() == 2
    assert "cannot run: Spark or a file failed, see above" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "module", "function", "result", "status"),
    [
        (SHOW, show, "show", ["line"], 0),
        (["rates", "--lake", "l"], rates, "rates", ["line"], 0),
        (["repair", "--lake", "l"], repair, "carry_out", LEFT, 3),
        (["schema"], model, "schema", {}, 0),
    ],
)
def test_a_reader_that_has_enough_fails_no_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    module: object,
    function: str,
    result: object,
    status: int,
) -> None:
    """As in `| head`. A repair that was executed must not look as if it had to be started again."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(spark.__main__, "open_session", Mock())
    monkeypatch.setattr(module, function, Mock(return_value=result))
    monkeypatch.setattr("sys.argv", ["spark", *command])
    with os.fdopen(writing, "w", encoding="utf-8") as closed, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", closed)
        assert spark.__main__.main() == status
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command", [["run", "--report", "r"], ["view", "t"], ["show", "k"], ["findings"], ["rates"], ["repair"]]
)
def test_each_command_opens_a_session_with_the_jars_for_its_lake(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Without the URL of a lake on S3 Spark's class path would lack what opens it."""
    opened = Mock(side_effect=CannotRun("opened"))
    monkeypatch.setattr(spark.__main__, "open_session", opened)
    monkeypatch.setattr("sys.argv", ["spark", *command, "--lake", "s3a://bucket/lake"])
    assert spark.__main__.main() == 2
    assert "s3a://bucket/lake" in opened.call_args.kwargs["urls"]


SINK = (
    '[[sinks]]\nname = "a"\ntopics = ["t"]\nformat = "delta"\npath = "p"\nid = "id"\nevent_time = "at"\nlate_s = 60\n'
)


def test_an_event_does_not_leave_the_window_before_it_must_be_in_a_sink(tmp_path: Path) -> None:
    (tmp_path / "sinks.toml").write_text(SINK.replace("late_s = 60", "late_s = 604720"))  # a week, less the timeouts
    shared, options = SharedSettings(), parse([*GIVEN, "--sinks", str(tmp_path / "sinks.toml")])
    with pytest.raises(SettingsError, match=r"'a': late_s = 604720 .* 168 hours.* give --window-h 169 or more"):
        rules_of(shared, options)
    (sink,) = rules_of(shared, replace(options, window_h=169)).sinks
    assert sink.late_s == 604_720
    assert rules_of(shared, replace(options, grace_s=59)).sinks == (sink,)


def test_sinks_of_a_file_take_the_place_of_those_in_the_rules(tmp_path: Path) -> None:
    rules, sinks = tmp_path / "rules.toml", tmp_path / "sinks.toml"
    rules.write_text(f'[[topics]]\npattern = "t"\n{SINK}')
    sinks.write_text(SINK.replace('"a"', '"b"'))
    shared = SharedSettings(rules=str(rules))
    assert [sink.name for sink in rules_of(shared, parse(GIVEN)).sinks] == ["a"]
    read = rules_of(shared, parse([*GIVEN, "--sinks", str(sinks)]))
    assert ([sink.name for sink in read.sinks], [rule.pattern for rule in read.topics]) == (["b"], ["t"])
    with pytest.raises(SettingsError, match=r"rules.toml: write \[\[sinks\]\] only; other rules belong into "):
        rules_of(shared, parse([*GIVEN, "--sinks", str(rules)]))


def test_the_session_can_read_a_sink_on_s3_where_the_lake_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sinks = tmp_path / "sinks.toml"
    sinks.write_text(SINK.replace('path = "p"', 'path = "s3a://warehouse/orders"'))
    opened = Mock(side_effect=CannotRun("no session"))
    monkeypatch.setattr(spark.__main__, "open_session", opened)
    monkeypatch.setattr("sys.argv", ["spark", *GIVEN, "--sinks", str(sinks)])
    assert spark.__main__.main() == 2
    assert jars.needs_s3(opened.call_args.kwargs["urls"])
