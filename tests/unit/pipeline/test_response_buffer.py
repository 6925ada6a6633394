"""Answers of one step are told at its end, in their order, each though another cannot be."""

from functools import partial

import pytest
from structlog.testing import capture_logs

from service.pipeline.response_buffer import ResponseBuffer


def test_outside_of_a_step_an_answer_is_told_at_once_and_raises_by_itself() -> None:
    response_buffer, told = ResponseBuffer(), list[int]()
    response_buffer.put(partial(told.append, 1), dict)
    assert told == [1]
    with pytest.raises(IndexError):
        response_buffer.put(partial(told.pop, 7), dict)


def test_those_of_a_step_are_told_at_its_end_in_their_order() -> None:
    response_buffer, told = ResponseBuffer(), list[int]()
    for start in (0, 10):
        before = list(told)
        with response_buffer.together(2):
            for number in range(start, start + 3):
                response_buffer.put(partial(told.append, number), dict)
            assert told == before
    assert told == [0, 1, 2, 10, 11, 12]
    response_buffer.put(partial(told.append, 20), dict)
    assert told[-1] == 20


def test_one_alone_is_told_at_once() -> None:
    response_buffer, told = ResponseBuffer(), list[int]()
    with response_buffer.together(1):
        response_buffer.put(partial(told.append, 1), dict)
        assert told == [1]


def test_one_that_cannot_be_told_keeps_no_other_from_its_answer_and_is_named_in_the_log() -> None:
    response_buffer, told = ResponseBuffer(), list[int]()
    with capture_logs() as logged, response_buffer.together(3):
        response_buffer.put(partial(told.append, 1), dict)
        response_buffer.put(partial(told.pop, 7), lambda: {"id": "ab12"})
        response_buffer.put(partial(told.append, 2), dict)
    assert told == [1, 2]
    (line,) = logged
    assert (line["event"], line["id"]) == ("an answer was not given", "ab12")


def test_a_step_within_a_step_is_refused() -> None:
    response_buffer = ResponseBuffer()
    with response_buffer.together(2), pytest.raises(AssertionError), response_buffer.together(2):
        pass


def test_a_step_that_fails_has_told_what_it_knew() -> None:
    response_buffer, told = ResponseBuffer(), list[int]()

    def fail() -> None:
        with response_buffer.together(2):
            response_buffer.put(partial(told.append, 1), dict)
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        fail()
    assert told == [1]
    response_buffer.put(partial(told.append, 2), dict)
    assert told == [1, 2]
