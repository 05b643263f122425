"""The launcher's side of Slurm: scripts, submission, queries, diagnosis."""
