"""How Fencepost is run."""
