"""Cluster specs: finding them, reading them, and checking their text."""
