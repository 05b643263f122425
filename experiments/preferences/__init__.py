"""Training on pairs of answers: what both ways share (pair_training.py), a reward model
(reward_training.py), a policy (direct_training.py); and a reward model in the graph of a run
(scored_calls.py).
"""
