"""Tests that stories share their runs, and that each fails by itself."""

from unittest.mock import Mock

import pytest

from tests.spark.stories import Stories, Story


def _of_one_run() -> Story:
    yield


def _that_fails_after_it() -> Story:
    yield
    raise ValueError("its second run is not asked for")


def _that_pytest_fails_after_it() -> Story:
    yield
    pytest.fail("its run has another finding")


def _of_two_runs() -> Story:
    yield
    yield


def test_a_story_that_fails_or_lacks_a_run_fails_alone() -> None:
    all_stories = {"one": _of_one_run(), "failing": _that_fails_after_it(), "two": _of_two_runs()}
    stories, audit = Stories(all_stories), Mock()
    stories.run(audit, [{"later_s": 1.0}])
    audit.assert_called_once_with(later_s=1.0)
    stories.check("one")
    with pytest.raises(ValueError, match="second run"):
        stories.check("failing")
    with pytest.raises(AssertionError, match="too few runs"):
        stories.check("two")


def test_a_story_that_pytest_fails_fails_alone() -> None:
    stories = Stories({"failing": _that_pytest_fails_after_it(), "one": _of_one_run()})
    stories.run(Mock(), [{}])
    stories.check("one")
    with pytest.raises(pytest.fail.Exception, match="another finding"):
        stories.check("failing")


@pytest.mark.parametrize("error", [ValueError("no run"), pytest.fail.Exception("no run")], ids=["error", "pytest.fail"])
def test_a_run_that_fails_fails_the_stories_that_wait_for_it(error: BaseException) -> None:
    stories, audit = Stories({"one": _of_one_run(), "two": _of_two_runs()}), Mock(side_effect=[Mock(), error])
    stories.run(audit, [{}, {}, {}])
    assert audit.call_count == 2
    stories.check("one")
    with pytest.raises(type(error), match="no run"):
        stories.check("two")
