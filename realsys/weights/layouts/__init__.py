"""Parallel layouts: what every process of a model copy holds, as boxes of each weight (pure)."""
