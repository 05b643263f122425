"""LaunchPlan → trial folder → a running supervisor.

``planning.py`` turns the command line into a plan, ``submit.submit`` writes the folder,
``dispatch_job.py`` submits the job through submitit; ``remake.py`` makes the plan of a resume,
``sweep.py`` several plans.
"""
