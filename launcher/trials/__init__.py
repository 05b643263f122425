"""Looking after trials: find them, read their records, tell their state.

``status.py`` reads the records; ``trial_state.py`` and ``trial_view.py`` decide from them (pure).
"""
