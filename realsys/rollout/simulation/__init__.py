"""Simulation of rollouts, training and weight updates in virtual time, with the ledger of real runs."""
