"""Installs what the stack needs, if it is missing: Java, and the jars of Kafka and Spark by their lock files."""
