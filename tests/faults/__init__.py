"""Real faults on real parts."""
