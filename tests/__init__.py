"""The tests, fast ones first; `./tests/run` installs what they need."""
