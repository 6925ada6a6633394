"""Tests which keys tell when they were made."""

import pytest

from service.core.problems import Problem
from service.events.key_time import made_at_ms, parse_first_sent


@pytest.mark.parametrize(
    ("key", "made_ms"),
    [
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f", 1_645_557_742_000),  # RFC 9562, appendix A.6
        ("017F22E2-79B0-7CC3-98C4-DC0C0C07398F", 1_645_557_742_000),
        ("00000000-0000-7000-8000-000000000000", 0),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1_469_922_850_259),  # the example of the ULID specification
        ("01arz3ndektsv4rrffq69g5fav", 1_469_922_850_259),
        ("7ZZZZZZZZZZZZZZZZZZZZZZZZZ", 2**48 - 1),
    ],
)
def test_a_key_of_a_kind_with_a_time_tells_it(key: str, made_ms: int) -> None:
    assert made_at_ms(key) == made_ms


@pytest.mark.parametrize(
    "key",
    [
        "",
        "order-7",
        "919108f7-52d1-4320-9bac-f847db4148a8",  # version 4
        "017f22e2-79b0-7cc3-c8c4-dc0c0c07398f",  # another variant
        "017f22e279b07cc398c4dc0c0c07398f",
        "017f22e2-79b0-7cc3-98c4-dc0c0c07398g",
        "\N{ARABIC-INDIC DIGIT ZERO}17f22e2-79b0-7cc3-98c4-dc0c0c07398f",
        "8ZZZZZZZZZZZZZZZZZZZZZZZZZ",  # past the last time of a ULID
        "01ARZ3NDEKTSV4RRFFQ69G5FAU",  # no letter of Crockford's alphabet
        "00000000000000000000000042",  # a number: as a ULID it would be of 1970
        "01ARZ3NDEKTSV4RRFFQ69G5FA",
    ],
)
def test_any_other_key_tells_no_time(key: str) -> None:
    assert made_at_ms(key) is None


def test_when_a_request_was_first_sent() -> None:
    """RFC 9110, section 5.6.7."""
    assert parse_first_sent("Sun, 06 Nov 1994 08:49:37 GMT") == parse_first_sent(" Sun, 06 Nov 1994 08:49:37 GMT\t")
    assert parse_first_sent("Sun, 06 Nov 1994 08:49:37 GMT") == 784_111_777_000


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "784111777",
        "1994-11-06T08:49:37Z",
        "Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
        "Sun, 06 Nov 1994 08:49:37 +0100",
        "Sun, 06 Foo 1994 08:49:37 GMT",
        "Sun, 99 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 25:49:37 GMT",
        "Sun, 06 Nov 0000 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT",
        "Sun, ٠٦ Nov 1994 08:49:37 GMT",
    ],
)
def test_another_form_of_time_is_refused(raw: str) -> None:
    with pytest.raises(Problem, match="invalid-key: Repeatability-First-Sent: send when the request was first sent"):
        parse_first_sent(raw)
