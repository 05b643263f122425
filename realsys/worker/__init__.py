"""What every worker process does, whatever its type: start, register, run, stop.

``main.py`` is the process, ``runner.py`` the life of a worker, ``task.py`` its parent under srun.
"""
