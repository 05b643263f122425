"""Rollouts: agents in environments, and the rules that bound their staleness."""
