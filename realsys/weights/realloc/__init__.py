"""Weights of one copy of a model become those of another copy: who sends what, and the sending."""
