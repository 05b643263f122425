"""Runnable experiments, one per module."""
