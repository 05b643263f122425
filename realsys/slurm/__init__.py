"""What the launcher and the supervisor both know of Slurm: grammars, srun commands, GPUs. Pure."""
