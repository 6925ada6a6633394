"""The demo: writes real records during crashes, with Fencepost and without, and audits both."""
