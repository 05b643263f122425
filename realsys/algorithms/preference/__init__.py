"""Losses of a policy that learns from pairs of answers; enter at pair_losses.py."""
