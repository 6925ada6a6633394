"""Measurements on the real stack, each by its own command: `python -m tests.bench NAME`. Never part of the tests."""
