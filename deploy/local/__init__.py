"""The scripts for one machine, `demo` and `up`."""
