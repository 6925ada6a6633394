"""The command line: what is wrong is said in a line that names it."""

import pytest

from spark.settings import parse

GIVEN = ["--lake", "l", "--report", "r"]


def test_an_identity_is_a_topic_and_an_expression() -> None:
    options = parse([*GIVEN, "--identity", "a=key", "--identity", "b.c=get_json_object(value, '$.id') = 'x=y'"])
    assert options.identity == {"a": "key", "b.c": "get_json_object(value, '$.id') = 'x=y'"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--identity", "orders"], "'orders' is not TOPIC=EXPRESSION"),
        (["--identity", "or ders=key"], "is not TOPIC=EXPRESSION"),
        (["--identity", "a=key", "--identity", "a=value"], "a topic is named twice"),
        (["--keep-days", "0"], "'0' is not an integer of 1 or more"),
        (["--keep-days", "6"], "a report of 168 hours needs 7 days"),
        (["--vacuum-h", "x"], "'x' is not an integer of 1 or more"),
    ],
)
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    with pytest.raises(SystemExit) as left:
        parse([*GIVEN, *arguments])
    assert left.value.code == 2
    assert why in capsys.readouterr().err
