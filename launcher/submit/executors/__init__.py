"""submitit's executors, as realsys uses them: processes on this machine, and jobs on Slurm."""
