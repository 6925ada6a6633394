"""The tests; `./tests/run` installs what they need and runs them, fast ones first."""
