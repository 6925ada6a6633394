"""Sinks with planted faults: a real PostgreSQL and Delta tables, fed by a consumer that drops, repeats and dies."""
