"""Losses of a critic, and the scale of what it predicts."""
