"""Predicts memory and time of an allocation before a run, and searches for a better one. No torch.

``predict.py`` predicts a step, ``placed.py`` is the experiment as the planner sees it.
"""
