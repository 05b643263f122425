"""One supervisor per attempt: starts the workers, watches them, writes the exit marker.

``job_entry.py`` is a job's first process, ``supervisor.py`` runs the phases in order.
"""
