"""Rollouts, training and weight updates in virtual time, around the ledger that runs use."""
