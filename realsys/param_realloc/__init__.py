"""Weights from one parallel layout to another: who holds what, who sends what, the sending."""
