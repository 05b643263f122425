"""Torch settings and queries that depend on the device of a process."""
