"""Experiment + site → LaunchPlan: every decision and every check before anything starts.

``resolve.resolve`` makes the plan and reports all mistakes at once; ``memory_check.py`` and
``time_predictions.py`` estimate its memory and time, ``plan_search.py`` searches for a better one.
"""
