"""Benchmarks on the real stack: `python -m tests.bench NAME`. `./tests/run` does not run them."""
