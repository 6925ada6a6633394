"""Injects real faults into real processes, networks, disks and clocks."""
