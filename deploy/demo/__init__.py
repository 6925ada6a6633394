"""The demo: real records through crashes, with Fencepost and without, and the audit of both."""
