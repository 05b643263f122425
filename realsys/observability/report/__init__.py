"""report.html: one page about a trial, made from its folder alone.

``report.py`` is the entry point, ``trial_report.py`` reads the trial.
"""
