"""The child process of each worker that keeps its lease and reports whether it makes progress.

``heartbeat_process.py`` is that process; ``heartbeat_link.py`` is the worker's end.
"""
