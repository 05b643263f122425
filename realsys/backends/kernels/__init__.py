"""Attention over packed sequences, grouped heads, and linear layers on a CPU."""
