"""Cluster specs: where they are, reading them, and checking their text."""
