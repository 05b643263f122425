"""Inspecting trials: find them, read how they stand, show it.

``status.py`` reads a trial: its folder through realsys/trial/trial_reader.py, its store, its processes and
Slurm. ``trial_view.py`` interprets that, realsys/trial/trial_state.py decides the state (both pure).
``await_end.py`` has the loop of all that wait for a trial.
"""
