"""Before a run: memory and time of an allocation, predicted, and a search for a better one. No torch.

``predict.py`` predicts a step, ``placed.py`` is the experiment as the planner sees it.
"""
