"""What the stack runs on, installed where it is missing: Java, and the jars of Kafka and Spark by their lock files."""
