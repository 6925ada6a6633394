"""Examples of senders, each run by a test."""
