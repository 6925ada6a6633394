"""Tests the local stack itself: what it starts, refuses, and leaves behind."""
