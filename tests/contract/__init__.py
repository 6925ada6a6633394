"""Runs one suite on the real thing and on its fake, so that tests with the fake can rely on it."""
