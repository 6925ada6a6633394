"""One suite for the real thing and its fake: what the fake passes, a test that uses it may believe."""
