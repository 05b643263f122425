"""Experiment + site → LaunchPlan: every decision and every check before anything starts.

``resolve.resolve`` makes the plan and reports all mistakes at once; ``memory_check.py`` and
``time_predictions.py`` estimate what the plan needs, ``plan_search.py`` looks for a better one.
"""
