"""submitit's executors, adapted: local processes and Slurm jobs."""
