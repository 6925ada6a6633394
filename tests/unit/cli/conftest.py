"""Fixtures for the tests of the command line."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_afterwards() -> Iterator[None]:
    """A command turns off the logging of its process, which other tests share."""
    yield
    logging.disable(logging.NOTSET)
