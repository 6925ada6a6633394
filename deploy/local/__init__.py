"""The local stack: real Kafka, real Redis and the service on one machine, for the demo and the tests."""
