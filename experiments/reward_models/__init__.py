"""Reward models: training one (reward_training.py), and one in the graph of a run (scored_calls.py)."""
