"""The one door to Kafka: everything that names aiokafka is in this folder."""
