"""Runs Fencepost: the local stack, the demo, images and Kubernetes."""
