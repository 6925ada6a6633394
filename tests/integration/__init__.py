"""Tests the service on real Kafka and Redis, by the records in Kafka."""
