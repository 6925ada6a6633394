"""Sinks with planted faults: PostgreSQL, Delta and Iceberg, fed by a consumer that drops, repeats and dies."""
