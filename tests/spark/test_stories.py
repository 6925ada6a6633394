"""Stories share their runs, and each fails for itself."""

from unittest.mock import Mock

import pytest

from tests.spark.stories import Stories, Story


def _of_one_run() -> Story:
    yield


def _that_fails_after_it() -> Story:
    yield
    raise ValueError("its second run is not asked for")


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
