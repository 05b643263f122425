"""Losses of a policy's tokens, and weights for answers of another policy."""
