"""The service on the real stack, judged by what stands in Kafka."""
