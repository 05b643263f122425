"""Reward workers, which score answers for other workers; and the client that these use."""
