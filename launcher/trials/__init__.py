"""Inspecting trials: find them, read their records, determine their state.

``status.py`` reads the records; realsys/trial/trial_state.py and ``trial_view.py`` decide from them (pure).
"""
