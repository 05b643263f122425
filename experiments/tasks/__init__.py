"""Tasks besides those of files and generators (experiments/task.py), each found by its kind."""
